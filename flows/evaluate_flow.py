"""Only the evaluation: a checkpoint, scored on the held-out text of an index.

python flows/evaluate_flow.py run --checkpoint runs/default/17/checkpoints/step-00000150 --index runs/indexes/DIGEST
python flows/evaluate_flow.py --config config FILE run --checkpoint s3://… --index s3://…
"""

from metaflow import Config, FlowSpec, Parameter, card, step

from flextrain.cli import steps
from flextrain.flowkit.cards import CARD_TYPE
from flextrain.flowkit.entry import run_flow
from flextrain.flowkit.kube import kubernetes_from_config


@kubernetes_from_config
class EvaluateFlow(FlowSpec):
    config = Config("config", default_value={}, parser=steps.read_config, help="YAML file or text; see docs/config.md")
    checkpoint = Parameter("checkpoint", required=True, help="folder or URL of one checkpoint, …/step-00000150")
    index_uri = Parameter("index", required=True, help="folder or URL of the token index")

    @step
    def start(self):
        """Nothing to settle: the checkpoint and the index are named."""
        self.next(self.evaluate)

    @card(type=CARD_TYPE, id="evaluation")
    @step
    def evaluate(self):
        """Score held-out text."""
        self.report = steps.evaluate_alone(self.config, self.checkpoint, self.index_uri)
        self.next(self.end)

    @step
    def end(self):
        """Print the figures."""
        steps.end_evaluation(self.report)


if __name__ == "__main__":
    run_flow(EvaluateFlow)
