"""YAML and `--section.key=value` flags into a Config, with every mistake reported at once and in its place."""

import difflib
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flextrain.config.explain import KeyPath, SchemaWords, did_you_mean, explain_error, show
from flextrain.config.schema import Config
from flextrain.config.section import Section, canonical_value
from flextrain.config.source import Document, Place, Problem, read_yaml
from flextrain.errors import ConfigError

MAX_FILE_BYTES = 1_000_000


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file (None: the defaults), changed by `--section.key=value` flags.

    Raises ConfigError: FT-CFG-001 for wrong keys and values, 002 for text that is no YAML, 003 for an unreadable file.
    """
    return parse_config("", overrides=overrides) if path is None else parse_config(_read(path), str(path), overrides)


def parse_config(text: str, source: str = "config", overrides: Sequence[str] = ()) -> Config:
    """The configuration in YAML text; `source` is its name in messages. Empty text means the defaults.

    Later flags win over earlier ones, and flags over the text. Raises ConfigError as `load_config` does.
    """
    document = read_yaml(text, source)
    if document.values is None:
        document.values = {}
    if not isinstance(document.values, dict):
        document.refuse(
            (), f"the top level is {show(document.values)}; expected sections such as `training:` with keys"
        )
        document.values = {}
    _tidy(document)
    for flag in overrides:
        _override(document, flag)
    config, problems = _validate(document)
    problems = [*document.problems, *problems]
    if config is None or problems:
        raise _mistakes(problems, source)
    return config


def config_digest(config: Config) -> str:
    """sha256 (hex) of the configuration's canonical JSON: equal for equal values, however they were written."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def schema_words() -> SchemaWords:
    return SchemaWords(Config.model_json_schema())


@functools.cache
def aliases() -> dict[tuple[str, str], str]:
    """(section, alias) -> canonical key."""
    sections = {name: outer.annotation for name, outer in Config.model_fields.items()}
    return {
        (name, alias): key
        for name, section in sections.items()
        if isinstance(section, type) and issubclass(section, Section)
        for alias, key in section.aliases().items()
    }


def _read(path: str | Path) -> str:
    data = _read_bytes(path)
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(path, f"this is larger than {MAX_FILE_BYTES:,} bytes", "name the configuration, not the data")
    if b"\0" in data:
        raise _unreadable(path, "this is a binary file", "name a YAML file, as UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"this is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})"
        raise _unreadable(path, what, "name a YAML file, or save this one as UTF-8") from None
    if not text.strip():
        remedy = "write a section such as `training:`, or name no file to run the defaults"
        raise _unreadable(path, "the file is empty", remedy)
    return text


def _read_bytes(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        near = difflib.get_close_matches(Path(path).name, _yaml_names(Path(path).parent), 1, 0.6)
        hint = did_you_mean([str(Path(path).parent / name) for name in near])
        raise _unreadable(path, f"there is no such file.{hint}", "check the path") from None
    except IsADirectoryError:
        raise _unreadable(path, "this is a folder", "name the YAML file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _unreadable(path, f"cannot be read: {reason}", "check the path and its permissions") from None


def _unreadable(path: str | Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{path}: {what}", number=3, remedy=remedy)


def _yaml_names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _tidy(document: Document) -> None:
    """Empty sections become {}, aliases their canonical names; an alias beside its canonical name is a problem."""
    for section, values in document.values.items():
        if values is None:
            document.values[section] = {}
    for (section, alias), key in aliases().items():
        values = document.values.get(section)
        if isinstance(values, dict) and alias in values:
            path: KeyPath = (section, alias)
            if key in values:
                message = f"`{section}.{alias}` means `{section}.{key}`, which is given as well; keep one of them"
                document.refuse(path, message, key=True)
            document.key_places[section, key] = document.place(path, key=True)
            document.value_places[section, key] = document.place(path)
            values[key] = canonical_value(alias, values.pop(alias))


def _override(document: Document, flag: str) -> None:
    """Set what `--section.key=value` says, or note what is wrong with it."""
    place = Place(flag)
    name, equals, text = flag.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not (dot and equals and section and key) or "." in key:
        near = schema_words().nearest((name,)) if name and not dot else []
        hint = did_you_mean([f"--{full}={text}" for full in near])
        document.problems.append(Problem(place, f"expected --section.key=value.{hint}"))
        return
    try:
        read = read_yaml(text, flag)
    except ConfigError:
        document.problems.append(Problem(place, f"`{text}` is not a YAML value; put it in quotes"))
        return
    document.problems += [Problem(place, problem.message) for problem in read.problems]
    canonical = aliases().get((section, key), key)
    values = document.values.setdefault(section, {})
    if isinstance(values, dict):
        values[canonical] = canonical_value(key, read.values)
        document.key_places.setdefault((section,), place)
        _forget(document, (section, canonical))
        document.key_places[section, canonical] = document.value_places[section, canonical] = place


def _forget(document: Document, path: KeyPath) -> None:
    for places in (document.key_places, document.value_places):
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]


def _validate(document: Document) -> tuple[Config | None, list[Problem]]:
    try:
        return Config.model_validate(document.values), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    broken = {str(item["loc"][0]) for item in errors if item["loc"]}
    errors += _across_sections(document.values, broken) if broken else []
    return None, [Problem(_place_of(item, document), explain_error(schema_words(), item)) for item in errors]


def _across_sections(values: dict[str, Any], broken: set[str]) -> list[Any]:
    """Errors between sound sections, which pydantic looks for only once every section is sound."""
    try:
        Config.model_validate({section: value for section, value in values.items() if section not in broken})
    except ValidationError as error:
        return [item for item in error.errors() if not any(f"{name}." in item["msg"] for name in broken)]
    return []


def _place_of(error: Any, document: Document) -> Place:
    path: KeyPath = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return document.place(path, key=True)
    if error["type"] == "value_error" and len(path) < 2:
        return _place_of_first_name(error["msg"], path, document)
    return document.place(path)


def _place_of_first_name(message: str, section: KeyPath, document: Document) -> Place:
    """A validator over several keys names them in its message: point at the first that is written somewhere."""
    for word in re.findall(r"\w+(?:\.\w+)?", message):
        path = (*section, *word.split("."))
        if len(path) == 2 and path in document.value_places:
            return document.value_places[path]
    return document.place(section, key=True)


def _mistakes(problems: list[Problem], source: str) -> ConfigError:
    unique = {(str(problem.place), problem.message): problem for problem in problems}
    ordered = sorted(unique.values(), key=lambda p: (not p.place.line, p.place.line, p.place.column))
    text = "\n\n".join(map(str, ordered))
    if len(ordered) > 1:
        text = f"{len(ordered)} mistakes in {source}\n\n{text}\n"
    return ConfigError(text, number=1, remedy="`python -m flextrain.config.docs` lists every key with its meaning")
