"""A medium in memory, which does at once what it is given."""

import ctypes
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offload.messages import BROKEN, NAME_BYTES, SUFFIX_BYTES, Ids, is_private
from offload.worker.media.base import (
    BadExtentError,
    BrokenExtentError,
    Extent,
    Label,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against,
)
from offload.worker.media.seal_log import Kept as Recovered
from offload.worker.seals import Checksums, checksums_of


class Kept(NamedTuple):
    """An extent as it was put.

    Attributes:
        generation: of the job that put it.
        seals: of its slots.
        label: how it is called.
        content: their bytes.
    """

    generation: int
    seals: Checksums
    content: bytearray
    label: Label


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

    def recover(self) -> Recovered:
        """What lies where and is not private."""
        kept = {place: each for place, each in sorted(self.kept.items()) if not is_private(each.label.suffix)}
        unknown = np.zeros(NAME_BYTES, dtype=np.uint8)
        names = [(each.label.name, each.label.parent) for each in kept.values()]
        rows = np.array(
            [[unknown if each is None else each for each in pair] for pair in names], dtype=np.uint8
        )
        rows = rows.reshape(len(kept), 2, NAME_BYTES)
        suffixes = b"".join(each.label.suffix.ljust(SUFFIX_BYTES, b"\0") for each in kept.values())
        return Recovered(
            np.array(list(kept), dtype=np.int64),
            np.array([each.generation for each in kept.values()], dtype=np.int64),
            np.array([len(each.seals) for each in kept.values()], dtype=np.int64),
            rows[:, 0],
            rows[:, 1],
            np.frombuffer(suffixes, dtype=np.uint8).reshape(len(kept), SUFFIX_BYTES),
        )

    def reopen(self, other: "MemoryMedium") -> None:
        """Take over what another has kept, as if the process had been started again."""
        self._newest = other._newest.copy()
        self.kept = {place: each for place, each in other.kept.items() if not is_private(each.label.suffix)}

    def submit(self, job: MediumJob) -> None:
        error = reason_against(job, self._pool, self._num_places, self._extent_slots)
        if error is None and job.verb is Verb.PUT and len(np.unique(job.places)) != len(job.places):
            error = "a place comes twice"
        if self._is_closed:
            error = "the medium is closed"
        num_good, reason = 0, ""
        if error is None:
            for index in range(job.num_extents):
                try:
                    self._move(job.verb, job.extent(index), job.label(index))
                except BadExtentError as failure:
                    error = f"extent {index}: {failure}"
                    reason = BROKEN if isinstance(failure, BrokenExtentError) else ""
                    break
                num_good += 1
        self._ended.append(replace(self._end(job, num_good, error), reason=reason))

    def poll(self) -> list[MediumEnd]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, seconds: float) -> bool:
        self._is_closed = True
        return True

    def _move(self, verb: Verb, extent: Extent, label: Label) -> None:
        addresses = self._pool.addresses(extent.slots)
        if verb is Verb.PUT:
            assert extent.seals is not None
            self._check(addresses, extent.seals)
            if extent.generation <= self._newest[extent.place]:
                raise BadExtentError(f"generation {extent.generation} is not newer")
            self._newest[extent.place] = extent.generation
            content = b"".join(ctypes.string_at(at, self._pool.slot_bytes) for at in addresses.tolist())
            self.kept[extent.place] = Kept(extent.generation, extent.seals.copy(), bytearray(content), label)
            return
        kept = self.kept.get(extent.place)
        if kept is None or kept.generation != extent.generation:
            raise BadExtentError(f"place {extent.place} does not hold generation {extent.generation}")
        seals = kept.seals[extent.skip : extent.skip + len(extent.slots)]
        if len(seals) != len(extent.slots):
            raise BadExtentError(f"place {extent.place} does not hold so many slots")
        if extent.seals is not None and not np.array_equal(seals, extent.seals):
            raise BadExtentError(f"place {extent.place} was filled with other bytes")
        for index, address in enumerate(addresses.tolist(), extent.skip):
            start = index * self._pool.slot_bytes
            part = bytes(kept.content[start : start + self._pool.slot_bytes])
            ctypes.memmove(address, part, self._pool.slot_bytes)
        self._check(addresses, seals)

    def _check(self, addresses: Ids, seals: Checksums) -> None:
        if not np.array_equal(checksums_of(addresses[:, None], [self._pool.slot_bytes]), seals):
            raise BrokenExtentError("a checksum differs")

    def _end(self, job: MediumJob, num_good: int, error: str | None) -> MediumEnd:
        num_slots = int(job.starts[num_good]) if num_good else 0
        seals = None
        if job.verb is Verb.GET:
            extents = [job.extent(index) for index in range(num_good)]
            found = [self.kept[each.place].seals[each.skip :][: len(each.slots)] for each in extents]
            seals = np.concatenate([np.empty(0, dtype=np.uint64), *found])
        return MediumEnd(job.job_id, num_good, error, 0.0, num_slots * self._pool.slot_bytes, seals)
