"""The faulty medium does what its faults say, and each job ends once."""

import random
from collections import Counter

import numpy as np
import pytest

from offload.testing.media.faulty import FaultyMedium, MediumFault
from offload.testing.media.memory import MemoryMedium
from offload.worker.media.base import MediumEnd, MediumJob
from tests.offload.worker.media.bench import EXTENT, PLACES, SLOTS, Pool, get, run

FOUR = [(place, 1, [place]) for place in range(4)]


class Bench:
    """A faulty medium over one in memory; the next job meets ``fault``."""

    def __init__(self) -> None:
        self.fault = MediumFault.NONE
        self.pool = Pool()
        self.inner = MemoryMedium(self.pool.slots, extent_slots=EXTENT, num_places=PLACES)
        self.medium = FaultyMedium(self.inner, self.pool.slots, lambda job: self.fault)

    def run(self, fault: MediumFault, job: MediumJob) -> MediumEnd:
        self.fault = fault
        return run(self.medium, job)


@pytest.mark.parametrize(
    ("fault", "num_good", "kept"),
    [
        (MediumFault.NONE, 4, 4),
        (MediumFault.REFUSE, 0, 0),
        (MediumFault.FAIL, 0, 4),
        (MediumFault.TORN, 0, 2),
        (MediumFault.SHORT, 2, 2),
        (MediumFault.LATE, 4, 4),
        (MediumFault.WRONG_BYTES, 4, 4),
        (MediumFault.LOSE, 4, 0),
    ],
)
def test_faults_of_puts(fault: MediumFault, num_good: int, kept: int) -> None:
    bench = Bench()
    end = bench.run(fault, bench.pool.put(1, FOUR))
    assert (end.num_good, len(bench.inner.kept)) == (num_good, kept)
    assert (end.error is None) is (num_good == 4)


@pytest.mark.parametrize(
    ("fault", "num_good"),
    [
        (MediumFault.REFUSE, 0),
        (MediumFault.FAIL, 0),
        (MediumFault.TORN, 0),
        (MediumFault.SHORT, 2),
        (MediumFault.LATE, 4),
    ],
)
def test_faults_of_gets(fault: MediumFault, num_good: int) -> None:
    bench = Bench()
    bench.run(MediumFault.NONE, bench.pool.put(1, FOUR))
    end = bench.run(fault, get(2, [(place, 1, [place + 10]) for place in range(4)]))
    assert end.num_good == num_good
    assert len(end.seals if end.seals is not None else []) == num_good
    for place in range(num_good):
        assert bench.pool.read([place + 10]) == bench.pool.read([place])


def test_wrong_bytes_are_found_by_the_seals_that_come_with_them() -> None:
    bench = Bench()
    bench.run(MediumFault.NONE, bench.pool.put(1, FOUR))
    end = bench.run(MediumFault.WRONG_BYTES, get(2, [(place, 1, [place + 10]) for place in range(4)]))
    assert (end.num_good, end.error) == (4, None)
    found = bench.pool.seals([10, 11, 12, 13])
    assert (found == end.seals).tolist() == [True, True, True, False]
    assert len(bench.medium.corrupted) == 1


def test_what_rots_in_memory_is_found() -> None:
    bench = Bench()
    run(bench.medium, bench.pool.put(1, FOUR))
    bench.inner.kept[1].content[7] ^= 1
    end = run(bench.medium, get(2, [(place, 1, [place + 10]) for place in range(4)]))
    assert end.num_good == 1


def test_what_is_stuck_begins_when_it_is_let_go() -> None:
    bench = Bench()
    bench.fault = MediumFault.STUCK
    bench.medium.submit(bench.pool.put(1, FOUR))
    assert bench.medium.is_stuck
    assert bench.medium.poll() == []
    assert not bench.medium.close(0.0)
    bench = Bench()
    bench.fault = MediumFault.STUCK
    bench.medium.submit(bench.pool.put(1, FOUR))
    bench.medium.let_go()
    (end,) = bench.medium.poll()
    assert end.num_good == 4
    assert bench.medium.close(0.0)


def test_a_medium_that_is_gone_is_off_until_it_is_back() -> None:
    bench = Bench()
    bench.medium.is_gone = True
    assert bench.medium.is_off
    assert run(bench.medium, bench.pool.put(1, FOUR)).num_good == 0
    bench.medium.is_gone = False
    assert not bench.medium.is_off
    assert run(bench.medium, bench.pool.put(2, FOUR)).num_good == 4


@pytest.mark.parametrize("seed", range(5))
def test_every_job_ends_once(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool()
    inner = MemoryMedium(pool.slots, extent_slots=EXTENT, num_places=PLACES)
    medium = FaultyMedium(inner, pool.slots, lambda job: rng.choice(list(MediumFault)))
    ended = Counter[int]()
    for job_id in range(1, 200):
        place, slot = rng.randrange(PLACES), rng.randrange(SLOTS)
        extents = [(place, job_id, [slot])]
        medium.submit(pool.put(job_id, extents) if rng.random() < 0.5 else get(job_id, extents))
        if rng.random() < 0.1:
            medium.let_go()
        ended.update(end.job_id for end in medium.poll())
    medium.let_go()
    for _ in range(10):
        ended.update(end.job_id for end in medium.poll())
    assert ended == Counter(range(1, 200))
    assert np.array_equal(sorted(ended), np.arange(1, 200))
