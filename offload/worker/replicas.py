"""Ranks that hold the same KV: one pool for all of them, of which each fills a part of every store."""

import logging
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offload.errors import ConfigError, HostMemoryError
from offload.messages import Extents, Fingerprint, Ids, WorkerFacts
from offload.worker.pool.pages import take_pages
from offload.worker.pool.segment import Segment, SegmentName
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


class Sharing(NamedTuple):
    """What a rank has of a pool that it shares.

    Attributes:
        share: what it fills of it.
        slots: a mapping that begins with them, whose pages are all in memory; None: it has its own.
        tables: of their seals; None: it has its own.
    """

    share: Share = Share()
    slots: mmap.mmap | None = None
    tables: SealTables | None = None


ALONE = Sharing()
"""A rank with a pool of its own."""


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
    replicas: Replicas, facts: WorkerFacts, *, node: int | None = None, huge_pages: bool = False
) -> Sharing:
    """Map a pool as these facts say in every member. All ranks of the exchange must call this.

    Each member takes its part of the pages, which lie next to its GPU if they can.

    Returns:
        ``ALONE`` for all members if one cannot have it, as in a container of its own.

    Raises:
        HostMemoryError: there is not so much memory, here or on any rank of the exchange. None waits for one
            that has failed.
    """
    num_slots = facts.num_slots
    pool_bytes = -(-num_slots * facts.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    segments: list[Segment] = []  # this rank's, once it has it
    mapped: list[mmap.mmap] = []  # slots and tables, the same

    def offer() -> SegmentName | str | None:
        if replicas.number:
            return None
        try:
            segments.append(Segment.create(pool_bytes + SealTables.num_bytes(num_slots)))
        except OSError as error:
            return str(error)
        return segments[0].name

    def attach() -> str | None:
        offered = offers[replicas.members[0]]
        if not isinstance(offered, SegmentName):
            return offered
        try:
            if not segments:
                segments.append(Segment.open(offered))
            mapped.append(segments[0].map(0, pool_bytes))
            mapped.append(segments[0].map(pool_bytes, SealTables.num_bytes(num_slots)))
        except (OSError, ValueError, OverflowError) as error:
            return str(error)
        if not replicas.number:
            SealTables.over(mapped[1], num_slots).clear()
        return None

    def take() -> None:
        part = replicas.share.of(0, pool_bytes // mmap.PAGESIZE)
        if part:
            address = np.frombuffer(mapped[0], dtype=np.uint8).ctypes.data
            start, nbytes = part.start * mmap.PAGESIZE, len(part) * mmap.PAGESIZE
            take_pages(address + start, nbytes, node=node, huge_pages=huge_pages, is_shared=True)

    is_shared = False
    try:
        offers = _together(replicas, offer)
        outcomes = _together(replicas, attach)
        reasons = [outcomes[member] for member in replicas.members if outcomes[member] is not None]
        _together(replicas, (lambda: None) if reasons else take)
        is_shared = not reasons
    finally:
        for segment in segments:
            segment.close()
        for mapping in [] if is_shared else mapped:
            mapping.close()
    if is_shared:
        return Sharing(replicas.share, mapped[0], SealTables.over(mapped[1], num_slots))
    if not replicas.number:
        logger.warning(
            "%d ranks hold the same KV and cannot share memory (%s): each keeps a copy, and the CPU pool "
            "holds so many times fewer blocks",
            len(replicas.members),
            reasons[0],
        )
    return ALONE


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
