"""A medium in memory, which does at once what it is given."""

import ctypes
from typing import NamedTuple

import numpy as np

from offload.messages import Ids
from offload.worker.media.base import (
    BadExtentError,
    Extent,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against,
)
from offload.worker.seals import Checksums, checksums_of


class Kept(NamedTuple):
    """An extent as it was put.

    Attributes:
        generation: of the job that put it.
        seals: of its slots.
        content: their bytes.
    """

    generation: int
    seals: Checksums
    content: bytearray


class MemoryMedium:
    """The obvious ``Medium``: a dict of what lies where.

    Attributes:
        kept: by place. A test may change the bytes: then they are found to be wrong.
    """

    def __init__(self, pool: PoolSlots, *, extent_slots: int, num_places: int) -> None:
        """A medium of so many places, with extents of up to so many slots of that pool."""
        self._pool = pool
        self._extent_slots = extent_slots
        self._num_places = num_places
        self._ended: list[MediumEnd] = []
        self._is_closed = False
        self._newest = np.zeros(num_places, dtype=np.int64)
        self.kept: dict[int, Kept] = {}

    @property
    def is_off(self) -> bool:
        return False

    def submit(self, job: MediumJob) -> None:
        error = reason_against(job, self._pool, self._num_places, self._extent_slots)
        if error is None and job.verb is Verb.PUT and len(np.unique(job.places)) != len(job.places):
            error = "a place comes twice"
        if self._is_closed:
            error = "the medium is closed"
        num_good = 0
        if error is None:
            for index in range(job.num_extents):
                try:
                    self._move(job.verb, job.extent(index))
                except BadExtentError as failure:
                    error = f"extent {index}: {failure}"
                    break
                num_good += 1
        self._ended.append(self._end(job, num_good, error))

    def poll(self) -> list[MediumEnd]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, seconds: float) -> bool:
        self._is_closed = True
        return True

    def _move(self, verb: Verb, extent: Extent) -> None:
        addresses = self._pool.addresses(extent.slots)
        if verb is Verb.PUT:
            assert extent.seals is not None
            self._check(addresses, extent.seals)
            if extent.generation <= self._newest[extent.place]:
                raise BadExtentError(f"generation {extent.generation} is not newer")
            self._newest[extent.place] = extent.generation
            content = b"".join(ctypes.string_at(at, self._pool.slot_bytes) for at in addresses.tolist())
            self.kept[extent.place] = Kept(extent.generation, extent.seals.copy(), bytearray(content))
            return
        kept = self.kept.get(extent.place)
        if kept is None or kept.generation != extent.generation or len(kept.seals) != len(extent.slots):
            raise BadExtentError(f"place {extent.place} does not hold generation {extent.generation}")
        if extent.seals is not None and not np.array_equal(kept.seals, extent.seals):
            raise BadExtentError(f"place {extent.place} was filled with other bytes")
        for index, address in enumerate(addresses.tolist()):
            start = index * self._pool.slot_bytes
            part = bytes(kept.content[start : start + self._pool.slot_bytes])
            ctypes.memmove(address, part, self._pool.slot_bytes)
        self._check(addresses, kept.seals)

    def _check(self, addresses: Ids, seals: Checksums) -> None:
        if not np.array_equal(checksums_of(addresses[:, None], [self._pool.slot_bytes]), seals):
            raise BadExtentError("a checksum differs")

    def _end(self, job: MediumJob, num_good: int, error: str | None) -> MediumEnd:
        num_slots = int(job.starts[num_good]) if num_good else 0
        seals = None
        if job.verb is Verb.GET:
            found = [self.kept[int(place)].seals for place in job.places[:num_good]]
            seals = np.concatenate([np.empty(0, dtype=np.uint64), *found])
        return MediumEnd(job.job_id, num_good, error, 0.0, num_slots * self._pool.slot_bytes, seals)
