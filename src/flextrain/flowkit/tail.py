"""Follows event files that other processes append to: each poll returns only the lines that are new."""

from pathlib import Path
from typing import Any

from flextrain.tracking.events import parse


class EventTail:
    """The JSON lines of every file in `folder` that matches `pattern`, files and folder possibly not there yet."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Events appended since the last poll, file by file. A last line without its newline waits for the rest."""
        events: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data.rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + (len(complete) + 1 if complete else 0)
            events += [event for line in complete.splitlines() if (event := parse(line))]
        return events
