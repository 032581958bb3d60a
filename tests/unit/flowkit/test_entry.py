import os
import sys

import pytest

from flextrain.flowkit.entry import prepare

BINARIES = os.path.dirname(sys.executable)


def test_the_running_interpreter_is_the_first_python_on_the_path() -> None:
    environ = {"PATH": "/usr/bin", "USER": "ada"}
    prepare(environ)
    prepare(environ)
    assert environ == {"PATH": f"{BINARIES}{os.pathsep}/usr/bin", "USER": "ada"}


@pytest.mark.parametrize("environ", [{}, {"USER": "root"}, {"USERNAME": ""}])
def test_a_container_without_a_user_gets_one(environ: dict[str, str]) -> None:
    prepare(environ)
    assert environ["USERNAME"] == "flextrain"


@pytest.mark.parametrize("name", ["METAFLOW_USER", "SUDO_USER", "USERNAME", "USER"])
def test_a_named_user_is_kept(name: str) -> None:
    environ = {name: "ada"}
    prepare(environ)
    assert environ == {name: "ada", "PATH": environ["PATH"]}
