"""Every block of README.md and docs/ is executed: bash and python run, yaml is a valid configuration, text is a sample.

The blocks of one page run in order in a copy of the tree, with what `make` would install already there, and, where a
command names no configuration, with a small one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.config import parse_config

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAMPS = (".installed-torch", ".installed-run", ".installed-dev")
SMALL = "{training: {max_steps: 4}, evaluation: {max_tokens: 8192, sample_tokens: 4}}"


def blocks(page: str) -> list[tuple[str, str]]:
    return [(language, text) for language, text in BLOCK.findall((ROOT / page).read_text())]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files git knows, with a `.venv` that is this one."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    venv = tmp_path / ".venv"
    venv.mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (venv / part).symlink_to(Path(sys.prefix) / part)
    for stamp in STAMPS:
        (venv / stamp).touch()
    return tmp_path


def environ(tree: Path, text: str) -> dict[str, str]:
    small = {} if "--config" in text else {"METAFLOW_FLOW_CONFIG_VALUE": f'{{"config": "{SMALL}"}}'}
    return {
        **os.environ,
        "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
        "VENV": str(tree / ".venv"),
        "ARGS": "",
        "MAKEFLAGS": "",  # what an outer make was told
        "PYTHONPATH": str(tree / "src"),
        "METAFLOW_HOME": str(tree / ".metaflow-home"),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tree),
        "METAFLOW_USER": "reader",
        **small,
        "PYTEST_ADDOPTS": "--collect-only -q",  # `make test` in a test finds the tests and stops there
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(kind in ("bash", "python") for kind, _ in blocks(page))]
)
def test_the_blocks_of_a_page_run(page: str, tree: Path) -> None:
    for language, text in blocks(page):
        command = {"bash": ["bash", "-euo", "pipefail", "-c", text], "python": [sys.executable, "-c", text]}.get(
            language
        )
        if command:
            ran = subprocess.run(
                command, cwd=tree, env=environ(tree, text), capture_output=True, text=True, timeout=600
            )
            assert ran.returncode == 0, f"{page}:\n{text}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_the_configurations_on_a_page_are_valid_and_no_block_is_of_an_unknown_kind(page: str) -> None:
    for language, text in blocks(page):
        assert language in ("bash", "python", "yaml", "text"), (
            f"{page}: a block of language {language!r} is not checked"
        )
        if language == "yaml":
            parse_config(text, page)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
