"""A node's life in its event file: what it is doing, and every second that it still does."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flextrain.errors import StorageError
from flextrain.log import get_logger
from flextrain.storage import Store
from flextrain.tracking import CompositeTracker, EventLog, RunInfo, Tracker, event_path, names, upload_events

log = get_logger(__name__)

BEAT_S = 1.0
UPLOAD_S = 15.0


class Recording:
    """An open event file; `upload` copies the files to the run's store, at most every UPLOAD_S unless `now`."""

    def __init__(self, tracker: Tracker, folder: Path, durable: Store) -> None:
        self.tracker, self._folder, self._durable = tracker, folder, durable
        self._uploaded_s = time.monotonic()

    def upload(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._uploaded_s > UPLOAD_S:
            self._uploaded_s = time.monotonic()
            try:
                upload_events(self._folder, self._durable)
            except (StorageError, OSError) as error:
                log.warning("events were not copied to %s this time: %s", self._durable.url, error)


@contextmanager
def recording(info: RunInfo, folder: Path, durable: Store, state: names.State) -> Iterator[Recording]:
    """Append this node's life to its file in `folder`, beginning in `state`, and leave all files there in `durable`.

    Beats come from a thread of their own, so that a slow card or upload never looks like a dead node.
    """
    tracker = CompositeTracker([EventLog(event_path(folder, info))])
    tracker.start(info)
    tracker.event(names.STATE, state=state)
    stop = threading.Event()
    beats = threading.Thread(target=_beat, args=(tracker, stop), daemon=True)
    beats.start()
    open_recording = Recording(tracker, folder, durable)
    status = names.Status.FAILED
    try:
        yield open_recording
        status = names.Status.FINISHED
    finally:
        stop.set()
        beats.join()
        tracker.close(status)
        open_recording.upload(now=True)


def _beat(tracker: Tracker, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        tracker.event(names.BEAT)
