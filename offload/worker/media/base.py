"""The seam between the pool and what keeps its KV below: a medium takes extents in and gives them back."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from offload.messages import Ids, Names
from offload.peer_messages import PeerLife
from offload.worker.seals import Checksums, checksums_of

_ANY_PLACE = 1 << 62


class BadExtentError(Exception):
    """An extent is not what was asked for; the message says why. It ends its job, and goes no further up."""


class AbsentError(BadExtentError):
    """It is not there, and nothing is wrong."""

    def __init__(self, text: str, reason: str = "") -> None:
        """``reason``: see ``JobReport``."""
        super().__init__(text)
        self.reason = reason


class BrokenExtentError(BadExtentError):
    """Its bytes are not those that were kept: a checksum differs."""


class Verb(Enum):
    """What a job does."""

    PUT = "put"
    """From pool slots to the medium."""
    GET = "get"
    """From the medium into pool slots."""
    PROBE = "probe"
    """Nothing moves: are these names there? Media that find extents by name answer."""


class Extent(NamedTuple):
    """A run of chain positions that lies in one place of the medium.

    Attributes:
        place: its number on the medium.
        generation: ``epoch << 40 | id of the job that puts it``. Of one place they only rise.
        slots: of the pool, ``int64[n]``, in the order of the extent's bytes.
        seals: the xxh3-64 of each slot's bytes, ``uint64[n]``. PUT: what the pool knows of them. GET: what
            they must be, or None where only the medium knows that.
        skip: GET: that many of its leading slots are not wanted, and ``slots`` has those behind them.
    """

    place: int
    generation: int
    slots: Ids
    seals: Checksums | None = None
    skip: int = 0


class Label(NamedTuple):
    """What a medium that outlives the process keeps beside an extent.

    Attributes:
        name: the prefix hash of its last position, ``uint8[32]``; None: unknown.
        parent: that of the extent before it in its chain, zeros if there is none.
        depth: how many come before it in its chain.
        suffix: it belongs behind the name. If it ``is_private``, nobody may be told of the extent once the
            medium was opened again.
    """

    name: Names | None = None
    parent: Names | None = None
    depth: int = 0
    suffix: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class MediumJob:
    """Extents to put or to get, in order. Plain data; whoever reads it never changes it.

    Attributes:
        job_id: no other job that has not ended has it.
        verb: put or get.
        places: of each extent, ``int64[extents]``.
        generations: of each, ``int64[extents]``.
        starts: extent ``i`` has ``slots[starts[i]:starts[i + 1]]``; ``int64[extents + 1]``.
        slots: of all extents, one after the other, ``int64[slots]``.
        seals: of all slots, ``uint64[slots]``; None: see ``Extent``.
        skips: leading slots of each extent that a GET leaves out, ``int64[extents]``; None: of all none.
        names: PUT: what each is called, ``uint8[extents, 32]``; None: all zeros. Media that find extents by
            name have it of every job, and do not look at places and generations.
        parents: PUT: how the one before it is called; the same.
        depths: how many come before each in its chain, ``int64[extents]``; None: none.
        suffix: belongs behind each name; what was put with another one is not found. See ``Label``.
        is_last_wanted: PROBE: see ``Extents``.
        life: GET, PROBE: see ``Extents``.
        is_release: PROBE: see ``Extents``.
    """

    job_id: int
    verb: Verb
    places: Ids
    generations: Ids
    starts: Ids
    slots: Ids
    seals: Checksums | None = None
    skips: Ids | None = None
    names: Names | None = None
    parents: Names | None = None
    depths: Ids | None = None
    suffix: bytes = b""
    is_last_wanted: bool = False
    life: PeerLife | None = None
    is_release: bool = False

    @classmethod
    def of(cls, job_id: int, verb: Verb, extents: Iterable[Extent]) -> "MediumJob":
        """A job of these extents, with seals if all have some. O(extents)."""
        extents = list(extents)
        empty: Ids = np.empty(0, dtype=np.int64)
        sizes = [len(extent.slots) for extent in extents]
        seals = [extent.seals for extent in extents if extent.seals is not None]
        return cls(
            job_id,
            verb,
            np.array([extent.place for extent in extents], dtype=np.int64),
            np.array([extent.generation for extent in extents], dtype=np.int64),
            np.cumsum([0, *sizes], dtype=np.int64),
            np.concatenate([empty, *(extent.slots for extent in extents)]),
            np.concatenate(seals) if seals and len(seals) == len(extents) else None,
            np.array([extent.skip for extent in extents], dtype=np.int64),
        )

    @property
    def num_extents(self) -> int:
        """That it has."""
        return len(self.places)

    def extent(self, index: int) -> Extent:
        """One of them; its arrays are views."""
        part = slice(self.starts[index], self.starts[index + 1])
        seals = None if self.seals is None else self.seals[part]
        skip = 0 if self.skips is None else int(self.skips[index])
        return Extent(int(self.places[index]), int(self.generations[index]), self.slots[part], seals, skip)

    def label(self, index: int) -> "Label":
        """How one of them is called."""
        return Label(
            None if self.names is None else self.names[index],
            None if self.parents is None else self.parents[index],
            0 if self.depths is None else int(self.depths[index]),
            self.suffix,
        )


@dataclass(frozen=True, slots=True, eq=False)
class MediumEnd:
    """A submitted job has ended, one way or the other.

    Attributes:
        job_id: as submitted.
        num_good: leading extents that are good. Of a PUT: that can be got back, also after the process was
            killed. Of a GET: whose slots hold exactly what was put, checked against its seals. Of a PROBE:
            that are there, or those up to the last that is.
        error: what went wrong; None exactly if all extents are good, or a PROBE was answered.
        seconds: from its first byte to its last.
        nbytes: of slots, of the good extents.
        seals: of a GET: those of the slots of the good extents, ``uint64[n]``, in order; else None.
        is_absent: of a GET: the first extent that is not good is not there, and nothing is wrong.
        reason: see ``JobReport``.
    """

    job_id: int
    num_good: int
    error: str | None = None
    seconds: float = 0.0
    nbytes: int = 0
    seals: Checksums | None = None
    is_absent: bool = False
    reason: str = ""


class Medium(Protocol):
    """Moves extents between pool slots and a place below, asynchronously.

    Called from one thread, the engine's, which never waits here but in ``close``. Every submitted job ends
    exactly once. Jobs may end in any order. A job's slots and places belong to the medium until it has ended.
    A PUT to a place where another job is under way is refused. So is a GET from one that is being written.

    What goes wrong is a failed end. A job that ends short has done harm to its own slots and places only:
    the slots of a GET behind its good extents hold anything, and the places of a PUT nothing.
    """

    @property
    def is_off(self) -> bool:
        """Whether it ends every job at once, as failed. A medium that hangs may come back."""

    def submit(self, job: MediumJob) -> None:
        """Begin it, or let it end as failed."""

    def poll(self) -> list[MediumEnd]:
        """Jobs that have ended since the last call. Each is reported exactly once."""

    def close(self, seconds: float) -> bool:
        """Wait until every job has ended, so long at most, and release threads, files and connections.

        What has not begun by then ends as failed. Returns False if a job may still be under way: then its
        slots must stay mapped until the process ends. Calling it again does no harm.
        """


class PoolSlots(NamedTuple):
    """The pool's memory as media see it: slots of one size, one after the other.

    Attributes:
        address: of slot 0.
        num_slots: slots.
        slot_bytes: of one.
    """

    address: int
    num_slots: int
    slot_bytes: int

    def addresses(self, slots: Ids) -> Ids:
        """Of these slots, ``int64[n]``."""
        return self.address + slots * self.slot_bytes


def check_seals(pool: PoolSlots, extent: Extent, seals: Checksums, error: str) -> None:
    """Compare what an extent's slots hold with these checksums. Raises BrokenExtentError of that text."""
    addresses = pool.addresses(extent.slots)
    if not np.array_equal(checksums_of(addresses[:, None], [pool.slot_bytes]), seals):
        raise BrokenExtentError(error)


