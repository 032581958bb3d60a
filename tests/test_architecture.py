"""The house rules, as a test: who may import whom, what stays free of torch, how long a file or function may grow."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "flextrain"
FLOWS = Path(__file__).parents[1] / "flows"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FLOW_LINES = 400, 60, 120
BASE = {"processes", "errors", "world", "units", "log", "hub"}  # standard library only; importable from everywhere
ROOMS: dict[str, set[str]] = {  # room -> the rooms it may import, besides BASE
    "config": set(),
    "storage": {"config"},
    "tracking": {"config"},
    "model": {"config"},
    "data": {"config", "storage"},
    "checkpoint": {"config", "storage", "model"},
    "cost": {"config", "storage", "tracking"},
    "elastic": {"config", "storage", "tracking", "checkpoint"},
    "parallel": {"config", "model"},
    "evaluate": {"config", "storage", "data", "model", "parallel", "checkpoint", "tracking"},
    "train": {
        "config",
        "storage",
        "data",
        "model",
        "parallel",
        "checkpoint",
        "elastic",
        "tracking",
        "cost",
        "evaluate",
    },
    "flowkit": {"config", "storage", "tracking", "elastic", "cost"},
}
OPEN_ROOMS = {"cli"}  # may import anything, lazily
TORCH_FREE = [
    "flextrain",
    "flextrain.config",
    "flextrain.storage",
    "flextrain.cost",
    "flextrain.tracking",
    "flextrain.flowkit",
    "flextrain.cli.main",
    "flextrain.evaluate.report",
]
FILES = sorted(SRC.rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write absolute imports"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_downwards(path: Path) -> None:
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    for name, line in imports_of(path):
        parts = name.split(".")
        if parts[0] != "flextrain" or len(parts) < 2:
            continue
        target = parts[1]
        if room in BASE:
            assert target in BASE, f"{path}:{line}: {room} stands below every room and may not import {target}"
        elif room in ROOMS and target in ROOMS and target != room:
            assert target in ROOMS[room], (
                f"{path}:{line}: {room} may not import {target}; it may import {sorted(ROOMS[room])}"
            )
        elif room in ROOMS:
            assert target not in OPEN_ROOMS, f"{path}:{line}: nobody imports {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{path} is over {MAX_FILE_LINES} lines: a noun is hiding in it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {lines} lines"
            if node.name == "__init__":
                arguments = len(node.args.args) + len(node.args.kwonlyargs) - 1
                assert arguments <= 8, f"{path}:{node.lineno}: __init__ takes {arguments} arguments"


def test_every_room_has_a_rule() -> None:
    rooms = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms <= set(ROOMS) | OPEN_ROOMS, f"no import rule for {rooms - set(ROOMS) - OPEN_ROOMS}"


def test_the_import_rules_have_no_cycle() -> None:
    graphlib.TopologicalSorter(ROOMS).prepare()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_does_not_drag_in_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"importing {module} imports torch (or fails)"


@pytest.mark.parametrize("path", sorted(FLOWS.glob("*.py")), ids=lambda p: p.name)
def test_flow_files_are_short_and_free_of_torch(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FLOW_LINES
    top_level = {name.split(".")[0] for name, _ in imports_of(path)}
    assert "torch" not in top_level, (
        f"{path} imports torch: Metaflow starts a process per step and each would pay for it"
    )


def test_only_world_reads_rank_variables() -> None:
    for path in FILES:
        if path.name != "world.py":
            for name in ("LOCAL_RANK", "WORLD_SIZE", '"RANK"', "GROUP_RANK"):
                assert name not in path.read_text(), f"{path} reads {name}: ask World.detect()"
