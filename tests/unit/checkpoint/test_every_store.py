"""A whole checkpoint in a store of every kind: saved, committed, checked, resumed, retired and collected."""

import pytest
from tests.support import subject as subjects
from tests.support.stores import KINDS, azurite, bucket, google, place, s3_endpoint
from tests.support.subject import Subject, _small_chunks

from flextrain.checkpoint import writer
from flextrain.storage import open_store

__all__ = ["_small_chunks", "azurite", "bucket", "google", "place", "s3_endpoint"]


@pytest.mark.usefixtures("_small_chunks")
def test_checkpoints_are_saved_and_resumed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.startswith("memory:"):  # which each who opens it would have for himself
        store = open_store(place)
        for module in (subjects, writer):
            monkeypatch.setattr(module, "open_store", lambda url: store)
    subject = Subject(place, seed=7, keep=2)
    assert subject.resume() is None
    for step in (1, 2, 3):
        subject.save(step)
    assert subject.check() == [2, 3]
    assert subject.resume() == 3
    names = [entry.key for entry in subject.catalog.store.list() if entry.key.startswith("step-00000001")]
    assert names == [], "a retired step left something behind"


@pytest.mark.parametrize("place", [kind for kind in KINDS if kind != "memory"], indirect=True)
def test_the_writer_process_reaches_the_store(place: str) -> None:
    subject = Subject(place, seed=8)
    for step in (1, 2):
        subject.become(step)
        subject.saver.snapshot(step, {"step": step})
        assert [saved.error for saved in subject.saver.wait()] == [None]
    subject.saver.close()
    assert subject.resume() == 2
