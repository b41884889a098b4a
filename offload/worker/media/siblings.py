"""Pools of siblings as a medium: what engines beside this one have is copied into the own pool."""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offload.messages import Ids
from offload.naming import ROOT
from offload.worker.media.base import (
    AbsentError,
    BadExtentError,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    check_seals,
    reason_against_named,
)
from offload.worker.media.runner import MakeRunner, Runner
from offload.worker.pool.region_index import SlotRows
from offload.worker.pool.siblings import OpenSibling, Sibling, Siblings, reading
from offload.worker.seals import Checksums, num_leading

_MOST_SLOTS = 1 << 20
"""Of an extent: no sibling keeps any as such."""
_HANG_SECONDS = 10.0
_GET_THREADS = 2
_EXTENTS_AT_ONCE = 16


class _Piece(NamedTuple):
    """Slots that lie one behind the other, there and here.

    Attributes:
        source: the first there.
        target: the first here.
        generations: of those there.
    """

    source: int
    target: int
    generations: Ids


class SiblingMedium:
    """A ``Medium`` over regions of siblings, which go on writing, reset, restart and vanish as they like.

    Its index of what they have is made anew when it is asked a question, if something has changed. What is
    read has the generation that the index says, before the copy and after it, or it is not there. Then its
    bytes are compared with their checksums. It puts nothing. After a reset nothing is of use: there a suffix
    is behind all names.

    The name ``ROOT`` is that of nothing. A question for it is whether any sibling has anything.
    """

    def __init__(self, siblings: Siblings, pool: PoolSlots, *, make_runner: MakeRunner = Runner) -> None:
        """Start the threads. ``pool``: whose slots are filled."""
        self._siblings = siblings
        self._pool = pool
        num_bytes = pool.num_slots * pool.slot_bytes
        self._memory = memoryview((ctypes.c_uint8 * num_bytes).from_address(pool.address)).cast("B")
        self._refused: list[MediumEnd] = []
        self.runner = make_runner(
            "siblings",
            self._move,
            {Verb.GET: _GET_THREADS, Verb.PROBE: 1},
            slot_bytes=pool.slot_bytes,
            hang_seconds=_HANG_SECONDS,
            probe=self._probe,
            most_extents=_EXTENTS_AT_ONCE,
        )

    @property
    def is_off(self) -> bool:
        return self.runner.hangs(Verb.GET)

    def submit(self, job: MediumJob) -> None:
        error = reason_against_named(job, self._pool, _MOST_SLOTS)
        if job.verb is Verb.PUT:
            error = "a sibling's pool is not written to"
        if error is None:
            self.runner.submit(job)
        else:
            self._refused.append(MediumEnd(job.job_id, 0, error))

    def poll(self) -> list[MediumEnd]:
        refused, self._refused = self._refused, []
        return refused + self.runner.poll()

    def close(self, seconds: float) -> bool:
        self.runner.stop()
        if not self.runner.is_over.wait(seconds):
            self.runner.cancel()
        return self.runner.is_over.wait(0.1)

    def check_invariants(self) -> None:
        """Its parts agree with themselves, and its memory is the pool's."""
        assert len(self._memory) == self._pool.num_slots * self._pool.slot_bytes, (
            "it has another pool's memory"
        )
        self.runner.check_invariants()
        self._siblings.check_invariants()

    # On the threads

    def _probe(self, number: int, job: MediumJob) -> int:
        assert job.names is not None
        siblings = self._siblings.look()
        if job.suffix or not siblings:
            return 0
        if job.num_extents == 1 and job.names[0].tobytes() == ROOT:
            return int(not all(sibling.contents.is_empty for sibling in siblings))
        found = [sibling.contents.has(job.names) for sibling in siblings]
        if job.is_last_wanted:
            return max(int(np.flatnonzero(each).max(initial=-1)) + 1 for each in found)
        return max(map(num_leading, found))

    def _move(
        self, verb: Verb, number: int, job: MediumJob, indices: range
    ) -> Sequence[Checksums | Exception]:
        """Extents of one sibling each; those behind one that is not there are not looked at."""
        found: list[Checksums | Exception] = []
        for index in indices:
            try:
                found.append(self._get(job, index))
            except OSError as error:
                found.append(BadExtentError(f"a sibling's pool cannot be read: {error}"))
            except BadExtentError as error:
                found.append(error)
            if isinstance(found[-1], Exception):
                break
        return found

    def _get(self, job: MediumJob, index: int) -> Checksums:
        extent, name = job.extent(index), job.label(index).name
        assert name is not None
        for sibling in () if job.suffix else self._siblings.found:
            rows = sibling.contents.find(name, len(extent.slots), extent.skip)
            if rows is not None and self._copy(sibling, rows, extent.slots):
                if extent.seals is not None and not np.array_equal(rows.sums, extent.seals):
                    raise BadExtentError("it has other bytes")
                check_seals(self._pool, extent, rows.sums, "a checksum differs")
                return rows.sums
        raise AbsentError("no sibling has it")

    def _copy(self, sibling: Sibling, rows: SlotRows, targets: Ids) -> bool:
        """Copy what these rows say; returns whether it was there all the time."""
        pieces = list(_pieces(rows, targets))
        with reading(sibling) as opened:
            return (
                opened is not None
                and _are_current(opened, pieces)
                and all(opened.read(piece.source, self._room_of(piece)) for piece in pieces)
                and _are_current(opened, pieces)
            )

    def _room_of(self, piece: _Piece) -> memoryview:
        start, size = piece.target * self._pool.slot_bytes, len(piece.generations) * self._pool.slot_bytes
        return self._memory[start : start + size]


def _are_current(opened: OpenSibling, pieces: Sequence[_Piece]) -> bool:
    return all(opened.are_current(piece.source, piece.generations) for piece in pieces)


def _pieces(rows: SlotRows, targets: Ids) -> Iterator[_Piece]:
    is_break = (np.diff(rows.slots) != 1) | (np.diff(targets) != 1)
    edges = [0, *(np.flatnonzero(is_break) + 1).tolist(), len(targets)]
    for start, stop in pairwise(edges):
        yield _Piece(int(rows.slots[start]), int(targets[start]), rows.generations[start:stop])
