"""One turn of a slab: many extents put, or got back."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
        self._memory = HostMemory(num_slots, slot_bytes, huge_pages=huge_pages)
        self._pool = PoolSlots(self._memory.address, num_slots, slot_bytes)
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

    def bare_turn(self, verb: Verb, rng: random.Random) -> Turn:
        """Put or get every extent by one call of the kernel, from as many threads, and nothing else."""
        call, threads = (os.pwritev, self._options.put_threads)
        if verb is Verb.GET:
            call, threads = (os.preadv, self._options.get_threads)
        size, extent_bytes = self._pool.slot_bytes, self._extent_slots * self._pool.slot_bytes
        memory = (ctypes.c_char * self._memory.nbytes).from_address(self._memory.address)
        view = memoryview(memory).cast("B")
        fd = os.open(self.file, os.O_RDWR | (os.O_DIRECT if self.is_direct else 0))

        def move(place: int) -> int:
            pieces = [view[slot * size : (slot + 1) * size] for slot in self._slots[place].tolist()]
            return call(fd, pieces, place * extent_bytes)

        order = rng.sample(range(self._num_extents), self._num_extents)
        with ThreadPoolExecutor(threads) as pool:
            cpu_before, began = time.process_time(), time.perf_counter()
            nbytes = sum(pool.map(move, order))
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
        os.close(fd)
        return Turn(nbytes, seconds, cpu_seconds)

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
