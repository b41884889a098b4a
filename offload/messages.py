"""What the scheduler side and the worker side tell each other. Plain data; a reader never changes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload.peer_messages import AskerFacts as AskerFacts
from offload.peer_messages import PeerFacts as PeerFacts
from offload.peer_messages import PeerLife as PeerLife
from offload.peer_messages import Unused as Unused
from offload.pool_messages import MemoryFacts as MemoryFacts
from offload.pool_messages import Resize as Resize
from offload.pool_messages import Resized as Resized
from offload.pool_messages import merge_resized

Ids = npt.NDArray[np.int64]
"""Ids of GPU blocks, of slots, or of what another place keeps."""

Names = npt.NDArray[np.uint8]
"""Prefix hashes as rows of ``NAME_BYTES``, shorter ones with zeros behind."""

NAME_BYTES = 32

SUFFIX_BYTES = 16
"""Of a suffix, which is behind names of extents since weights changed. There is none before."""

PRIVATE, NAMED = b"p", b"v"
"""How a suffix begins of extents that no later life may read, and of those whose weights have a name."""

EPOCH_SHIFT = 40
"""A generation is ``epoch << EPOCH_SHIFT | job id``, so that those of another life are never met again."""


def is_private(suffix: bytes) -> bool:
    """Whether extents with that suffix are of use to nobody once their engine has ended."""
    return suffix[:1] == PRIVATE


class Route(NamedTuple):
    """The way between two places, in one direction.

    Attributes:
        verb: what it is called to move blocks along it.
        source: the place that blocks come from.
        target: the place that they are copied to; ``SCHEDULER``: none, it is only told what is there.
    """

    verb: str
    source: str
    target: str

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return f"{self.source}_to_{self.target}"


GPU, POOL, SCHEDULER = "gpu", "pool", "scheduler"
STORE, LOAD = Route("store", GPU, POOL), Route("load", POOL, GPU)
GPU_ROUTES = (STORE, LOAD)


class Fingerprint(NamedTuple):
    """Equal on every rank of an engine, however its layers are spread over them.

    Attributes:
        kv_offload: version of this package.
        vllm: version of vLLM.
        world_size: ranks of the engine.
        block_size: tokens per block.
        dtype: element types of the KV cache, and of the model where that says "auto".
        layout: order of the cache's dimensions.
        groups: kinds of its cache groups.
    """

    kv_offload: str
    vllm: str
    world_size: int
    block_size: int
    dtype: str
    layout: str
    groups: str = ""


class Extents(NamedTuple):
    """Where blocks of an order lie in a tier: runs of them, each in a place of its own.

    Attributes:
        places: of each, ``int64[extents]``.
        generations: of what lies there, or is to lie there, ``int64[extents]``.
        starts: extent ``i`` has blocks ``starts[i] <= b < starts[i + 1]``, ``int64[extents + 1]``.
        skips: leading slots of each that the order leaves out, ``int64[extents]``; none where it is written.
        names: where it is written, or found by name: the prefix hash of its last position,
            ``uint8[extents, 32]``, and that of the extent before it, all zeros for the first of a chain.
        parents: where it is written: the same.
        depths: where it is found by name: how many come before it in its chain, ``int64[extents]``.
        suffix: what is behind the name since weights changed, the same on all ranks: see ``is_private``.
        is_last_wanted: where names are looked for: what is asked is which the last of them is that is there,
            not how many leading ones are.
        life: of peers, the one that is asked; None: all of them.
        is_release: nothing is asked: what that peer leases up to these names is not needed any more.
    """

    places: Ids
    generations: Ids
    starts: Ids
    skips: Ids
    names: Names | None = None
    parents: Names | None = None
    depths: Ids | None = None
    suffix: bytes = b""
    is_last_wanted: bool = False
    life: PeerLife | None = None
    is_release: bool = False

    def part(self, start: int, stop: int) -> "Extents":
        """Those of blocks ``start <= b < stop``, which begin and end with extents."""
        first, last = np.searchsorted(self.starts, (start, stop))
        part = self._at(slice(first, last))
        return part._replace(starts=self.starts[first : last + 1] - start)

    def of(self, indices: Ids) -> "Extents":
        """Those, in that order; their blocks are behind each other."""
        sizes = np.diff(self.starts)[indices]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return self._at(indices)._replace(starts=starts)

    def _at(self, indices: slice | Ids) -> "Extents":
        return self._replace(
            places=self.places[indices],
            generations=self.generations[indices],
            skips=self.skips[indices],
            names=None if self.names is None else self.names[indices],
            parents=None if self.parents is None else self.parents[indices],
            depths=None if self.depths is None else self.depths[indices],
        )


class Part(NamedTuple):
    """Job ``job_id`` moves blocks ``start <= i < stop`` of an order."""

    job_id: int
    start: int
    stop: int


class Order(NamedTuple):
    """Copy blocks along a route.

    Attributes:
        route: where from and where to.
        parts: the jobs that do it.
        sources: ids of the blocks to copy, ``int64[n]``, in chain order.
        targets: ids of where they go, ``int64[n]``.
        fills: where slots are read, the jobs that filled them, ``int64[n]``.
        request_id: the request that waits for it; None if none does.
        extents: where a tier keeps them; its side of ``sources`` and ``targets`` then has their places.
        is_urgent: others wait for it, though no request does.
    """

    route: Route
    parts: list[Part]
    sources: Ids
    targets: Ids
    fills: Ids | None = None
    request_id: str | None = None
    extents: Extents | None = None
    is_urgent: bool = False


class Kept(NamedTuple):
    """What slots hold that a later life of the engine, or a peer, may find there. It is good on all ranks.

    Attributes:
        slots: of the pool, ``int64[n]``.
        generations: of what they hold, ``int64[n]``; a slot that has another by now is passed over.
        names: the prefix hash of the last token that each depends on, ``uint8[n, 32]``.
        parents: that of the position before it, zeros for the first of a chain and for bags.
        marks: which of the slots of that name it is, ``int64[n]``; see ``offload.scheduler.lasting``.
    """

    slots: Ids
    generations: Ids
    names: Names
    parents: Names
    marks: Ids

    def rows(self, which: npt.NDArray[np.bool_] | Ids) -> "Kept":
        """Those of them."""
        slots, generations, marks = self.slots[which], self.generations[which], self.marks[which]
        return Kept(slots, generations, self.names[which], self.parents[which], marks)


class Listening(NamedTuple):
    """Which life of the pool peers may read. It begins at the start and with each reset, and with a name.

    A rank that listens forgets what it knew of slots before it looks at what else comes with the plan.

    Attributes:
        peer: the engine, 8 bytes; the same after a restart. Nobody dials by it.
        epoch: names this life, 8 bytes, drawn at random.
        suffix: what was computed with these weights is asked for with this: nothing since the start, that of
            their name, or a private one, which nobody has.
    """

    peer: bytes
    epoch: bytes
    suffix: bytes


MOST_REFUSED = 4096
"""Prompts of which peers are told that nobody need wait for them."""


class Verdict(NamedTuple):
    """Whether peers may wait for a prompt.

    Attributes:
        name: of its last position, or of the bag there, 32 bytes.
        is_refused: it will not be handed off; else it may be again.
    """

    name: bytes
    is_refused: bool


@dataclass(slots=True)
class StepPlan:
    """Scheduler to workers, once a step, the same for every rank."""

    fingerprint: Fingerprint
    orders: list[Order] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Jobs in flight whose bytes are no longer wanted."""
    kept: list[Kept] = field(default_factory=list)
    """What a pool that outlives the engine, or that peers read, holds since the last plan."""
    listening: Listening | None = None
    """In the first plan of an engine that listens, and in the first one of each other life."""
    verdicts: list[Verdict] = field(default_factory=list)
    """On prompts that peers may be waiting for."""
    resizes: list[Resize] = field(default_factory=list)
    """Of the pool's memory, to be done in this order."""
    timed: int = 0
    """The number of this step, if the scheduler's side wants to know when it has ended; 0: it does not."""


