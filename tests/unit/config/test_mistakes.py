"""Messages: all mistakes at once, in the order of the file, each with line, carets and what was expected."""

from pathlib import Path

import pytest

from flextrain.config import load_config, parse_config
from flextrain.errors import ConfigError


def refusal(text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml", flags)
    return caught.value.render()


def test_one_mistake_reads_exactly_so() -> None:
    assert refusal("# run\ntraining:\n  batch_size: 0\n") == (
        "[FT-CFG-001] c.yaml:3:15: `training.batch_size` is 0; expected a whole number >= 1: "
        "sequences per rank in one forward pass (the micro-batch)\n"
        "     3 |   batch_size: 0\n"
        "       |               ^\n"
        "  → `python -m flextrain.config.docs` lists every key with its meaning"
    )


def test_all_mistakes_come_at_once_in_the_order_of_the_file_flags_last() -> None:
    text = "training:\n  learning_rte: 1\n  batch_size: 0\n  batch_size: 2\nlr: 1\ncost: {instance_type: zz}\n"
    said = refusal(text, "--main.seed=-1", "--oops", "--data.seq_length=0")
    assert said.startswith("[FT-CFG-001] 7 mistakes in c.yaml\n")
    places = [line.split(": ")[0] for line in said.splitlines() if line.startswith(("c.yaml:", "--"))]
    assert places[:4] == ["c.yaml:2:3", "c.yaml:4:3", "c.yaml:5:1", "c.yaml:6:23"]
    assert sorted(places[4:]) == ["--data.seq_length=0", "--main.seed=-1", "--oops"]


def test_a_mistake_between_sound_sections_is_not_hidden_by_a_broken_one() -> None:
    assert "cost.instance_type 'zz' has no row" in refusal("cost: {instance_type: zz}\ntraining: {batch_size: 0}\n")
    assert "has no row" not in refusal("cost: {instance_type: zz, capacity: some}\n")  # prices may be what is wrong


def test_a_flag_that_is_wrong_is_its_own_place_even_over_a_line_of_the_file() -> None:
    said = refusal("data: {sources: [a, 5]}", "--data.sources=[b, 6]")
    assert said.startswith("[FT-CFG-001] --data.sources=[b, 6]: `data.sources[1]` is 6; expected text")


def test_carets_stay_below_their_text_in_long_lines_and_after_tabs() -> None:
    said = refusal(f"data: {{sources: [{'x' * 500}, 5]}}").splitlines()
    assert said[1].index("5") == said[2].index("^")
    assert len(said[1]) < 130
    said = refusal('data: {text_key: "a\tb", seq_length: -1}').splitlines()
    assert said[1].index("-1") == said[2].index("^^")


def test_a_known_name_in_the_wrong_section_is_found() -> None:
    assert "Did you mean `checkpoint.keep_last_n`?" in refusal("training: {keep_last: 3}")
    assert "Did you mean `training.batch_size` or `evaluation.batch_size`?" in refusal("batch_size: 3")
    assert "Did you mean `training.batch_size`?" in refusal("", "--training.Batch-Size=3")


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training: {}\n")
    with pytest.raises(ConfigError, match=r"Did you mean `.*config\.yaml`\?"):
        load_config(tmp_path / "confg.yml")
