import pytest

from flextrain.errors import DataError, FlextrainError, GangError
from flextrain.flowkit.failures import FlowError, not_retried, plain_errors


def failing(error: Exception) -> None:
    raise error


def test_a_users_mistake_becomes_metaflows_own_kind_of_error() -> None:
    with pytest.raises(FlowError) as caught:
        plain_errors(failing)(DataError("no text in a.txt", number=7, remedy="name another file"))
    assert caught.value.message == "[FT-DAT-007] no text in a.txt\n  → name another file"
    assert caught.value.__suppress_context__


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        plain_errors(not_retried(failing))(ZeroDivisionError())


def test_what_no_retry_can_mend_ends_the_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        not_retried(failing)(DataError("no text in a.txt", number=7))
    assert caught.value.code == 202  # Metaflow's status for: do not retry
    assert "[FT-DAT-007] no text in a.txt" in capsys.readouterr().err


@pytest.mark.parametrize("error", [GangError("a rank was killed", number=5), FlextrainError("other")])
def test_what_may_pass_is_left_to_the_retry(error: FlextrainError) -> None:
    with pytest.raises(type(error)):
        not_retried(failing)(error)


def test_results_pass_through() -> None:
    assert plain_errors(not_retried(lambda x: x + 1))(1) == 2
