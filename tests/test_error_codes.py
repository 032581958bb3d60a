"""Every error code that the source can raise is explained in docs/troubleshooting.md, and no other is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from flextrain import errors
from flextrain.errors import FlextrainError

ROOT = Path(__file__).parents[1]
KINDS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, FlextrainError)
}


def raised() -> Iterator[tuple[str, str]]:
    """(code, file:line) of every error that is built anywhere in the package."""
    for path in sorted((ROOT / "src" / "flextrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                numbers = [k.value for k in node.keywords if k.arg == "number"]
                assert numbers, f"{where}: {node.func.id} has no number="
                for number in ast.walk(numbers[0]):
                    if isinstance(number, ast.Constant):
                        yield f"{KINDS[node.func.id].family}-{number.value:03d}", where


def test_docs_explain_exactly_the_codes_there_are() -> None:
    documented = re.findall(
        r"^\| (FT-[A-Z]+-\d{3}) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(documented) == len(set(documented))
    codes = dict(raised())
    assert codes.keys() - set(documented) == set(), {c: codes[c] for c in codes.keys() - set(documented)}
    assert set(documented) - codes.keys() == set()
