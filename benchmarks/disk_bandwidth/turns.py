"""One turn of a slab: many extents put, or got back."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.disk_bandwidth.others import Other, RocksDB
from offload.messages import EPOCH_SHIFT, Ids
from offload.worker.media.base import Extent, MediumJob, PoolSlots, Verb
from offload.worker.media.slab import SlabMedium, SlabOptions
from offload.worker.pool.memory import HostMemory
from offload.worker.seals import Checksums, checksums_of

__all__ = ["Slabs", "Turn"]

_JOB_BYTES = 16 << 20
"""Of one job, about."""
_POLL_SECONDS = 1e-3


class Turn(NamedTuple):
    """Bytes that were moved, seconds that it took, and of CPU, on all threads."""

    nbytes: int
    seconds: float
    cpu_seconds: float


class Slabs:
    """A pool of random bytes, and a slab below it with a place for each extent of it.

    Neighbouring slots of an extent are as scattered as in a pool that has been in use for long.
    """

    def __init__(
        self,
        path: Path,
        *,
        extent_bytes: int,
        slot_bytes: int,
        num_extents: int,
        options: SlabOptions,
        huge_pages: bool,
    ) -> None:
        self._path = path
        self._extent_slots = extent_bytes // slot_bytes
        self._num_extents = num_extents
        self._options = options
        num_slots = num_extents * self._extent_slots
        hot_slots = max(options.put_threads, options.get_threads) * self._extent_slots
        self._memory = HostMemory(num_slots + hot_slots, slot_bytes, huge_pages=huge_pages)
        self._pool = PoolSlots(self._memory.address, num_slots, slot_bytes)
        memory = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.address)
        self._view = memoryview(memory).cast("B")
        rng = np.random.default_rng(0)
        words = (ctypes.c_uint64 * (self._memory.nbytes // 8)).from_address(self._memory.address)
        np.frombuffer(words, dtype=np.uint64)[:] = rng.integers(0, 1 << 63, len(words), dtype=np.uint64)
        self._slots: Ids = rng.permutation(num_slots).astype(np.int64).reshape(num_extents, -1)
        addresses = self._pool.addresses(self._slots.ravel())
        self._seals: Checksums = checksums_of(addresses[:, None], [slot_bytes]).reshape(self._slots.shape)
        self._generations = np.zeros(num_extents, dtype=np.int64)
        self._job_ids = itertools.count(1)
        self.is_direct = False

    @property
    def file(self) -> Path:
        """The slab."""
        return self._path / "slab"

    def close(self) -> None:
        """Give the pool's memory back."""
        self._memory.close()

    def turn(self, verb: Verb, rng: random.Random) -> Turn:
        """Put or get every extent once, in an order of chance.

        Raises:
            RuntimeError: one of them failed.
        """
        with self._opened() as medium:
            order = rng.sample(range(self._num_extents), self._num_extents)
            per_job = max(1, _JOB_BYTES // (self._extent_slots * self._pool.slot_bytes))
            jobs = [
                self._job(verb, medium.epoch, order[at : at + per_job])
                for at in range(0, len(order), per_job)
            ]
            cpu_before, began = time.process_time(), time.perf_counter()
            for job in jobs:
                medium.submit(job)
            left = len(jobs)
            while left:
                time.sleep(_POLL_SECONDS)
                for end in medium.poll():
                    if end.error is not None:
                        raise RuntimeError(f"{verb.value}: {end.error}")
                    left -= 1
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
        return Turn(self._slots.size * self._pool.slot_bytes, seconds, cpu_seconds)

    def bare_turn(self, verb: Verb, rng: random.Random, *, is_hot: bool = False) -> Turn:
        """Put or get every extent by one call of the kernel, from as many threads, and nothing else.

        ``is_hot``: each thread moves a buffer of its own again and again, as fio does.
        """
        call = os.pwritev if verb is Verb.PUT else os.preadv
        extent_bytes = self._extent_slots * self._pool.slot_bytes
        fd = os.open(self.file, os.O_RDWR | (os.O_DIRECT if self.is_direct else 0))
        numbers, own = itertools.count(), threading.local()

        def move(place: int) -> int:
            if not is_hot:
                return call(fd, self._views(place), place * extent_bytes)
            if not hasattr(own, "start"):
                own.start = self._slots.size * self._pool.slot_bytes + next(numbers) * extent_bytes
            return call(fd, [self._view[own.start : own.start + extent_bytes]], place * extent_bytes)

        try:
            return self._timed(verb, rng, move)
        finally:
            os.close(fd)

    def other_turn(self, verb: Verb, rng: random.Random, kind: type[Other]) -> Turn:
        """Put or get every extent by what others use, checked against its seals before or after.

        What was written by an earlier turn is brought to the device and out of the page cache before; that
        does not count. To close it does.
        """
        path = self._path.with_name(f"{self._path.name} {kind.__name__}")
        if verb is Verb.PUT and issubclass(kind, RocksDB):
            kind.begin_anew(path)
        elif path.exists():
            kind.forget_pages(path)
        other = kind(path, self._threads(verb))

        def move(place: int) -> int:
            views = self._views(place)
            if verb is Verb.PUT:
                self._check(place)
                other.put(place, views)
            else:
                other.get(place, views)
                self._check(place)
            return sum(map(len, views))

        return self._timed(verb, rng, move, other.close)

    def _timed(
        self,
        verb: Verb,
        rng: random.Random,
        move: Callable[[int], int],
        close: Callable[[], None] = lambda: None,
    ) -> Turn:
        order = rng.sample(range(self._num_extents), self._num_extents)
        with ThreadPoolExecutor(self._threads(verb)) as pool:
            cpu_before, began = time.process_time(), time.perf_counter()
            nbytes = sum(pool.map(move, order))
            close()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
        return Turn(nbytes, seconds, cpu_seconds)

    def _threads(self, verb: Verb) -> int:
        return self._options.get_threads if verb is Verb.GET else self._options.put_threads

    def _views(self, place: int) -> list[memoryview]:
        size = self._pool.slot_bytes
        return [self._view[slot * size : (slot + 1) * size] for slot in self._slots[place].tolist()]

    def _check(self, place: int) -> None:
        addresses = self._pool.addresses(self._slots[place])
        if not np.array_equal(checksums_of(addresses[:, None], [self._pool.slot_bytes]), self._seals[place]):
            raise RuntimeError(f"extent {place} is not what was put")

    def _job(self, verb: Verb, epoch: int, places: Sequence[int]) -> MediumJob:
        job_id = next(self._job_ids)
        if verb is Verb.PUT:
            self._generations[places] = epoch << EPOCH_SHIFT | job_id
        extents = [
            Extent(place, int(self._generations[place]), self._slots[place], self._seals[place])
            for place in places
        ]
        return MediumJob.of(job_id, verb, extents)

    @contextmanager
    def _opened(self) -> Iterator[SlabMedium]:
        medium = SlabMedium(
            self._path,
            self._pool,
            namespace="benchmark",
            extent_slots=self._extent_slots,
            num_places=self._num_extents,
            options=self._options,
        )
        self.is_direct = medium.is_direct
        try:
            yield medium
        finally:
            medium.close(60)

    def with_options(self, options: SlabOptions) -> None:
        """Work so from the next turn on."""
        self._options = options
