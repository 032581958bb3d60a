"""Who may commit: the newest claim alone; what a lease protects; what is settled about an attempt once and for all."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.support.s3 import Bucket, bucket, s3_endpoint  # noqa: F401 (fixtures)
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver, Keep, generation
from flextrain.checkpoint.commit import Attempt, await_commit, commit, sign_off
from flextrain.checkpoint.generation import LEASE_S, Standing, claim, generation_of, leased, refuse_superseded, standing
from flextrain.checkpoint.manifest import ObjectEntry
from flextrain.checkpoint.parts import Part
from flextrain.checkpoint.survey import survey
from flextrain.checkpoint.verdict import condemn, error_of, give_up, settle
from flextrain.cli.main import main
from flextrain.errors import CheckpointError, StorageError
from flextrain.storage import Store, open_store

EMPTY = Part()


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(open_store(tmp_path))


def saver(catalog: Catalog, keep: int = 1) -> CheckpointSaver:
    model = nn.Linear(2, 2)
    return CheckpointSaver(catalog, model, torch.optim.SGD(model.parameters()), Keep(keep), commit_timeout_s=20.0)


def test_claims_count_on_and_say_who_made_them(catalog: Catalog) -> None:
    assert [claim(catalog.store, name) for name in "abcd"] == [
        f"g0000000{n}-{name}" for n, name in enumerate("abcd", 1)
    ]
    kept = [entry.key for entry in catalog.store.list()]
    assert kept == [f"generations/0000000{n}.json" for n in (2, 3, 4)], "the newest few stay for a person to look at"
    body = json.loads(catalog.store.get(kept[-1]))
    assert body["holder"] == "d"
    assert body["claimed"].endswith("+00:00")


def test_of_many_claims_at_once_each_gets_a_number_of_its_own(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: claim(catalog.store, str(n)), range(24)))
    assert len({generation_of(f"{prefix}-1") for prefix in made}) == 24


def test_a_number_whose_record_was_cleaned_up_is_not_given_out_again(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        claim(catalog.store, "x")
    real, looks = generation._newest, iter([0])  # what it saw long ago, before it stood still
    monkeypatch.setattr(generation, "_newest", lambda root: next(looks, real(root)))
    assert claim(catalog.store, "late") == "g00000007-late"


def test_an_older_saver_is_refused_and_deletes_nothing_any_more(catalog: Catalog) -> None:
    old, new = saver(catalog), saver(catalog)
    old.save(1, {})
    new.prepare()
    with pytest.raises(CheckpointError, match=r"taken over by generation 2; this is generation 1") as caught:
        old.save(2, {})
    assert caught.value.code == "FT-CKP-011"
    assert catalog.steps() == [1]
    new.save(3, {})
    assert catalog.steps() == [3]
    assert [found.step for found in survey(catalog.store.url)] == [3], "what the old one left is garbage at once"
    for one in (old, new):
        one.close()


def test_a_saver_that_claims_before_it_resumes_is_not_overtaken(catalog: Catalog) -> None:
    old, new = saver(catalog), saver(catalog)
    old.save(1, {})
    new.claim()
    manifest = new.resume()
    with pytest.raises(CheckpointError, match="taken over"):
        old.save(2, {})
    assert manifest is not None
    new.save(2, {})
    for one in (old, new):
        one.close()


def test_rank_0_stops_waiting_for_others_once_superseded_and_tells_them(catalog: Catalog) -> None:
    attempt = Attempt(5, claim(catalog.store, "x") + "-1", world_size=2)
    sign_off(catalog, attempt, 0, EMPTY)
    claim(catalog.store, "y")
    with pytest.raises(CheckpointError, match="taken over by generation 2"):
        commit(catalog, attempt, {}, Keep(1), timeout_s=600.0)
    with pytest.raises(CheckpointError, match="taken over by generation 2"):
        await_commit(catalog, attempt, timeout_s=600.0)


def test_an_attempt_without_generation_is_nobodys_to_refuse(catalog: Catalog) -> None:
    claim(catalog.store, "x")
    refuse_superseded(catalog.store, "0123456789abcdef")
    attempt = Attempt(5, "0123456789abcdef", world_size=1)
    sign_off(catalog, attempt, 0, EMPTY)
    commit(catalog, attempt, {}, Keep(1), timeout_s=5.0)
    assert catalog.steps() == [5]


def test_rank_0_renews_its_lease_while_it_saves(catalog: Catalog) -> None:
    first, second = (claim(catalog.store, name) + "-1" for name in "xy")
    seen: set[float] = set()
    with leased(catalog.store, second, rank=0, every_s=0.001):
        while len(seen) < 3:
            found = standing(catalog.store.list())
            assert found is not None
            assert found.number == 2
            assert found.renewed_s is not None
            seen.add(found.renewed_s)
    for attempt, rank in ((first, 1), ("torchs-own", 0)):
        with leased(catalog.store, attempt, rank):
            pass
    assert [entry.key for entry in catalog.store.list() if entry.key.endswith("lease")] == [
        "generations/00000002.lease"
    ]


def test_claims_leases_and_verdicts_hold_in_a_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for key, value in bucket.environ.items():
        monkeypatch.setenv(key, value)
    catalog = Catalog(open_store(f"{bucket.url}/run"))
    with ThreadPoolExecutor(4) as pool:
        made = sorted(pool.map(lambda n: claim(catalog.store, str(n)), range(4)))
    assert [generation_of(f"{prefix}-1") for prefix in made] == [1, 2, 3, 4]
    old, new = (Attempt(5, f"{prefix}-1", world_size=1) for prefix in made[-2:])
    for attempt in (old, new):
        sign_off(catalog, attempt, 0, EMPTY)
    with pytest.raises(CheckpointError, match="taken over by generation 4"):
        commit(catalog, old, {}, Keep(1), timeout_s=20.0)
    with leased(catalog.store, new.name, rank=0):
        commit(catalog, new, {}, Keep(1), timeout_s=20.0)
    assert catalog.manifest(5).attempt == new.name
    kept = [key.removeprefix("run/") for key in bucket.keys("run/step-00000005")]
    assert not [key for key in kept if old.name in key], "the old attempt is garbage at once"
    found = standing(catalog.store.list())
    assert found is not None
    assert found.is_live(found.renewed_s or 0.0)


def test_a_lease_that_cannot_be_written_stops_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = claim(catalog.store, "x") + "-1"

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no", number=4)

    monkeypatch.setattr(Store, "put", refuse)
    with leased(catalog.store, attempt, rank=0):
        pass
    assert standing(catalog.store.list()) == Standing(1, None)


def test_a_lease_is_live_for_a_while_after_its_renewal() -> None:
    assert Standing(1, 100.0).is_live(100.0 + LEASE_S)
    assert not Standing(1, 100.0).is_live(100.1 + LEASE_S)
    assert not Standing(1).is_live(0.0)


def test_what_is_settled_about_an_attempt_stays_settled(catalog: Catalog) -> None:
    folder = catalog.folder(1)
    settle(folder, "a")
    settle(folder, "a")  # a second life of the writer
    assert not condemn(folder, "a")
    assert error_of(folder, "a") is None
    assert condemn(folder, "b")
    assert condemn(folder, "b")
    with pytest.raises(CheckpointError, match="removed by another process") as caught:
        settle(folder, "b")
    assert caught.value.code == "FT-CKP-012"
    give_up(folder, "a", CheckpointError("the disk is full", number=7))
    assert condemn(folder, "a")
    assert "the disk is full" in str(error_of(folder, "a"))


def test_an_attempt_about_to_be_committed_is_not_removed_and_one_with_a_part_gone_is_not_committed(
    catalog: Catalog,
) -> None:
    attempt = Attempt(5, claim(catalog.store, "x") + "-1", world_size=1)
    sign_off(catalog, attempt, 0, EMPTY)
    settle(catalog.folder(5), attempt.name)
    claim(catalog.store, "y")
    doomed = catalog.doomed(Keep(1))
    assert doomed.attempts == [(5, attempt.name)]
    catalog.remove(doomed)
    assert catalog.folder(5).size(attempt.record(0)) is not None
    lone = Attempt(6, "torchs-own", world_size=1)
    sign_off(catalog, lone, 0, Part({lone.data(0): ObjectEntry(3, ("0" * 16,))}))
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin is missing"):
        commit(catalog, lone, {}, Keep(1), timeout_s=5.0)
    assert catalog.steps() == []


def test_the_commands_do_not_take_generations_for_checkpoints(
    catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    one = saver(catalog)
    one.save(1, {})
    one.close()
    for verb in (["ls"], ["verify"], ["gc", "--keep-last", "1"]):
        assert main(["checkpoint", verb[0], catalog.store.url, *verb[1:]]) == 0
    assert "generations" not in capsys.readouterr().out
    assert [entry.key for entry in catalog.store.list("generations")]
