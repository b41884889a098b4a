"""Memory of a pool that others map, too: ranks that hold the same KV, peers, and later lives of the engine.

Ranks that hold the same KV have one pool, of which each fills a part of every store.
"""

import logging
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offload.errors import ConfigError, HostMemoryError
from offload.messages import Extents, Fingerprint, Ids, Kept, PoolFacts, WorkerFacts
from offload.worker.lasting import Lasting
from offload.worker.pool.pages import take_pages
from offload.worker.pool.region import Region, RegionPlan, RegionShape
from offload.worker.pool.segment import Segment, SegmentName
from offload.worker.pool.siblings import Home
from offload.worker.pool.table import SlotTable
from offload.worker.seals import SealTables

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Share(NamedTuple):
    """Which part of what fills the pool is this rank's: one of ``num_parts``."""

    part: int = 0
    num_parts: int = 1

    def of(self, job_id: int, num_blocks: int) -> range:
        """Positions in that job. The ranks' parts are contiguous, and together all of it.

        Ranks take turns, so that each has its share of jobs of one block as well.
        """
        turn = (self.part + job_id) % self.num_parts
        return range(num_blocks * turn // self.num_parts, num_blocks * (turn + 1) // self.num_parts)

    def extents(self, extents: Extents) -> Extents:
        """Those of an order that are this rank's: a place is of the same rank always."""
        return extents.of(np.flatnonzero(extents.places % self.num_parts == self.part))

    def blocks_of(self, extents: Extents) -> Ids:
        """Which blocks of that order are this rank's, in order."""
        is_mine = extents.places % self.num_parts == self.part
        return np.flatnonzero(np.repeat(is_mine, np.diff(extents.starts)))


class Replicas(NamedTuple):
    """Ranks that hold the same KV.

    Attributes:
        members: their places among all ranks that ``exchange`` brings together, in order.
        number: this rank's among the members, from 0.
        exchange: what every rank has said, by place. Each must say something, or all wait.
    """

    members: tuple[int, ...]
    number: int
    exchange: Callable[[Any], list[Any]]

    @property
    def share(self) -> Share:
        """This rank's."""
        return Share(self.number, len(self.members))


ONE = Replicas((0,), 0, lambda said: [said])
"""A rank whose KV no other holds."""


class Sharing(NamedTuple):
    """What a rank has of a pool that it shares.

    Attributes:
        share: what it fills of it.
        slots: a mapping that begins with them, whose pages are all in memory; None: it has its own.
        tables: of their seals; None: it has its own.
        lasting: there if the pool outlives its engine.
        segment: what slots and tables lie in, open as long as other engines may look into it; else None.
    """

    share: Share = Share()
    slots: mmap.mmap | None = None
    tables: SealTables | None = None
    lasting: Lasting | None = None
    segment: Segment | None = None


ALONE = Sharing()
"""A rank with a pool of its own."""


class _Offer(NamedTuple):
    """What the first member has made: a segment, and whose its table is."""

    name: SegmentName
    identity: str


class _Attached(NamedTuple):
    """What became of mapping it: why it failed, and of the first member the epoch and what it has found."""

    error: str | None = None
    epoch: int = 0
    kept: Kept | None = None


def size_pool(
    cpu_bytes: int, slot_bytes: int, least_slots: int, fingerprint: Fingerprint, num_sharing: int
) -> WorkerFacts:
    """What a rank's part of the pool is like.

    Args:
        cpu_bytes: memory for each rank.
        slot_bytes: of a block on this rank.
        least_slots: that the smallest store takes.
        fingerprint: this rank's.
        num_sharing: ranks that put their memory together.

    Raises:
        ConfigError: it does not hold one block, or all that a model needs to go on in one place.
    """
    num_slots = cpu_bytes * num_sharing // slot_bytes
    if num_slots < least_slots:
        taken = f"one block takes {slot_bytes:,}"
        if least_slots > 1:
            taken += f", and the windows or states of one place {least_slots} blocks"
        if num_sharing > 1:
            taken += f", of which {num_sharing} ranks keep one copy"
        raise ConfigError(f"cpu_gib leaves {cpu_bytes:,} bytes for each rank, but {taken}; raise cpu_gib")
    return WorkerFacts(num_slots, slot_bytes, fingerprint, num_sharing)


def share_pool(
    replicas: Replicas,
    facts: WorkerFacts,
    *,
    node: int | None = None,
    huge_pages: bool = False,
    plan: RegionPlan | None = None,
    is_seen: bool = False,
) -> Sharing:
    """Map a pool as these facts say in every member. All ranks of the exchange must call this.

    Each member takes its part of the pages, which lie next to its GPU if they can. ``plan``: of a pool that
    outlives the engine; None: it ends with the last member. ``is_seen``: other engines may look into it.

    Returns:
        ``ALONE`` for all members if one cannot have it, as in a container of its own.

    Raises:
        HostMemoryError: there is not so much memory, here or on any rank of the exchange. None waits for one
            that has failed.
        TierError: no region can be had as ``plan`` says.
    """
    shape = RegionShape(facts.num_slots, facts.slot_bytes)
    table_bytes = SealTables.num_bytes(facts.num_slots) if plan is None else shape.table_bytes
    regions: list[Region] = []  # this rank's, once it has it
    segments: list[Segment] = []  # the same
    mapped: list[mmap.mmap] = []  # slots and tables, the same
    tables: list[SlotTable] = []  # the same

    def offer() -> _Offer | str | None:
        if replicas.number:
            return None
        identity = "" if plan is None else plan.identity(len(replicas.members))
        try:
            if plan is None:
                segments.append(Segment.create(shape.slots_bytes + table_bytes))
            else:
                regions.append(plan.open(shape, len(replicas.members)))
                segments.append(regions[0].segment)
        except OSError as error:
            return str(error)
        return _Offer(segments[0].name, identity)

    def attach() -> _Attached:
        offered = offers[replicas.members[0]]
        if not isinstance(offered, _Offer):
            return _Attached(offered)
        try:
            if not segments:
                segments.append(Segment.open(offered.name))
            if plan is not None:
                segments[0].lock()
            mapped.append(segments[0].map(0, shape.slots_bytes))
            mapped.append(segments[0].map(shape.slots_bytes, table_bytes))
        except (OSError, ValueError, OverflowError) as error:
            return _Attached(str(error))
        if plan is not None:
            tables.append(SlotTable(mapped[1], facts.num_slots, offered.identity))
        if replicas.number:
            return _Attached()
        if plan is None:
            SealTables.over(mapped[1], facts.num_slots).clear()
            return _Attached()
        epoch = max(regions[0].epoch, tables[0].newest_epoch) + 1
        regions[0].begin(epoch, offered.identity, shape)
        return _Attached(epoch=epoch, kept=tables[0].recover())

    def take() -> None:
        part = replicas.share.of(0, shape.slots_bytes // mmap.PAGESIZE)
        take_some = partial(take_pages, node=node, is_shared=True)
        if plan is not None and segments[0].is_taken:
            take_some = partial(take_some, is_taken=True)
        if part:
            start, nbytes = part.start * mmap.PAGESIZE, len(part) * mmap.PAGESIZE
            take_some(_address_of(mapped[0]) + start, nbytes, huge_pages=huge_pages)
        if plan is not None and not replicas.number:
            take_some(_address_of(mapped[1]), table_bytes, huge_pages=False)

    is_shared = False
    try:
        offers = _together(replicas, offer)
        outcomes = _together(replicas, attach)
        reasons = [error for member in replicas.members if (error := outcomes[member].error) is not None]
        _together(replicas, (lambda: None) if reasons else take)
        is_shared = not reasons
    finally:
        for segment in [] if is_shared and (is_seen or plan is not None) else segments:
            segment.close()
        for mapping in [] if is_shared else mapped:
            tables.clear()
            mapping.close()
        for region in [] if is_shared else regions:
            region.close()
    if is_shared:
        first = outcomes[replicas.members[0]]
        lasting = None
        if first.kept is not None:
            owned = regions[0] if regions else None
            identity = offers[replicas.members[0]].identity  # type: ignore[union-attr]
            home = Home(Path(segments[0].name.label).parent, identity, facts.slot_bytes)
            lasting = Lasting(tables[0], PoolFacts(first.epoch, first.kept), segments[0], owned, home)
        sealed = SealTables.over(mapped[1], facts.num_slots)
        return Sharing(replicas.share, mapped[0], sealed, lasting, segments[0] if is_seen else None)
    if len(replicas.members) == 1:
        remedy = "remove pool" if plan is not None else "remove listen"
        raise HostMemoryError(f"the pool cannot be mapped ({reasons[0]}); lower cpu_gib, or {remedy}")
    if not replicas.number:
        logger.warning(
            "%d ranks hold the same KV and cannot share memory (%s): each keeps a copy, and the CPU pool "
            "holds so many times fewer blocks",
            len(replicas.members),
            reasons[0],
        )
    return ALONE


def have_pool(
    replicas: Replicas | None,
    size: Callable[[int], WorkerFacts],
    node: int | None,
    huge_pages: bool,
    plan: RegionPlan | None,
    is_seen: bool = False,
) -> tuple[WorkerFacts, Sharing]:
    """Map what a rank has in common with others, if anything. ``size``: for so many ranks that share.

    ``is_seen``: engines of this machine may look into its slots and seals, so they lie in a segment.

    Raises what ``share_pool`` raises.
    """
    sharing = ALONE
    if replicas is not None:
        facts = size(len(replicas.members))
        sharing = share_pool(replicas, facts, node=node, huge_pages=huge_pages, plan=plan, is_seen=is_seen)
    if (is_seen or plan is not None) and sharing is ALONE:
        sharing = share_pool(ONE, size(1), node=node, huge_pages=huge_pages, plan=plan, is_seen=is_seen)
    facts = size(sharing.share.num_parts)
    facts.pool = None if sharing.lasting is None else sharing.lasting.facts
    return facts, sharing


def _address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _together(replicas: Replicas, work: Callable[[], T]) -> list[T]:
    """Do ``work``, as all others do theirs; what has come of it everywhere, by place.

    Raises what it raises, or HostMemoryError if another rank's has failed: then all ranks raise.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    said = replicas.exchange((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for place, (_, theirs) in enumerate(said):
        if theirs is not None:
            raise HostMemoryError(f"rank {place} of those that share the CPU pool has failed: {theirs}")
    return [theirs for theirs, _ in said]
