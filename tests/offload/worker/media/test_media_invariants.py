"""Each check of a medium can fail: state that contradicts itself is found, and shown."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offload.worker.media.base import MediumJob, Verb
from offload.worker.media.outage import Outage
from offload.worker.media.runner import Runner, one_by_one
from offload.worker.media.slab import SlabMedium
from offload.worker.seals import Checksums
from tests.offload.worker.media.bench import Pool, run, slab

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[SlabMedium]:
    pool = Pool()
    made = slab(tmp_path / "x", pool)
    assert run(made, pool.put(1, [(3, 1, [0])])).num_good == 1
    made.check_invariants()
    yield made
    made.close(30)


def reader_forgotten(medium: SlabMedium) -> None:
    medium._readers[2] = 1


def writer_forgotten(medium: SlabMedium) -> None:
    medium._is_written[2] = True


def record_of_another_place(medium: SlabMedium) -> None:
    assert medium._seals is not None
    medium._seals._known[3]["place"] = 4


def extent_too_long(medium: SlabMedium) -> None:
    assert medium._seals is not None
    medium._seals._known[3]["num_slots"] = 99


def newer_than_the_newest(medium: SlabMedium) -> None:
    assert medium._seals is not None
    medium._seals._newest[3] = 0


def more_than_the_log_has(medium: SlabMedium) -> None:
    assert medium._seals is not None
    medium._seals._log._num_records = 0


@pytest.mark.parametrize(
    ("contradict", "shown"),
    [
        (reader_forgotten, "read, jobs are"),
        (writer_forgotten, "jobs are"),
        (record_of_another_place, "of other places"),
        (extent_too_long, "extents have"),
        (newer_than_the_newest, "newer ones"),
        (more_than_the_log_has, "1 of 0 records"),
    ],
)
def test_a_contradiction_is_found(
    medium: SlabMedium, contradict: Callable[[SlabMedium], None], shown: str
) -> None:
    contradict(medium)
    with pytest.raises(AssertionError, match=shown):
        medium.check_invariants()


def test_a_contradiction_of_threads_is_found() -> None:
    def move(verb: Verb, number: int, job: MediumJob, index: int) -> Checksums:
        return np.zeros(1, dtype=np.uint64)

    runner = Runner("test", one_by_one(move), dict.fromkeys(Verb, 1), slot_bytes=1, hang_seconds=1.0)
    runner.stop()
    assert runner.is_over.wait(30)
    pool = Pool()
    runner._is_closing = False
    runner.submit(pool.put(1, [(0, 1, [0]), (1, 1, [1])]))
    runner.check_invariants()
    task = runner._waiting[Verb.PUT][0]
    for name, value, shown in (("next", 2, "nothing left"), ("num_moving", 1, "more under way")):
        before = getattr(task, name)
        setattr(task, name, value)
        with pytest.raises(AssertionError, match=shown):
            runner.check_invariants()
        setattr(task, name, before)
    runner._waiting[Verb.GET].append(task)
    with pytest.raises(AssertionError, match="wrong threads"):
        runner.check_invariants()


def test_a_pause_that_is_too_long_is_found() -> None:
    outage = Outage("there", lambda: 0.0)
    outage.begins(OSError("gone"))
    outage.check_invariants()
    outage._pause = 60.0
    with pytest.raises(AssertionError, match="a pause of"):
        outage.check_invariants()
