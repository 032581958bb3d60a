"""Memory of a load and of snapshots in flight, as JSON: a process of its own, in which nothing else was ever allocated.

`python checkpoint_memory.py load|save FOLDER [STATE_MB]`
"""

import json
import sys
from pathlib import Path

import torch
from checkpoint_subject import Subject, shape_of
from raw_io import reset_peak, status_bytes

from flextrain.checkpoint import Catalog
from flextrain.storage import open_store


def during_load(subject: Subject, root: Path) -> dict[str, float]:
    """Bytes that a load into existing tensors takes beyond them, at its peak."""
    catalog = Catalog(open_store(root))
    before = status_bytes("VmRSS")
    reset_peak()
    subject.saver(root).load(catalog, max(catalog.steps()))
    return {"extra_bytes": status_bytes("VmHWM") - before, "state_bytes": subject.size_bytes}


def during_save(subject: Subject, root: Path) -> dict[str, float]:
    """Bytes of trainer and writer together beyond the trainer's own before, at most, while two snapshots are in flight.

    The shared memory counts once: the trainer has all of it mapped.
    """
    saver = subject.saver(root)
    before = status_bytes("RssAnon")
    saver.prepare()
    saver.snapshot(1, {})
    saver.snapshot(2, {})
    writer, peak, done = saver._writer, 0, 0
    assert writer is not None
    while done < 2:
        trainer_bytes = status_bytes("RssAnon") + status_bytes("RssShmem") - before
        writer_bytes = status_bytes("RssAnon", writer.pid) + status_bytes("RssFile", writer.pid)
        peak = max(peak, trainer_bytes + writer_bytes)
        done += len(saver.poll(timeout_s=0.02))
    saver.close()
    return {"extra_bytes": peak, "state_bytes": subject.size_bytes}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, *state_mb = sys.argv[1:]
    measure = {"load": during_load, "save": during_save}[what]
    print(json.dumps(measure(Subject.make(shape_of(float(state_mb[0]) if state_mb else None)), Path(folder))))
