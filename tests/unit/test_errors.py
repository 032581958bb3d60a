"""Errors travel between processes whole, and every family has its own codes."""

import pytest

from flextrain import errors
from flextrain.errors import FlextrainError, unpack

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FlextrainError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_the_journey(kind: type[FlextrainError]) -> None:
    error = kind("found this", number=7, remedy="do that")
    again = unpack(error.pack())
    assert type(again) is kind
    assert str(again) == str(error) == "found this\n  → do that"
    assert again.render() == f"[{kind.family}-007] found this\n  → do that"


def test_the_docstring_draws_the_whole_tree() -> None:
    for kind in KINDS:
        assert kind.__name__ in (errors.__doc__ or ""), kind
