"""docs/config.md and docs/config.schema.json say what the schema says."""

import json
from pathlib import Path

import jsonschema
import pytest

from flextrain.config.docs import json_schema, main, page
from flextrain.config.schema import Config

DOCS = Path(__file__).parents[3] / "docs"
REMEDY = "run: python -m flextrain.config.docs --write"


def test_the_page_is_current() -> None:
    assert (DOCS / "config.md").read_text(encoding="utf-8") == page(), REMEDY


def test_the_json_schema_is_current() -> None:
    assert json.loads((DOCS / "config.schema.json").read_text(encoding="utf-8")) == json_schema(), REMEDY


def test_the_page_shows_every_key_with_its_meaning() -> None:
    text = page()
    for section, outer in Config.model_fields.items():
        assert f"\n## {section}\n" in text
        for key, field in outer.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, f"{section}.{key} has no description"
            assert f"| `{key}`" in text


def test_the_json_schema_accepts_the_defaults_and_aliases_and_refuses_unknown_keys() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.validate(Config().model_dump(mode="json"))
    validator.validate({"training": {"lr": 1e-4}, "checkpoint": {"s3_bucket": "b"}})
    with pytest.raises(jsonschema.ValidationError, match="learning_rte"):
        validator.validate({"training": {"learning_rte": 1e-4}})


def test_write_puts_both_files_into_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--write"]) == 0
    assert sorted(p.name for p in (tmp_path / "docs").iterdir()) == ["config.md", "config.schema.json"]