def reason_against_named(job: MediumJob, pool: PoolSlots, extent_slots: int) -> str | None:
    """The same of a medium that finds extents by name."""
    if job.names is None or len(job.names) != job.num_extents:
        return "extents without names"
    if job.depths is not None and len(job.depths) != job.num_extents:
        return "its extents do not add up"
    if job.verb is Verb.PROBE:
        return None
    return reason_against(job, pool, _ANY_PLACE, extent_slots)


def reason_against(job: MediumJob, pool: PoolSlots, num_places: int, extent_slots: int) -> str | None:
    """Why this job cannot be one of a medium of so many places of so many slots; None if it can."""
    if job.verb is Verb.PROBE:
        return "it finds nothing by name"
    sizes = np.diff(job.starts)
    skips = np.zeros(len(job.places), dtype=np.int64) if job.skips is None else job.skips
    if len(job.starts) != len(job.places) + 1 or not len(job.generations) == len(skips) == len(job.places):
        return "its extents do not add up"
    if not len(sizes):
        return None
    if job.starts[0] != 0 or job.starts[-1] != len(job.slots) or not sizes.min() >= 1:
        return "its extents do not add up"
    if (sizes + skips).max() > extent_slots:
        return f"an extent of {(sizes + skips).max()} slots: a place holds {extent_slots}"
    if skips.min() < 0 or (job.verb is Verb.PUT and skips.any()):
        return f"slots left out: {skips.tolist()}"
    if not 0 <= job.places.min() <= job.places.max() < num_places:
        return f"places from {job.places.min()} to {job.places.max()}: there are {num_places}"
    if not 0 <= job.slots.min() <= job.slots.max() < pool.num_slots:
        return f"slots from {job.slots.min()} to {job.slots.max()}: the pool has {pool.num_slots}"
    if job.generations.min() < 1:
        return f"generation {job.generations.min()}: must be at least 1"
    if job.seals is None and job.verb is Verb.PUT:
        return "slots without seals"
    if job.seals is not None and len(job.seals) != len(job.slots):
        return f"{len(job.seals)} seals of {len(job.slots)} slots"
    return None
