"""The copier with a link's pace, on a virtual clock: when copies are made, and that they are."""

import numpy as np

from offload.messages import LOAD, STORE
from offload.testing.copiers.inline import InlineCopier
from offload.testing.copiers.paced import Link, Pace, PacedCopier, VirtualClock
from offload.worker.copiers import CopyEnd
from offload.worker.layout import CopyBatch

SOURCE = np.arange(100, dtype=np.uint8)


def batch_to(target: np.ndarray, start: int, size: int) -> CopyBatch:
    """One copy."""
    columns = [SOURCE.ctypes.data + start, target.ctypes.data + start, size]
    return CopyBatch(*(np.array([column], dtype=np.int64) for column in columns))


def test_a_copy_is_made_when_the_link_has_carried_it() -> None:
    clock, target = VirtualClock(), np.zeros(100, np.uint8)
    copier = PacedCopier(Link(clock, lambda: Pace(10.0, seconds=2.0)), InlineCopier())
    copier.submit(1, STORE, batch_to(target, 0, 30))
    copier.submit(2, STORE, batch_to(target, 30, 70))
    copier.submit(3, LOAD, batch_to(target, 0, 10))
    assert copier.next_end == 3.0, "directions do not wait for each other"
    clock.wait_until(4.9)
    assert copier.poll() == [CopyEnd(3, 1, None)]
    assert target[:10].tolist() == SOURCE[:10].tolist()
    assert not target[10:].any(), "a copy was made early"
    clock.wait_until(5.0)
    assert copier.poll() == [CopyEnd(1, 1, None)]
    assert copier.next_end == 12.0, "copies of one direction wait for each other"
    copier.drain()
    assert clock.now == 12.0
    assert copier.poll() == [CopyEnd(2, 1, None)] and copier.poll() == []
    assert target.tolist() == SOURCE.tolist()


def test_the_pace_may_change_between_copies() -> None:
    clock, paces = VirtualClock(), [Pace(1.0), Pace(float("inf"))]
    copier = PacedCopier(Link(clock, lambda: paces.pop(0)), scale=2.0)
    copier.submit(1, STORE, batch_to(SOURCE, 0, 3))
    copier.submit(2, STORE, batch_to(SOURCE, 3, 4))
    assert copier.next_end == 6.0
    copier.hurry([2])
    assert copier.poll() == [CopyEnd(1, 1, None), CopyEnd(2, 1, None)]
    assert clock.now == 6.0


def test_closing_copies_what_is_still_on_its_way() -> None:
    clock, target = VirtualClock(), np.zeros(100, np.uint8)
    copier = PacedCopier(Link(clock, lambda: Pace(1.0)), InlineCopier())
    copier.submit(1, STORE, batch_to(target, 0, 100))
    assert copier.close(seconds=1.0)
    assert target.tolist() == SOURCE.tolist()


def test_a_copy_says_how_long_it_took_once_the_link_was_free() -> None:
    clock = VirtualClock()
    copier = PacedCopier(Link(clock, lambda: Pace(10.0, seconds=2.0)))
    copier.submit(1, STORE, batch_to(SOURCE, 0, 30))
    copier.submit(2, STORE, batch_to(SOURCE, 30, 70))
    clock.wait_until(100.0)
    assert [(end.job_id, end.seconds) for end in copier.poll()] == [(1, 5.0), (2, 9.0)]
