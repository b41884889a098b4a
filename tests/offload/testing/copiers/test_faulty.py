"""The faults that other tests rely on are the ones that happen."""

from collections.abc import Iterator

import numpy as np
import pytest

from offload.messages import STORE
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.worker.copiers import CopyEnd
from offload.worker.layout import CopyBatch
from tests.offload.places import NUM_BYTES, HostPlaces, Places, first_gpu_bytes, first_pool_bytes


@pytest.fixture
def places() -> Iterator[Places]:
    with HostPlaces() as made:
        yield made


def pair(places: Places) -> CopyBatch:
    """Two stores of 8 bytes."""
    columns = np.array([places.spread(at, at, 8, STORE) for at in (0, 8)]).T
    return CopyBatch(*(np.ascontiguousarray(column) for column in columns))


@pytest.mark.parametrize(
    ("fault", "end", "num_bytes"),
    [
        (Fault.NONE, CopyEnd(1, 2, None), 16),
        (Fault.FAIL, CopyEnd(1, 0, "failed on purpose"), 0),
        (Fault.STOP_HALFWAY, CopyEnd(1, 1, "stopped half-way on purpose"), 8),
        (Fault.END_SHORT, CopyEnd(1, 1, None), 8),
    ],
)
def test_faults(places: Places, fault: Fault, end: CopyEnd, num_bytes: int) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: fault)
    copier.submit(1, STORE, pair(places))
    copier.drain()
    assert copier.poll() == [end]
    assert copier.poll() == []
    expected = first_pool_bytes(NUM_BYTES)
    expected[:num_bytes] = first_gpu_bytes(NUM_BYTES)[:num_bytes]
    assert np.array_equal(places.pool, expected)


def test_a_refusal_raises(places: Places) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: Fault.REFUSE)
    with pytest.raises(RuntimeError, match="job 1 refused"):
        copier.submit(1, STORE, pair(places))
    copier.drain()
    assert copier.poll() == []
    assert np.array_equal(places.pool, first_pool_bytes(NUM_BYTES))


def test_one_byte_is_wrong_and_said_to_be(places: Places) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: Fault.WRONG_BYTES)
    copier.submit(1, STORE, pair(places))
    copier.drain()
    assert copier.poll() == [CopyEnd(1, 2, None)]
    (wrong,) = np.flatnonzero(places.pool[:16] != first_gpu_bytes(NUM_BYTES)[:16])
    assert copier.corrupted == [places.pool_address + wrong]


def test_what_is_stuck_begins_when_it_is_let_go(places: Places) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: Fault.STUCK if job_id == 1 else Fault.NONE)
    for job_id in (1, 2):
        copier.submit(job_id, STORE, pair(places)._replace(sources=pair(places).sources + 16 * job_id))
    copier.drain()
    assert copier.poll() == [CopyEnd(2, 2, None)]
    assert np.array_equal(places.pool[:16], first_gpu_bytes(NUM_BYTES)[32:48])
    copier.let_go()
    copier.drain()
    assert copier.poll() == [CopyEnd(1, 2, None)]
    assert np.array_equal(places.pool[:16], first_gpu_bytes(NUM_BYTES)[16:32])


def test_a_dead_copier_ends_nothing_and_takes_nothing_until_it_is_let_go(places: Places) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: Fault.DIE if job_id == 2 else Fault.NONE)
    for job_id in (1, 2):
        copier.submit(job_id, STORE, pair(places))
    with pytest.raises(RuntimeError, match="job 3 refused"):
        copier.submit(3, STORE, pair(places))
    copier.drain()
    assert copier.poll() == [] and copier.is_stuck
    copier.let_go()
    copier.drain()
    assert {end.job_id for end in copier.poll()} == {1, 2} and not copier.is_stuck


def test_faults_are_chosen_per_batch(places: Places) -> None:
    copier = FaultyCopier(places.copier, lambda job_id, direction: Fault.FAIL if job_id == 2 else Fault.NONE)
    for job_id in (1, 2, 3):
        copier.submit(job_id, STORE, pair(places))
    copier.drain()
    assert {end.job_id: end.num_copied for end in copier.poll()} == {1: 2, 2: 0, 3: 2}


def test_ends_are_held_back_until_released(places: Places) -> None:
    copier = FaultyCopier(places.copier)
    copier.holding = True
    for job_id in (1, 2, 3):
        copier.submit(job_id, STORE, pair(places))
    copier.release(3)
    copier.drain()
    assert copier.poll() == [CopyEnd(3, 2, None)]
    assert copier.poll() == []
    copier.release(1)
    assert copier.poll() == [CopyEnd(1, 2, None)]
    copier.holding = False
    assert copier.poll() == [CopyEnd(2, 2, None)]


def test_a_release_lets_one_end_through(places: Places) -> None:
    copier = FaultyCopier(places.copier)
    copier.holding = True
    copier.release(1)
    copier.submit(1, STORE, pair(places))
    copier.drain()
    assert copier.poll() == [CopyEnd(1, 2, None)]
    copier.submit(1, STORE, pair(places))
    copier.drain()
    assert copier.poll() == []
