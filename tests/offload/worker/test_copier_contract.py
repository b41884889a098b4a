"""What every copier promises."""

import os
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.worker.copiers import CopyEnd
from offload.worker.layout import CopyBatch
from tests.offload.places import (
    ALL_PLACES,
    NUM_BYTES,
    Bytes,
    HostPlaces,
    Places,
    PlacesFactory,
    faulty,
    first_gpu_bytes,
    first_pool_bytes,
)

Extent = tuple[int, int, int]
"""A copy: offset in the source's memory, offset in the target's, size in bytes."""

GPU, POOL = first_gpu_bytes(NUM_BYTES), first_pool_bytes(NUM_BYTES)
"""What the memories hold to begin with."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[*ALL_PLACES, pytest.param(faulty(HostPlaces), id="faulty")])
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    make: PlacesFactory = request.param
    with make() as made:
        yield made


def test_a_store_brings_exactly_its_bytes_down(places: Places) -> None:
    copies = [(100, 7, 31), (0, 900, 1), (1000, 2000, 1500)]
    assert run(places, STORE, copies) == CopyEnd(1, 3, None)
    assert np.array_equal(places.pool, applied(POOL, GPU, copies))
    assert np.array_equal(places.gpu(), GPU)


def test_a_load_brings_exactly_its_bytes_up(places: Places) -> None:
    copies = [(7, 100, 31), (900, 0, 1), (2000, 1000, 1500)]
    assert run(places, LOAD, copies) == CopyEnd(1, 3, None)
    assert np.array_equal(places.gpu(), applied(GPU, POOL, copies))
    assert np.array_equal(places.pool, POOL)


def test_what_was_stored_is_what_is_loaded(places: Places) -> None:
    run(places, STORE, [(0, 512, 256)])
    run(places, LOAD, [(512, 2048, 256)])
    assert np.array_equal(places.gpu()[2048:2304], GPU[:256])


@pytest.mark.parametrize("direction", GPU_ROUTES)
def test_a_batch_without_copies_ends_as_well(places: Places, direction: Route) -> None:
    assert run(places, direction, []) == CopyEnd(1, 0, None)
    assert np.array_equal(places.pool, POOL)
    assert np.array_equal(places.gpu(), GPU)


@pytest.mark.parametrize("seed", range(5))
def test_many_batches_both_ways_end_once_each(places: Places, seed: int) -> None:
    rng = random.Random(seed)
    chunk = 16
    chunks = list(range(NUM_BYTES // chunk))
    rng.shuffle(chunks)
    copies: dict[int, list[Extent]] = {job_id: [] for job_id in rng.sample(range(1000), 40)}
    jobs = list(copies)
    for number in chunks:  # a chunk is moved once at most, so that order does not matter
        copies[rng.choice(jobs)].append((number * chunk, number * chunk, rng.randint(1, chunk)))
    ways = {job_id: rng.choice(list(GPU_ROUTES)) for job_id in jobs}
    ended: list[CopyEnd] = []
    for job_id in jobs:
        places.copier.submit(job_id, ways[job_id], batch_of(places, ways[job_id], copies[job_id]))
        if rng.random() < 0.3:
            ended += places.copier.poll()
        if rng.random() < 0.1:
            places.copier.drain()
    places.copier.drain()
    ended += places.copier.poll()

    assert sorted(ended) == sorted(CopyEnd(job_id, len(copies[job_id]), None) for job_id in jobs)
    assert places.copier.poll() == []
    stored = [each for job_id in jobs if ways[job_id] == STORE for each in copies[job_id]]
    loaded = [each for job_id in jobs if ways[job_id] == LOAD for each in copies[job_id]]
    assert np.array_equal(places.pool, applied(POOL, GPU, stored))
    assert np.array_equal(places.gpu(), applied(GPU, POOL, loaded))


def test_nothing_is_reported_before_it_has_arrived(places: Places) -> None:
    with places.stores_held():
        places.copier.submit(1, STORE, batch_of(places, STORE, [(0, 0, 64)]))
        assert places.copier.poll() == []
        assert np.array_equal(places.pool, POOL)
    assert places.copier.poll() == [CopyEnd(1, 1, None)]
    assert np.array_equal(places.pool[:64], GPU[:64])


def test_a_load_does_not_queue_behind_stores(places: Places) -> None:
    big = [(offset, offset, 8) for offset in range(0, NUM_BYTES, 8)]
    with places.stores_held():
        for job_id in range(3):
            places.copier.submit(job_id, STORE, batch_of(places, STORE, big))
        places.copier.submit(9, LOAD, batch_of(places, LOAD, [(64, 128, 8)]))
        assert next_ends(places) == [CopyEnd(9, 1, None)]
    assert sorted(places.copier.poll()) == [CopyEnd(job_id, len(big), None) for job_id in range(3)]


def test_draining_waits_for_everything(places: Places) -> None:
    for job_id, direction in enumerate([*GPU_ROUTES] * 4):
        places.copier.submit(job_id, direction, batch_of(places, direction, [(job_id * 8, job_id * 8, 8)]))
    places.copier.drain()
    assert sorted(end.job_id for end in places.copier.poll()) == list(range(8))


def test_draining_needs_nothing_to_drain(places: Places) -> None:
    places.copier.drain()
    places.copier.drain()
    assert places.copier.poll() == []


def test_a_copier_serves_on_after_a_drain(places: Places) -> None:
    assert run(places, STORE, [(0, 0, 8)]) == CopyEnd(1, 1, None)
    assert run(places, STORE, [(8, 8, 8)]) == CopyEnd(1, 1, None)


@pytest.mark.parametrize("direction", GPU_ROUTES)
def test_fences_pass_what_comes_after_them(places: Places, direction: Route) -> None:
    for way in (*GPU_ROUTES, direction):
        places.copier.fence(way)
    assert run(places, direction, [(0, 0, 8)]) == CopyEnd(1, 1, None)


def test_closing_finishes_what_was_submitted(places: Places) -> None:
    places.copier.submit(1, STORE, batch_of(places, STORE, [(0, 0, 2048)]))
    places.copier.close(seconds=30)
    assert np.array_equal(places.pool[:2048], GPU[:2048])
    assert places.copier.poll() == [CopyEnd(1, 1, None)]


def test_closing_again_does_nothing(places: Places) -> None:
    places.copier.close(seconds=30)
    places.copier.close(seconds=30)
    assert places.copier.poll() == []


def batch_of(places: Places, direction: Route, copies: Sequence[Extent]) -> CopyBatch:
    spread = [places.spread(*each, direction) for each in copies]
    columns = np.array(spread, dtype=np.int64).reshape(-1, 3).T
    return CopyBatch(*(np.ascontiguousarray(column) for column in columns))


def run(places: Places, direction: Route, copies: Sequence[Extent]) -> CopyEnd:
    """Submit one batch as job 1, wait for it, and return how it ended."""
    places.copier.submit(1, direction, batch_of(places, direction, copies))
    places.copier.drain()
    (end,) = places.copier.poll()
    return end


def next_ends(places: Places) -> list[CopyEnd]:
    """Poll until something has ended."""
    while not (ended := places.copier.poll()):
        os.sched_yield()
    return ended


def applied(target: Bytes, source: Bytes, copies: Sequence[Extent]) -> Bytes:
    """What ``target`` holds after the copies."""
    after = target.copy()
    for source_offset, target_offset, size in copies:
        after[target_offset : target_offset + size] = source[source_offset : source_offset + size]
    return after
