"""What a key expects, in words, read from the schema's JSON form; and the nearest known key to a wrong one."""

import difflib
import json
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

KeyPath = tuple[str | int, ...]
Node = Mapping[str, Any]  # one JSON schema
SHOWN_VALUE = 60  # characters of a value in a message


class SchemaWords:
    """Answers about the JSON schema of one section or of the whole configuration."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root, self._definitions = schema, schema.get("$defs", {})

    def at(self, path: KeyPath) -> Node | None:
        """The schema of the value at `path`, or None where there is no such key."""
        node: Node = self._root
        for part in path:
            outer = self._resolve(node)
            named = outer.get("properties", {}).get(part) or outer.get("additionalProperties")
            below = outer.get("items") if isinstance(part, int) else named
            if not isinstance(below, Mapping):
                return None
            node = below
        return node

    def keys(self, path: KeyPath = ()) -> dict[str, Node]:
        """The keys of the section at `path`; empty where it is no section."""
        node = self.at(path)
        return dict(self._resolve(node).get("properties", {})) if node else {}

    def expectation(self, node: Node) -> str:
        """'a whole number >= 1', 'one of `ddp`, `fsdp`', 'a list, each entry text'."""
        if "anyOf" in node:
            return " or ".join(self.expectation(option) for option in node["anyOf"])
        node = self._resolve(node)
        if "enum" in node or "const" in node:
            choices = ", ".join(f"`{choice}`" for choice in node.get("enum", [node.get("const")]))
            return f"one of {choices}"
        if node.get("type") == "array":
            least = "a non-empty list" if node.get("minItems") else "a list"
            return f"{least}, each entry {self.expectation(node['items'])}"
        if node.get("type") == "object":
            if "properties" in node:
                return f"a section with the keys {', '.join(node['properties'])}"
            return f"a section, each value {self.expectation(node['additionalProperties'])}"
        return _scalar_expectation(node)

    def expected(self, path: KeyPath) -> str:
        """Expectation and meaning of a key: 'a whole number >= 1: tokens per training sequence'."""
        node = self.at(path)
        assert node is not None, path
        meaning = node.get("description", "") if "properties" not in self._resolve(node) else ""
        return f"{self.expectation(node)}: {meaning}" if meaning else self.expectation(node)

    def nearest(self, path: KeyPath) -> list[str]:
        """Dotted names of the known keys that an unknown one probably means, best first."""
        section, word = path[:-1], _plain(path[-1])
        here = dict(self._names(section))
        close = here.get(word) or next((here[n] for n in difflib.get_close_matches(word, here, 1, 0.6)), None)
        if close:
            return [close]
        if section and isinstance(section[-1], int):  # a row of a list: no other section has its keys
            return []
        below = [(name, full) for top in self.keys() for name, full in self._names((top,))]
        guess = [word, *difflib.get_close_matches(word, [name for name, _ in below], 1, 0.8)]
        return next((found for g in guess if (found := [full for name, full in below if name == g])), [])

    def _names(self, section: KeyPath) -> Iterator[tuple[str, str]]:
        for name, node in self.keys(section).items():
            for known in (name, *node.get("alias_of", [])):
                yield known, dotted((*section, name))

    def _resolve(self, node: Node) -> Node:
        while "$ref" in node:
            node = self._definitions[node["$ref"].rsplit("/", 1)[-1]]
        return node


def dotted(path: KeyPath) -> str:
    """('cost', 'prices', 0, 'as_of') -> 'cost.prices[0].as_of'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _plain(word: str | int) -> str:
    return str(word).lower().replace("-", "_")


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "string": "text",
}


def _scalar_expectation(node: Node) -> str:
    if node.get("format") == "date":
        return "a date such as 2026-01-31"
    if "pattern" in node:
        return f"text of the form {node['pattern'].strip('^$')}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = " and ".join(f"{sign} {node[name]:g}" for name, sign in signs.items() if name in node)
    if node.get("minLength"):
        return "text that is not empty"
    return f"{_KINDS.get(node.get('type', ''), 'a value')} {bounds}".strip()


def show(value: Any) -> str:
    """A value as YAML would have it, short enough for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 1]}…"


def did_you_mean(names: list[str]) -> str:
    """' Did you mean `a` or `b`?', or nothing."""
    return f" Did you mean {' or '.join(f'`{name}`' for name in names)}?" if names else ""


def explain_error(words: SchemaWords, error: Mapping[str, Any]) -> str:
    """One of pydantic's `errors()` as a sentence."""
    path: KeyPath = tuple(error["loc"])
    name, node = f"`{dotted(path)}`", words.at(path)
    if error["type"] in ("extra_forbidden", "no_such_attribute"):
        near = words.nearest(path)
        known = "" if near else f" Known keys here: {', '.join(words.keys(path[:-1]))}."
        return f"unknown key {name}.{did_you_mean(near)}{known}"
    reason = str(error["msg"]).removeprefix("Value error, ")
    if node is None or not path or (error["type"] == "value_error" and words.keys(path)):
        return f"{name}: {reason}" if path else reason
    if error["type"] == "missing":
        return f"{name} is missing; expected {words.expected(path)}"
    if error["type"] == "frozen_field":
        return f"{name} cannot change after construction; give it when the configuration is made"
    custom = f" ({reason})" if error["type"] == "value_error" else ""
    return f"{name} is {show(error['input'])}{custom}; expected {words.expected(path)}{_hint(node, error['input'])}"


def _hint(node: Node, value: Any) -> str:
    near = difflib.get_close_matches(value.lower(), node.get("enum", ()), 1, 0.6) if isinstance(value, str) else []
    if near:
        return f".{did_you_mean(near)}"
    takes_text = any(option.get("type") == "string" for option in node.get("anyOf", [node]))
    if takes_text and isinstance(value, int | float | date):
        return ". Put it in quotes if it is meant as text"
    if node.get("type") == "array" and isinstance(value, str):
        return f". Write it as a list: [{show(value)}]"
    return ""
