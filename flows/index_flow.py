"""Only the token index: the corpus of a configuration, tokenized once and used by every later run.

python flows/index_flow.py run
python flows/index_flow.py --config config FILE run --out s3://bucket/indexes/corpus
"""

from metaflow import Config, FlowSpec, Parameter, step

from flextrain.cli import steps
from flextrain.flowkit.entry import run_flow
from flextrain.flowkit.kube import kubernetes_from_config


@kubernetes_from_config
class IndexFlow(FlowSpec):
    config = Config("config", default_value={}, parser=steps.read_config, help="YAML file or text; see docs/config.md")
    out = Parameter("out", default="", help="folder or URL to write; by default where train_flow.py looks")

    @step
    def start(self):
        """Settle where indexes live."""
        self.launch = steps.start(self.config)
        self.next(self.build_index)

    @step
    def build_index(self):
        """Text to a token index, or the one that is there."""
        self.index_ref = steps.build_index(self.config, self.launch, self.out)
        self.next(self.end)

    @step
    def end(self):
        """Print where the index is."""
        steps.end_index(self.index_ref)


if __name__ == "__main__":
    run_flow(IndexFlow)
