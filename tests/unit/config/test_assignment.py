"""Mistakes in Python: assignment is checked like loading, and a refused value leaves nothing behind."""

import pytest

from flextrain.config import Config, ModelConfig
from flextrain.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("training", "batch_size", 0, "`batch_size` is 0; expected a whole number >= 1: sequences per rank"),
        ("training", "batch_size", True, "true and false are no numbers"),
        ("training", "batchsize", 1, "unknown key `batchsize`. Did you mean `batch_size`?"),
        ("training", "lr", 1e-3, "Did you mean `learning_rate`?"),
        ("training", "max_steps", None, "one of max_steps and epochs must be given"),
        ("training", "weight_decay", float("inf"), "`weight_decay` is Infinity; expected a number >= 0"),
        ("model", "num_heads", 5, "num_heads 5 does not divide d_model 128"),
        ("model", "preset", "gpt2-124m", "`preset` cannot change after construction"),
        ("distributed", "strategy", "ddpp", "Did you mean `ddp`?"),
        ("cost", "prices", [{"instance_type": "a"}], "`prices[0].as_of` is missing; expected a date"),
    ],
)
def test_a_refused_assignment_names_key_and_reason_and_changes_nothing(
    section: str, key: str, value: object, said: str
) -> None:
    config = Config()
    with pytest.raises(ConfigError) as caught:
        setattr(getattr(config, section), key, value)
    assert said in str(caught.value)
    assert type(getattr(config, section)).__name__ in str(caught.value)
    assert config == Config()


def test_accepted_assignments_are_converted() -> None:
    config = Config()
    config.training.learning_rate = 1
    config.distributed.mixed_precision = True  # type: ignore[assignment]
    assert (config.training.learning_rate, config.distributed.mixed_precision) == (1.0, "bf16")


def test_assignment_beside_a_preset_keeps_the_preset() -> None:
    model = ModelConfig(preset="gpt2-124m")
    model.num_layers = 2
    assert (model.num_layers, model.d_model, model.positions) == (2, 768, "learned")
