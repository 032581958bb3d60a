"""Where bytes live: one Store over folders and object stores."""

from flextrain.storage.store import Entry, Store, open_store

__all__ = ["Entry", "Store", "open_store"]