BROKEN = "broken"
"""The reason of a job of which bytes are not those that were stored: a checksum differs."""


class JobReport(NamedTuple):
    """What became of a job on some ranks.

    Attributes:
        num_ranks: ranks where it is over.
        num_good: leading blocks that are good on the worst rank heard of.
        given_up: a rank's copy is past its deadline; it is over there when ``num_ranks`` says so.
        seconds: that the copy took on the slowest rank heard of.
        nbytes: that were copied, on these ranks together.
        is_sound: nothing went wrong on these ranks. What is not good, if anything, was not there.
        reason: of ``Unused``, why a peer did not bring all of it, or ``BROKEN``; "": nobody says.
    """

    num_ranks: int
    num_good: int
    given_up: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    is_sound: bool = False
    reason: str = ""

    def merged(self, other: "JobReport") -> "JobReport":
        """Both reports as one."""
        return JobReport(
            self.num_ranks + other.num_ranks,
            min(self.num_good, other.num_good),
            self.given_up or other.given_up,
            max(self.seconds, other.seconds),
            self.nbytes + other.nbytes,
            self.is_sound and other.is_sound,
            max(self.reason, other.reason),  # whichever says something, and always the same
        )


@dataclass(slots=True)
class WorkerReport:
    """Workers to scheduler: what has become of jobs since the last report."""

    jobs: dict[int, JobReport] = field(default_factory=dict)
    peers: list[PeerFacts] = field(default_factory=list)
    """Those of which something has changed."""
    askers: list[AskerFacts] = field(default_factory=list)
    """The same of those that fetch from here."""
    released: list[bytes] = field(default_factory=list)
    """Names of chains, ``NAME_BYTES`` long, of which a peer has all that was leased: each as often as it says
    so. The first rank alone tells."""
    served_bytes: int = 0
    """Of slots that peers have had from here."""

    resized: dict[int, Resized] = field(default_factory=dict)
    """Those that have ended, by number."""
    timed: int = 0
    """``StepPlan.timed`` of the step with whose output this travels; 0: that plan has none."""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing, as in most steps."""
        told = self.jobs or self.peers or self.askers or self.released or self.resized
        return not (told or self.served_bytes or self.timed)

    def add(self, job_id: int, report: JobReport) -> None:
        """Take in one more report on a job."""
        mine = self.jobs.get(job_id)
        self.jobs[job_id] = report if mine is None else mine.merged(report)

    def merged(self, other: "WorkerReport") -> "WorkerReport":
        """Both ranks' reports as one, a new one."""
        peers, released = sorted(self.peers + other.peers), sorted(self.released + other.released)
        served, askers = self.served_bytes + other.served_bytes, sorted(self.askers + other.askers)
        merged = WorkerReport(dict(self.jobs), peers, askers, released, served)
        for job_id, report in other.jobs.items():
            merged.add(job_id, report)
        merged.resized = merge_resized(self.resized, other.resized)
        merged.timed = max(self.timed, other.timed)
        return merged


