"""The pins cover everything setup.py asks for, and nothing in them belongs to one machine."""

import ast
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def asked_for() -> list[Requirement]:
    call = next(
        node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(keywords["extras_require"])
    names = ast.literal_eval(keywords["install_requires"]) + [name for extra in extras.values() for name in extra]
    return [Requirement(name) for name in names]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("requirement", asked_for(), ids=str)
def test_every_requirement_has_a_pin_that_satisfies_it(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[requirement.name.lower().replace("_", "-")])


def test_pins_are_plain_versions_of_public_packages() -> None:
    assert "flextrain" not in pins()
    for name, version in pins().items():
        assert version, f"{name} has no version"
        assert "+" not in version, f"{name}=={version} is a build of one machine"
        assert not name.startswith("nvidia-"), f"{name} belongs to CUDA wheels, which pin it themselves"
