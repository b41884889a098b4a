"""Loads of slots that jobs under way are to fill: they begin when these have ended."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from offload.messages import LOAD, STORE
from offload.testing.copiers.faulty import Fault
from offload.worker.following import Following
from offload.worker.transfer import DEADLINE_SECONDS
from tests.offload.places import HostPlaces
from tests.offload.worker.test_transfer import LAYOUTS, NUM_BYTES, Bench, Job

FIRST = Job(STORE, [0, 1, 2], [5, 6, 7], Fault.NONE, cancelled=False)
SECOND = Job(STORE, [3, 4], [8, 9], Fault.NONE, cancelled=False)
SLOTS, BLOCKS = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Stores 1 and 2 are under way, and load 3 of what both fill."""
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece and a gap"])
        bench.copier.holding = True
        bench.submit(1, FIRST)
        bench.submit(2, SECOND)
        fills = np.array([1, 1, 1, 2, 2])
        bench.engine.submit(3, LOAD, np.array(SLOTS), np.array(BLOCKS), fills)
        yield bench
        bench.engine.check_invariants()


def ends(bench: Bench) -> dict[int, tuple[int, bool]]:
    """What has ended: how many leading blocks are good, and whether there was no error."""
    found = {end.job_id: (end.num_good, end.error is None) for end in bench.settle()}
    bench.engine.check_invariants()
    return found


def num_brought(bench: Bench) -> int:
    """How many leading blocks of the load hold what the stores took."""
    gpu = bench.places.gpu()
    (region,) = bench.regions
    at = [region.address + block * region.block_stride for block in (0, 1, 2, 3, 4, *BLOCKS)]
    pieces = [gpu[begin : begin + region.piece_bytes].tolist() for begin in at]
    same = [pieces[index] == pieces[index + 5] for index in range(5)]
    return (*same, False).index(False)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_load_begins_when_all_is_there_that_it_reads(bench: Bench, order: tuple[int, int]) -> None:
    assert ends(bench) == {}
    assert bench.copier.submitted == [1, 2]
    bench.copier.release(order[0])
    assert ends(bench).keys() == {order[0]}
    assert bench.copier.submitted == [1, 2]
    bench.copier.release(order[1])
    assert ends(bench).keys() == {order[1]}
    assert bench.copier.submitted == [1, 2, 3]
    bench.copier.release(3)
    assert ends(bench) == {3: (5, True)}
    assert num_brought(bench) == 5


@pytest.mark.parametrize(("failing", "num_good"), [(1, 0), (2, 3)])
def test_a_load_brings_what_is_there_when_a_job_that_it_follows_fails(failing: int, num_good: int) -> None:
    with HostPlaces(NUM_BYTES) as places:
        bench = Bench(places, LAYOUTS["one piece and a gap"])
        bench.copier.holding = True
        for job_id, job in ((1, FIRST), (2, SECOND)):
            bench.submit(job_id, replace(job, fault=Fault.FAIL) if job_id == failing else job)
        bench.engine.submit(3, LOAD, np.array(SLOTS), np.array(BLOCKS), np.array([1, 1, 1, 2, 2]))
        bench.copier.release(1)
        bench.copier.release(2)
        found = bench.settle()
        if num_good:
            bench.copier.release(3)
            found += bench.settle()
        (end,) = [each for each in found if each.job_id == 3]
        assert (end.num_good, end.error is None) == (num_good, False)
        assert end.is_absent, "nothing is wrong with the load"
        assert num_brought(bench) == num_good


def test_a_load_that_waits_is_cancelled_at_once(bench: Bench) -> None:
    bench.engine.cancel(3)
    assert ends(bench) == {3: (0, False)}
    bench.copier.release(1)
    bench.copier.release(2)
    assert ends(bench) == {1: (3, True), 2: (2, True)}
    assert bench.copier.submitted == [1, 2]


def test_a_load_does_not_wait_for_a_job_that_is_given_up(bench: Bench) -> None:
    bench.copier.release(1)
    assert ends(bench).keys() == {1}
    bench.now = DEADLINE_SECONDS
    assert ends(bench) == {2: (0, False)}  # given up
    bench.copier.release(3)
    (end,) = bench.settle()
    assert (end.job_id, end.num_good) == (3, 3)
    assert end.is_absent, "nothing is wrong with the load"
    assert num_brought(bench) == 3


def test_no_load_is_overdue_before_it_begins(bench: Bench) -> None:
    bench.now = DEADLINE_SECONDS - 1
    assert ends(bench) == {}
    for job_id in (1, 2):
        bench.copier.release(job_id)
    assert ends(bench).keys() == {1, 2}
    bench.now += DEADLINE_SECONDS - 1
    assert ends(bench) == {}
    bench.copier.release(3)
    assert ends(bench) == {3: (5, True)}


def test_nothing_is_lost_with_the_device(bench: Bench) -> None:
    bench.copier.broken_poll = True
    assert [end.job_id for end in bench.engine.poll()] == [1, 2, 3]


def test_who_waits_for_two_goes_when_both_are_over() -> None:
    following = Following()
    following.wait(7, [1, 2])
    following.wait(8, [2])
    following.check_invariants({1, 2, 7, 8})
    assert following.over(1) == []
    assert following.over(2) == [7, 8]
    assert 7 not in following


def test_who_left_is_not_told_of() -> None:
    following = Following()
    following.wait(7, [1])
    following.wait(8, [1])
    following.leave(7)
    following.check_invariants({1, 8})
    assert following.over(1) == [8]
    following.wait(9, [3])
    with pytest.raises(AssertionError, match="somebody waits"):
        following.check_invariants({9})
