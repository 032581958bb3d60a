"""What an audit finds in the records of a run: each sample once, or what is wrong."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flextrain.data.order import SampleOrder, share
from flextrain.elastic.audit import Audit
from flextrain.elastic.audit import audit as audit_by
from flextrain.tracking import names

SAMPLES, BATCH = 23, 5
ORDER = SampleOrder(SAMPLES, seed=3)
Event = dict[str, Any]


def audit(events: Iterable[Event]) -> Audit:
    return audit_by(events, lambda samples, seed, position, count: SampleOrder(samples, seed).ids(position, count))


class Run:
    """Writes what ranks would; every life has an attempt of its own."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._attempt = -1

    def live(self, begins: int, last: int, world: int) -> "Run":
        self._attempt += 1
        plan = {"global_batch": BATCH, "num_samples": SAMPLES, "seed": 3, "first": 0, "begins": begins, "last_step": 99}
        for rank in range(world):
            self._says(rank, names.PLAN, **plan)
            for step in range(begins + 1, last + 1):
                lo, hi = share(BATCH, rank, world)
                ids = ORDER.ids((step - 1) * BATCH + lo, hi - lo).tolist()
                self._says(rank, names.SAMPLES, step=step, ids=ids)
        return self

    def _says(self, rank: int, name: str, **fields: Any) -> None:
        who = {"attempt": self._attempt, "rank": rank, "incarnation": f"i{self._attempt}", "kind": "event"}
        self.events.append({**who, "name": name, "fields": fields})

    def samples(self, step: int) -> list[Event]:
        return [e for e in self.events if e["name"] == names.SAMPLES and e["fields"]["step"] == step]


def test_an_undisturbed_run_has_no_problems() -> None:
    found = audit(Run().live(0, 20, world=3).events)
    assert (found.first, found.last, found.samples, found.lives, found.again, found.problems) == (1, 20, 100, 1, 0, ())
    assert "each once" in found.summary()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6))
def test_any_chain_of_interruptions_is_sound(lives: list[tuple[int, int, int]]) -> None:
    run, done = Run(), 0
    for lost, more, world in lives:
        begins = max(0, done - lost)
        run.live(begins, done := begins + more, world)
    found = audit(run.events)
    assert found.problems == ()
    assert (found.last, found.samples, found.lives) == (done, done * BATCH, len(lives))


def test_a_rank_without_a_record_is_missed() -> None:
    run = Run().live(0, 3, world=2)
    run.events.remove(run.samples(2)[1])
    assert audit(run.events).problems == ("step 2: 2 of 5 samples are recorded, by ranks 0",)


def test_a_step_that_was_under_way_when_the_run_was_killed_does_not_count() -> None:
    run = Run().live(0, 3, world=2)
    run.events.remove(run.samples(3)[0])
    found = audit(run.events)
    assert (found.last, found.problems) == (2, ())


def test_a_step_that_nobody_did_is_missed() -> None:
    assert audit(Run().live(0, 3, world=2).live(4, 6, world=2).events).problems == ("step 4: no rank recorded it",)


def test_a_sample_taken_twice_is_found() -> None:
    run = Run().live(0, 3, world=1)
    run.samples(3)[0]["fields"]["ids"][4] = again = run.samples(1)[0]["fields"]["ids"][0]
    assert audit(run.events).problems[0] == f"step 3: sample {again} was taken at step 1 already, in the same epoch"


def test_a_sample_taken_twice_in_one_step_is_found() -> None:
    run = Run().live(0, 1, world=1)
    ids = run.samples(1)[0]["fields"]["ids"]
    ids[1] = ids[0]
    assert len(audit(run.events).problems) == 2


def test_samples_that_the_order_has_elsewhere_are_found() -> None:
    run = Run().live(0, 2, world=1)
    one, two = (run.samples(step)[0]["fields"] for step in (1, 2))
    one["ids"], two["ids"] = two["ids"], one["ids"]
    said = "its samples are not those that the order has there"
    assert audit(run.events).problems == (f"step 1: {said}", f"step 2: {said}")


def test_records_lost_at_the_begin_or_before_a_checkpoint_are_missed() -> None:
    run = Run().live(0, 6, world=1)
    for step in (1, 6):
        run.events.remove(run.samples(step)[0])
    run._says(0, names.CHECKPOINT, step=6, url="…")
    assert audit(run.events).problems == ("step 1: no rank recorded it", "step 6: no rank recorded it")


def test_other_samples_the_second_time_are_found() -> None:
    run = Run().live(0, 3, world=1).live(2, 3, world=1)
    run.samples(3)[1]["fields"]["ids"].reverse()
    found = audit(run.events)
    assert found.problems[-1] == "step 3: other samples were taken when it was done again"
    assert "other samples" in found.summary()


def test_many_problems_are_counted() -> None:
    found = audit([e for e in Run().live(0, 31, world=2).events if e["rank"] == 0])
    assert len(found.problems) == 30
    assert "… and 20 more problems" in found.summary()


def test_no_record_is_no_proof() -> None:
    assert audit([]).problems == ("there is no record of what was taken",)
