"""A pool and a medium below it, for tests: what slots hold, jobs by few words, waiting for ends."""

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from offload.messages import EPOCH_SHIFT, Ids, Names
from offload.worker.media.base import Extent, Medium, MediumEnd, MediumJob, PoolSlots, Verb
from offload.worker.media.slab import SlabMedium, SlabOptions
from offload.worker.media.store_names import Whose
from offload.worker.pool.memory import HostMemory

PUT, GET, PROBE = Verb.PUT, Verb.GET, Verb.PROBE
SLOT, ODD_SLOT = 8192, 656 * 7
EXTENT, PLACES, SLOTS = 4, 12, 64
WAIT_SECONDS = 60.0
NAMESPACE = "model, layout, rank 0 of 1"
WHOSE = Whose("model and layout", "0 of 1")

Extents = Sequence[tuple[int, int, Sequence[int]]]
"""Each with place, job id and slots."""


class Pool:
    """Host memory as slots of random bytes."""

    def __init__(self, slot_bytes: int = SLOT, num_slots: int = SLOTS) -> None:
        self._memory = HostMemory(num_slots, slot_bytes)
        self.slots = PoolSlots(self._memory.address, num_slots, slot_bytes)
        memory = (ctypes.c_uint8 * self._memory.nbytes).from_address(self._memory.address)
        self.bytes = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)
        self._rng = np.random.default_rng(slot_bytes)
        self.fill(range(num_slots))

    def fill(self, slots: Sequence[int] | range) -> None:
        """Other bytes in these slots."""
        rows = list(slots)
        shape = (len(rows), self.slots.slot_bytes)
        self.bytes[rows] = self._rng.integers(0, 256, shape, dtype=np.uint8)

    def read(self, slots: Sequence[int]) -> bytes:
        return self.bytes[list(slots)].tobytes()

    def seals(self, slots: Sequence[int]) -> Any:
        return np.array([xxhash.xxh3_64_intdigest(self.bytes[slot]) for slot in slots], dtype=np.uint64)

    def put(self, job_id: int, extents: Extents, epoch: int = 1) -> MediumJob:
        return job_of(job_id, PUT, [(*each, self.seals(each[2])) for each in extents], epoch)


def job_of(job_id: int, verb: Verb, extents: Sequence[Any], epoch: int = 1) -> MediumJob:
    """Of tuples (place, job that put it, slots) or (place, job, slots, seals)."""
    made = [
        Extent(place, epoch << EPOCH_SHIFT | by, np.array(slots, dtype=np.int64), *seals)
        for place, by, slots, *seals in extents
    ]
    return MediumJob.of(job_id, verb, made)


def names_of(letters: str) -> Names:
    """Each is 32 times that letter."""
    return np.frombuffer(b"".join(each.encode() * 32 for each in letters), dtype=np.uint8).reshape(-1, 32)


def job(
    pool: Pool,
    job_id: int,
    verb: Verb,
    extents: Sequence[tuple[str, list[int]]],
    skips: Ids | None = None,
    *,
    by: int = 1,
    epoch: int = 1,
    **more: Any,
) -> MediumJob:
    """Of extents that have a letter for their name and their place, and slots; of the job ``by``."""
    letters = "".join(letter for letter, _ in extents)
    slots = [slot for _, each in extents for slot in each]
    return MediumJob(
        job_id,
        verb,
        ids(*(ord(letter) - ord("A") for letter in letters)),
        np.full(len(extents), epoch << EPOCH_SHIFT | by, dtype=np.int64),
        np.cumsum([0, *(len(each) for _, each in extents)], dtype=np.int64),
        ids(*slots),
        pool.seals(slots) if verb is PUT else None,
        skips,
        names_of(letters),
        depths=np.arange(len(extents)),
        **more,
    )


def probe(job_id: int, letters: str, **more: Any) -> MediumJob:
    """Are extents of these names there?"""
    zeros = np.zeros(len(letters), dtype=np.int64)
    starts = np.zeros(len(letters) + 1, dtype=np.int64)
    return MediumJob(job_id, PROBE, zeros, zeros + 1, starts, ids(), names=names_of(letters), **more)


def get(job_id: int, extents: Extents, epoch: int = 1) -> MediumJob:
    return job_of(job_id, GET, extents, epoch)


def ends(medium: Medium, count: int = 1) -> list[MediumEnd]:
    """Poll until so many jobs have ended."""
    found: list[MediumEnd] = []
    wait_until(lambda: len(found.__iadd__(medium.poll())) >= count)
    assert len(found) == count, found
    return sorted(found, key=lambda end: end.job_id)


def run(medium: Medium, job: MediumJob) -> MediumEnd:
    """Submit it, and wait for its end."""
    medium.submit(job)
    (end,) = ends(medium)
    assert end.job_id == job.job_id
    return end


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, "it has not happened"
        time.sleep(0.0005)


def slab(
    path: Path, pool: Pool, *, namespace: str = NAMESPACE, places: int = PLACES, **options: Any
) -> SlabMedium:
    """A slab of small extents in that directory."""
    return SlabMedium(
        path,
        pool.slots,
        namespace=namespace,
        extent_slots=EXTENT,
        num_places=places,
        options=SlabOptions(**options),
    )


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)
