"""YAML text as plain values that remember where each stood, so that an error can point at it."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from flextrain.config.explain import KeyPath, dotted
from flextrain.errors import ConfigError

SHOWN_COLUMNS = 110  # of an offending line; longer ones are cut around the caret


@dataclass(frozen=True)
class Place:
    """Where something is written: a file's line and column, both from 1, or a flag, which has neither."""

    source: str
    line: int = 0
    column: int = 0
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def excerpt(self) -> str:
        """The line with carets below what is meant; nothing for a flag."""
        if not self.line:
            return ""
        first = max(0, self.column - 1 - SHOWN_COLUMNS // 2) if len(self.text) > SHOWN_COLUMNS else 0
        shown = self.text[first : first + SHOWN_COLUMNS].expandtabs(1)
        indent = self.column - 1 - first
        carets = "^" * max(1, min(self.width, len(shown) - indent))
        return f"\n  {self.line:>4} | {shown}\n       | {' ' * indent}{carets}"


@dataclass(frozen=True)
class Problem:
    """One mistake and its place."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}{self.place.excerpt()}"


@dataclass
class Document:
    """Nested values with the places of their keys and of themselves, and the problems met while reading them."""

    source: str
    values: Any = None
    key_places: dict[KeyPath, Place] = field(default_factory=dict)
    value_places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath, *, key: bool = False) -> Place:
        """The place of a value (or its key), or of the nearest thing around it that is written somewhere."""
        first, second = self.value_places, self.key_places
        if key:
            first, second = second, first
        for near in [path[:length] for length in range(len(path), 0, -1)] or [()]:
            found = first.get(near) or second.get(near)
            if found:
                return found
        return Place(self.source)

    def refuse(self, path: KeyPath, message: str, *, key: bool = False) -> None:
        self.problems.append(Problem(self.place(path, key=key), message))


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-4` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def read_yaml(text: str, source: str) -> Document:
    """Values and places of one YAML document; duplicate keys and unreadable values are noted as its problems.

    Raises ConfigError (FT-CFG-002) where the text is no YAML at all.
    """
    document, lines = Document(source), text.splitlines()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            document.values = _Reader(loader, document, lines).convert(root, ())
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        place = Place(source, line, column, 1, lines[line - 1].replace(text[error.position], "?"))
        raise _no_yaml(place, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(source, lines, mark) if mark else Place(source)
        since = f" (from line {error.context_mark.line + 1})" if error.context_mark else ""
        reason = f"{error.context}{since}, {error.problem}" if error.context else str(error.problem)
        raise _no_yaml(place, reason) from None
    except RecursionError:
        raise _no_yaml(Place(source), "values are nested too deeply or contain themselves") from None
    return document


MAX_VALUES = 20_000  # aliases can make a few lines stand for billions


class _Reader:
    """Turns the node tree of one document into values, noting places and problems."""

    def __init__(self, loader: _Loader, document: Document, lines: list[str]) -> None:
        self._loader, self._document, self._lines = loader, document, lines

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        if len(self._document.value_places) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "anchors make it too large", node.start_mark)
        self._document.value_places[path] = _place(self._document.source, self._lines, node.start_mark, node.end_mark)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} has no meaning", node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*path, i)) for i, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except ValueError:  # looks like a date or number and is none, 2026-02-30: the schema says what it thinks of it
            return node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            below = (*path, name)
            first = self._document.key_places.get(below) if name in values else None
            self._document.key_places[below] = _place(
                self._document.source, self._lines, key_node.start_mark, key_node.end_mark
            )
            if first:
                message = f"`{dotted(below)}` is given twice, first on line {first.line}; keep one of them"
                self._document.refuse(below, message, key=True)
            values[name] = self.convert(value_node, below)
        return values


def _place(source: str, lines: list[str], start: yaml.Mark, end: yaml.Mark | None = None) -> Place:
    text = lines[start.line] if start.line < len(lines) else ""
    width = end.column - start.column if end and end.line == start.line else len(text) - start.column
    return Place(source, start.line + 1, start.column + 1, max(1, width) if end else 1, text)


_YAML_REMEDIES = {
    "'\\t'": "use spaces, not tabs",
    "mapping values are not allowed": "put a value that contains `: ` in quotes, and check the indentation",
    "could not find expected ':'": "write `key: value`, with a space after the colon",
    "<block end>": "check the indentation of this line and of those above it",
    "end of stream": "close the quote or bracket that is still open",
    "',' or": "close the bracket that is still open, and separate its items with commas",
    "but found another document": "keep one document; remove the `---` line",
    "nested": "write the values out, without anchors",
    "U+": "save the file as plain UTF-8 text",
    "anchors": "write the values out, without anchors",
    "the tag": "remove the tag, a word that starts with `!`",
    "undefined alias": "put a value that starts with `*` in quotes",
}


def _no_yaml(place: Place, reason: str) -> ConfigError:
    default = "check the indentation, quotes and colons around it"
    remedy = next((remedy for part, remedy in _YAML_REMEDIES.items() if part in reason), default)
    return ConfigError(str(Problem(place, f"this is not YAML: {reason}")), number=2, remedy=remedy)
