"""Text in, trained model and bill out: index → train on a gang of nodes → evaluate → cost report.

    python flows/train_flow.py run                                   the embedded default: two nodes on this machine
    python flows/train_flow.py --config config FILE run --num-nodes 4
    python flows/train_flow.py --config-value config 'training: {max_steps: 20}' run
    python flows/train_flow.py run --checkpoint-resume               go on from the experiment's newest checkpoint
    python flows/train_flow.py resume                                repeat the last run from the step that failed

Options of the run follow `run`, the configuration comes before it.
"""

from metaflow import Config, FlowSpec, Parameter, card, config_expr, parallel, retry, step

from flextrain.cli import steps
from flextrain.flowkit.cards import CARD_TYPE
from flextrain.flowkit.entry import run_flow
from flextrain.flowkit.kube import kubernetes_from_config


@kubernetes_from_config
class TrainFlow(FlowSpec):
    config = Config("config", default_value={}, parser=steps.read_config, help="YAML file or text; see docs/config.md")
    num_nodes = Parameter("num-nodes", default=config_expr("config.flow.num_nodes"), type=int, help="nodes that train")
    use_spot_instances = Parameter(
        "use-spot-instances", default=False, type=bool, is_flag=True, help="pay (and on Kubernetes: ask for) spot nodes"
    )
    checkpoint_resume = Parameter(
        "checkpoint-resume",
        default=False,
        type=bool,
        is_flag=True,
        help="go on from the newest checkpoint that an earlier run of main.experiment_name left",
    )

    @step
    def start(self):
        """Settle where the run lives, on what capacity, and where it goes on from."""
        self.launch = steps.start(self.config, self.num_nodes, self.use_spot_instances, self.checkpoint_resume)
        self.next(self.build_index)

    @step
    def build_index(self):
        """Text to a token index, or the one that is there."""
        self.index_ref = steps.build_index(self.config, self.launch)
        self.next(self.train, num_parallel=self.launch.num_nodes)

    @card(type=CARD_TYPE, id="training")
    @retry(times=config_expr("config.flow.retries"), minutes_between_retries=0)
    @parallel
    @step
    def train(self):
        """One agent per node; a retry resumes from the newest checkpoint."""
        self.train_ref = steps.train(self.config, self.launch, self.index_ref)
        self.next(self.join)

    @step
    def join(self, inputs):
        """The gang's result is node 0's."""
        self.merge_artifacts(inputs, exclude=["train_ref"])
        self.train_ref = inputs[0].train_ref
        self.next(self.evaluate)

    @card(type=CARD_TYPE, id="evaluation")
    @step
    def evaluate(self):
        """Score held-out text in a process of its own."""
        self.report = steps.evaluate(self.config, self.launch, self.train_ref, self.index_ref)
        self.next(self.cost_report)

    @card(type=CARD_TYPE, id="cost")
    @step
    def cost_report(self):
        """What the run's node-seconds cost."""
        self.cost = steps.cost_report(self.config, self.launch, self.train_ref)
        self.next(self.end)

    @step
    def end(self):
        """Print the summary and where to look next."""
        steps.end(self.train_ref, self.report, self.cost)


if __name__ == "__main__":
    run_flow(TrainFlow)
