"""Train a small decoder on this Python's own library sources: text, index, model, trainer, in that order.

python quickstart.py
python quickstart.py --training.max_steps=20 --data.sources='[my/*.txt]'      any key of docs/config.md
"""

import sys

from flextrain import Config, DistributedTrainer
from flextrain.config import parse_config
from flextrain.data import ResumableDataset
from flextrain.data.index_builder import ensure_index
from flextrain.errors import FlextrainError
from flextrain.model import build_model


def main(flags: list[str]) -> None:
    config = Config()
    config.main.experiment_name = "quickstart"
    config.training.batch_size = 32
    config.training.learning_rate = 3e-3
    config.training.max_steps = 100
    config = parse_config(config.model_dump_json(), overrides=flags)

    index_uri, _ = ensure_index(config.data, config.main.output_dir)  # tokenizes once; later runs find it built
    dataset = ResumableDataset(index_file=index_uri, seq_length=config.data.seq_length, seed=config.main.seed)
    model = build_model(
        config.model, vocab_size=dataset.index.vocab_size, seq_length=config.data.seq_length, seed=config.main.seed
    )

    trainer = DistributedTrainer(model=model, config=config, train_dataset=dataset)
    metrics = trainer.train()

    if trainer.world.is_main:
        print(f"loss {metrics['loss']:.4f} nats per token after step {metrics['step']}, {metrics['tokens']:,} tokens")
        print(f"next:  flextrain evaluate {metrics['checkpoint']['url']} --index {index_uri}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FlextrainError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
