"""Damage after the commit, to data or manifest, anywhere: it is found, and an older checkpoint is used."""

import random
from pathlib import Path

import pytest
from tests.support.damage import damage
from tests.support.seeds import seeded
from tests.support.subject import Subject, Tiny, _small_chunks, root

from flextrain.checkpoint import load_weights
from flextrain.errors import CheckpointCorrupt, CheckpointError

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")


def read_all(subject: Subject, step: int) -> None:
    load_weights(subject.catalog.url_of(step), Tiny(len(subject.model.wide)))
    subject.catalog.check(step)  # load_weights reads what it needs, and bytes added at the end are not


@seeded(300)
def test_damage_anywhere_is_found_and_an_older_checkpoint_is_used(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=4)
    steps = range(1, rng.randint(2, 4) + 1)
    for step in steps:
        subject.save(step)
    hit = rng.sample(steps, rng.randint(1, len(steps)))
    kind = rng.choice(["*/rank-00000.bin", "manifest.json"])
    files = {step: next((root / f"step-{step:08d}").glob(kind)) for step in steps}
    intact = {step: path.read_bytes() for step, path in files.items()}
    for step in hit:
        damage(rng, files[step], [intact[s] for s in steps if s != step])
    hit = [step for step in steps if not files[step].exists() or files[step].read_bytes() != intact[step]]
    for step in hit:
        with pytest.raises(CheckpointError):
            read_all(subject, step)
    sound = [step for step in steps if step not in hit]
    try:
        found = subject.resume()
    except CheckpointCorrupt:
        assert not sound, "the weights would be spoilt"
        found = subject.resume()
    assert found == max(sound, default=None)
    assert set(sound) <= set(subject.catalog.steps()), "a sound commit was lost"
    for step in range(max(sound, default=0) + 1, 9):
        subject.save(step)
    assert subject.check() == [5, 6, 7, 8]
    subject.close()
