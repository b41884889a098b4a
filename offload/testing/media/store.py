"""A store in memory, and media that share it."""

import ctypes
from typing import NamedTuple

import numpy as np

from offload.messages import Names
from offload.worker.media.base import (
    AbsentError,
    BadExtentError,
    Extent,
    Label,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against_named,
)
from offload.worker.seals import Checksums, checksums_of


class Key(NamedTuple):
    """Of an extent: the rank that it is of, its name, and what is behind that."""

    rank: int
    name: bytes
    suffix: bytes


class Stored(NamedTuple):
    """An extent as it was put.

    Attributes:
        depth: how many come before it in its chain.
        seals: of its slots.
        content: their bytes.
    """

    depth: int
    seals: Checksums
    content: bytearray


class MemoryStore:
    """What engines share. A test may take things away, and change bytes: then they are found to be wrong.

    Attributes:
        kept: by key, the one used last at the end.
        num_present: that were put although they were there.
    """

    def __init__(self) -> None:
        self.kept: dict[Key, Stored] = {}
        self.num_present = 0

    def evict(self, key: Key) -> None:
        """As a store does that is full, or when an extent's time is over."""
        self.kept.pop(key, None)

    def evict_deepest(self) -> None:
        """As a store does whose extents have the less time, the deeper they are."""
        if self.kept:
            self.evict(max(self.kept, key=lambda key: self.kept[key].depth))


class StoreMedium:
    """A medium over a store in memory, of one rank. It does at once what it is given."""

    def __init__(self, store: MemoryStore, pool: PoolSlots, *, extent_slots: int, rank: int = 0) -> None:
        """With extents of up to so many slots of that pool."""
        self._store = store
        self._pool = pool
        self._extent_slots = extent_slots
        self._rank = rank
        self._ended: list[MediumEnd] = []
        self._is_closed = False

    @property
    def is_off(self) -> bool:
        return False

    def submit(self, job: MediumJob) -> None:
        error = reason_against_named(job, self._pool, self._extent_slots)
        if self._is_closed:
            error = "the medium is closed"
        if error is not None:
            self._ended.append(MediumEnd(job.job_id, 0, error))
        elif job.verb is Verb.PROBE:
            self._ended.append(MediumEnd(job.job_id, self._num_found(job)))
        else:
            self._ended.append(self._move_all(job))

    def poll(self) -> list[MediumEnd]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, seconds: float) -> bool:
        self._is_closed = True
        return True

    def _key(self, name: Names, suffix: bytes) -> Key:
        return Key(self._rank, name.tobytes(), suffix)

    def _num_found(self, job: MediumJob) -> int:
        assert job.names is not None
        is_there = [self._key(name, job.suffix) in self._store.kept for name in job.names]
        if job.is_last_wanted:
            return max((index + 1 for index, each in enumerate(is_there) if each), default=0)
        return is_there.index(False) if False in is_there else len(is_there)

    def _move_all(self, job: MediumJob) -> MediumEnd:
        error, is_absent = None, False
        found = [np.empty(0, dtype=np.uint64)]
        for index in range(job.num_extents):
            try:
                found.append(self._move(job.verb, job.extent(index), job.label(index)))
            except BadExtentError as failure:
                error, is_absent = f"extent {index}: {failure}", isinstance(failure, AbsentError)
                break
        num_good = len(found) - 1
        nbytes = int(job.starts[num_good]) * self._pool.slot_bytes
        seals = np.concatenate(found) if job.verb is Verb.GET else None
        return MediumEnd(job.job_id, num_good, error, 0.0, nbytes, seals, is_absent)

    def _move(self, verb: Verb, extent: Extent, label: Label) -> Checksums:
        assert label.name is not None
        key, kept = self._key(label.name, label.suffix), self._store.kept
        addresses = self._pool.addresses(extent.slots)
        slot_bytes = self._pool.slot_bytes
        if verb is Verb.PUT:
            assert extent.seals is not None
            self._check(addresses, extent.seals)
            if key in kept:
                self._store.num_present += 1
                kept[key] = kept.pop(key)
                return extent.seals
            content = b"".join(ctypes.string_at(at, slot_bytes) for at in addresses.tolist())
            kept[key] = Stored(label.depth, extent.seals.copy(), bytearray(content))
            return extent.seals
        stored = kept.get(key)
        if stored is None:
            raise AbsentError("it is not there")
        try:
            seals = self._read(stored, extent)
        except BadExtentError:
            del kept[key]
            raise
        kept[key] = kept.pop(key)
        return seals

    def _read(self, stored: Stored, extent: Extent) -> Checksums:
        addresses, slot_bytes = self._pool.addresses(extent.slots), self._pool.slot_bytes
        seals = stored.seals[extent.skip : extent.skip + len(extent.slots)]
        if len(seals) != len(extent.slots):
            raise BadExtentError("it does not have so many slots")
        if extent.seals is not None and not np.array_equal(seals, extent.seals):
            raise BadExtentError("it has other bytes")
        for index, address in enumerate(addresses.tolist(), extent.skip):
            part = bytes(stored.content[index * slot_bytes : (index + 1) * slot_bytes])
            ctypes.memmove(address, part, slot_bytes)
        self._check(addresses, seals)
        return seals

    def _check(self, addresses: np.ndarray, seals: Checksums) -> None:
        if not np.array_equal(checksums_of(addresses[:, None], [self._pool.slot_bytes]), seals):
            raise BadExtentError("a checksum differs")