class TierFacts(NamedTuple):
    """Workers to scheduler, once at start: what a tier has kept on this rank.

    Attributes:
        epoch: this life's; no generation from before has as high a one.
        num_places: extents that it holds on the ranks that share its bytes, together.
        extent_slots: slots of the largest extent.
        places: of each extent that it keeps, ``int64[n]``.
        generations: of what lies there, ``int64[n]``.
        num_slots: of each, ``int64[n]``.
        names: of each, ``uint8[n, 32]``; see ``Extents``.
        parents: the same.
        suffixes: of each, ``uint8[n, 16]``, filled up with zeros; None: there are none.
        part: of places, those with ``place % num_parts == part`` are this rank's.
        num_parts: ranks that share a tier's bytes.
        seconds: since its last life began; 0: there was none.
        namespace: its short name, for operators.
    """

    epoch: int
    num_places: int
    extent_slots: int
    places: Ids
    generations: Ids
    num_slots: Ids
    names: Names
    parents: Names
    suffixes: Names | None = None
    part: int = 0
    num_parts: int = 1
    seconds: float = 0.0
    namespace: str = ""


class PoolFacts(NamedTuple):
    """Workers to scheduler, once at start: what a pool that outlives its engine has on this rank.

    Attributes:
        epoch: this life's; no generation from before has as high a one.
        kept: from earlier lives, ordered by slot.
    """

    epoch: int
    kept: Kept


@dataclass(slots=True)
class WorkerFacts:
    """Workers to scheduler, once at start: what this rank's part of the pool is like.

    Attributes:
        num_slots: slots that this rank reads.
        slot_bytes: of one on this rank.
        fingerprint: this rank's.
        num_sharing: ranks that have these slots in one memory, this one included.
        tiers: what places below the pool have kept, in their order; None for one that keeps nothing.
        pool: what the pool has kept; None if it ends with its engine.
        memory: where it lies; None as long as it is not there.
        most_slots: slots that the pool may grow to.
        unit_slots: of which the memory is given back and taken together; 0: the pool keeps its size.
    """

    num_slots: int
    slot_bytes: int
    fingerprint: Fingerprint
    num_sharing: int = 1
    tiers: list[TierFacts | None] = field(default_factory=list)
    pool: PoolFacts | None = None
    memory: MemoryFacts | None = None
    most_slots: int = 0
    unit_slots: int = 0
