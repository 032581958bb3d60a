"""What becomes of an attempt, settled once: its rank 0 is about to commit it, or it never will be.

<root>/step-00000050/<attempt>/verdict.json     created if absent: by rank 0, before it looks at the parts a last time
                                                and creates the manifest, or by who is about to remove the parts

So parts are not removed under a manifest that is just being created, wherever a writer or a collector of leftovers
stood still in between. Rank 0 alone may replace its own word, by the error that kept it from committing.
"""

import json

from flextrain.errors import AlreadyExists, CheckpointError, FlextrainError, StorageError, unpack
from flextrain.storage import Store

COMMIT = b'{"commit":true}'


def verdict_key(attempt: str) -> str:
    return f"{attempt}/verdict.json"


def settle(folder: Store, attempt: str) -> None:
    """Rank 0's word that it commits the attempt. Raises CheckpointError where it was condemned before."""
    try:
        folder.put(verdict_key(attempt), COMMIT, create=True)
    except AlreadyExists:  # by an earlier life of this writer, or by another process as a leftover
        if error := error_of(folder, attempt):
            raise error from None


def give_up(folder: Store, attempt: str, error: FlextrainError) -> None:
    """Rank 0's word that it does not commit the attempt, for the other ranks to hear."""
    folder.put(verdict_key(attempt), json.dumps(error.pack()).encode())


def condemn(folder: Store, attempt: str) -> bool:
    """Settle that the attempt will not be committed; False where its rank 0 has settled the opposite."""
    error = CheckpointError(
        f"{folder.url_of(attempt)} was removed by another process, as the leftover of a run that had ended",
        number=12,
        remedy="look at what else writes there; what was committed before is unharmed",
    )
    try:
        folder.put(verdict_key(attempt), json.dumps(error.pack()).encode(), create=True)
    except AlreadyExists:
        return error_of(folder, attempt) is not None
    return True


def error_of(folder: Store, attempt: str) -> FlextrainError | None:
    """Why an attempt is not committed, if that is settled."""
    try:
        verdict = folder.get(verdict_key(attempt))
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    return None if verdict == COMMIT else unpack(json.loads(verdict))
