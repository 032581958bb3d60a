"""What a correct configuration becomes, however it was written."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flextrain.config import Config, config_digest, load_config, parse_config
from flextrain.config.load import aliases
from flextrain.errors import ConfigError


def test_no_file_and_empty_text_are_the_defaults() -> None:
    assert load_config(None) == parse_config("") == parse_config("# all comments\n") == Config()


def test_empty_section_is_its_defaults() -> None:
    assert parse_config("training:\n  # lr: 1e-3\ncheckpoint:\n") == Config()


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.1e-3", ".1e-3", "1.0e-04", "+1e-4", "0.0001", "100e-6"])
def test_numbers_with_exponents_are_numbers(text: str) -> None:
    assert parse_config(f"training: {{learning_rate: {text}}}").training.learning_rate == 1e-4


def test_text_that_only_resembles_a_number_stays_text() -> None:
    config = parse_config("main: {experiment_name: e4}\ndata: {tokenizer: 1e4x, text_key: 2026-02-30}")
    assert (config.main.experiment_name, config.data.tokenizer, config.data.text_key) == ("e4", "1e4x", "2026-02-30")


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbftraining:\r\n  batch_size: 3\r\n")
    assert load_config(tmp_path / "a.yaml").training.batch_size == 3


def test_yaml_words_for_true_and_false() -> None:
    config = parse_config("tracking: {wandb: off}\ndistributed: {mixed_precision: true}\nmodel: {tie_head: no}")
    assert (config.tracking.wandb, config.distributed.mixed_precision, config.model.tie_head) == ("off", "bf16", False)


@pytest.mark.parametrize(
    ("section", "alias", "key"),
    [
        ("training", "lr", "learning_rate"),
        ("checkpoint", "checkpoint_interval", "interval"),
        ("checkpoint", "keep_last", "keep_last_n"),
        ("checkpoint", "s3_bucket", "storage"),
    ],
)
def test_promised_aliases(section: str, alias: str, key: str) -> None:
    assert aliases()[section, alias] == key
    canonical = getattr(getattr(parse_config(f"{section}: {{{alias}: 7}}" if key != "storage" else ""), section), key)
    assert canonical == (7 if key != "storage" else None)


def test_a_bare_bucket_becomes_a_url_and_a_url_stays_one() -> None:
    assert parse_config("checkpoint: {s3_bucket: my-bucket}").checkpoint.storage == "s3://my-bucket"
    assert parse_config("checkpoint: {s3_bucket: gs://b/p}").checkpoint.storage == "gs://b/p"
    assert parse_config("", overrides=["--checkpoint.s3_bucket=b"]).checkpoint.storage == "s3://b"
    assert parse_config("checkpoint: {storage: folder}").checkpoint.storage == "folder"


def test_flags_win_over_the_file_and_later_ones_over_earlier() -> None:
    flags = ["--training.batch_size=5", "--training.batch_size=6", "--training.learning_rate=1e-3"]
    training = parse_config("training: {batch_size: 4, lr: 1, max_steps: 9}", overrides=flags).training
    assert (training.batch_size, training.learning_rate, training.max_steps) == (6, 1e-3, 9)


def test_a_flag_repairs_a_wrong_value_in_the_file() -> None:
    assert parse_config("data: {sources: 5}", overrides=["--data.sources=[a.txt]"]).data.sources == ["a.txt"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--data.sources=[a, 'b c']", ["a", "b c"]),
        ("--data.index=null", None),
        ("--data.index=", None),
        ("--data.seq_length=12", 12),
    ],
)
def test_flag_values_are_yaml(flag: str, value: object) -> None:
    key = flag.partition("=")[0].split(".")[1]
    assert getattr(parse_config("", overrides=[flag]).data, key) == value


def test_digest_depends_on_values_only() -> None:
    written = parse_config("training:\n  lr: 1e-4\n  batch_size: 4\n")
    assert config_digest(written) == config_digest(parse_config("{training: {batch_size: 4, learning_rate: 0.0001}}"))
    assert config_digest(written) != config_digest(Config())
    assert len(config_digest(written)) == 64


# PyYAML writes the text 1e-4 without quotes; here, as in YAML 1.2, it is a number then.
TEXT = st.text().filter(lambda text: not re.fullmatch(r"[-+]?[\d_.]+[eE][-+]?\d+", text))
SAMPLES = st.fixed_dictionaries(
    {
        "training": st.fixed_dictionaries(
            {"lr": st.floats(1e-12, 1e3), "batch_size": st.integers(1, 10**6), "epochs": st.none() | st.floats(0.1, 9)}
        ),
        "data": st.fixed_dictionaries({"sources": st.lists(st.text("ab*/: #'\"é-", min_size=1), min_size=1)}),
        "model": st.sampled_from([{"preset": "gpt2-124m"}, {"preset": "llama-7b", "num_layers": 2}, {}]),
        "flow": st.fixed_dictionaries({"spot_node_selector": st.dictionaries(st.text("xyz./", min_size=1), TEXT)}),
    }
)


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_a_dumped_configuration_loads_as_itself(values: dict[str, object]) -> None:
    config = parse_config(yaml.safe_dump(values, allow_unicode=True))
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


WORDS = ["training", "model", "lr", "cost", "prices", "1e-4", "null", "true", "2026-99-99", "0x", "<<", "!!map", "&a"]
MARKS = ["*a", ":", "-", "[", "]", "{", "}", ",", "?", "'", '"', "|", ">", "#", "%", "é", " ", ": ", "\n", "\n  ", "\t"]
YAML_PIECES = st.lists(st.sampled_from([*WORDS, *MARKS, "\x07"]), max_size=25).map("".join)


@given(YAML_PIECES | st.text(max_size=60), st.lists(st.text(max_size=20).map("--training.".__add__), max_size=2))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_configuration_or_a_config_error(text: str, flags: list[str]) -> None:
    try:
        config = parse_config(text, "the text", flags)
    except ConfigError as error:
        config, said = None, str(error)
    assert isinstance(config, Config) or "the text" in said or "--training." in said
