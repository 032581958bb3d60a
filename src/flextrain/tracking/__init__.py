"""What a run writes about itself: event files first; SQLite and Weights & Biases beside and from them."""

from flextrain.tracking.events import EventLog, event_path, read_events, upload_events
from flextrain.tracking.tracker import AGENT_RANK, CompositeTracker, RunInfo, Tracker

__all__ = [
    "AGENT_RANK",
    "CompositeTracker",
    "EventLog",
    "RunInfo",
    "Tracker",
    "event_path",
    "read_events",
    "upload_events",
]
