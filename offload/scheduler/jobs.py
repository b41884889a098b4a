"""The ledger of jobs in flight. Jobs begin and end here and nowhere else."""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from allocator import Pin, StorePlan
from offload.messages import Ids


@dataclass(slots=True, eq=False)
class StoreJob:
    """A store in flight: ``plan`` says into which slots, ``blocks`` are the held GPU blocks.

    Attributes:
        is_spoiled: what it copies may be no KV.
        is_dropped: a reset has made it worthless.
    """

    job_id: int
    plan: StorePlan
    num_blocks: int
    blocks: list[Any]
    ranks_left: int
    num_copied: int
    given_up: bool = False
    is_spoiled: bool = False
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class Restore:
    """All loads for one admission of one request, which the engine waits for as a whole.

    Attributes:
        restore_id: the id of its first job.
        request: who gets the KV.
        first: chain position of the first block.
        pin: holds the slots.
        chain: prefix hashes of the request's blocks, up to the last one loaded.
        block_ids: GPU blocks that are filled.
        parts_left: its load jobs in flight.
        num_landed: leading blocks that are complete on all ranks.
        num_shared: leading blocks that the GPU's prefix cache has been given.
        followers: requests that share a beginning: how many blocks of it.
        depths: the different ones among these numbers, in order.
        is_void: a part has failed; nobody may wait for the rest.
        is_cancelled: the bytes are no longer wanted, though nothing may be wrong with them.
        was_stuck: a part was given up, so the engine computes all of it again.
    """

    request: Any
    first: int
    pin: Pin
    chain: list[bytes]
    block_ids: Ids
    restore_id: int = -1
    parts_left: int = 0
    num_landed: int = 0
    num_shared: int = 0
    followers: dict[str, int] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)
    is_void: bool = False
    is_cancelled: bool = False
    was_stuck: bool = False
    _ended: dict[int, int] = field(default_factory=dict)  # ended parts: where from, up to where good

    def brings(self, chain: Sequence[bytes], position: int) -> bool:
        """Whether the block of ``chain`` at ``position`` is one of these. O(1)."""
        ours = self.chain
        return self.first <= position < min(len(ours), len(chain)) and ours[position] == chain[position]

    def num_common(self, chain: Sequence[bytes], known: int = 0) -> int:
        """How many leading blocks are also of ``chain``, at least those before position ``known``.

        O(log n): equal hashes have equal beginnings.
        """
        ours = self.chain
        low, high = max(self.first, known), min(len(ours), len(chain))
        if low < high and ours[high - 1] == chain[high - 1]:  # as most of those who wait ask for all of it
            return high - self.first
        while low < high:  # bisect with a key takes three times as long
            middle = (low + high) // 2
            if ours[middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        return low - self.first

    def follow(self, request_id: str, depth: int) -> None:
        """That request waits for the first ``depth`` blocks. O(log n) and a move of other depths."""
        self.followers[request_id] = depth
        at = bisect_right(self.depths, depth)
        if not at or self.depths[at - 1] != depth:
            insort(self.depths, depth)

    @property
    def num_wanted(self) -> int:
        """How many leading blocks to share now: they have landed, and somebody waits for so many.

        Once no part is left, nobody has to wait for more. O(log n).
        """
        at = bisect_right(self.depths, self.num_landed)
        if not self.parts_left and at < len(self.depths):
            return self.num_landed
        return self.depths[at - 1] if at else 0

    def end_part(self, start: int, good_stop: int) -> None:
        """The part that began at ``start`` has ended, good up to ``good_stop``."""
        self.parts_left -= 1
        self._ended[start] = good_stop
        while (stop := self._ended.get(self.num_landed, 0)) > self.num_landed:
            self.num_landed = stop


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load in flight: blocks ``start <= i < stop`` of a restore. ``blocks`` are held if it is stuck."""

    job_id: int
    restore: Restore
    start: int
    stop: int
    ranks_left: int
    num_copied: int
    given_up: bool = False
    blocks: list[Any] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Blocks to load."""
        return self.stop - self.start


class Progress(NamedTuple):
    """What a report changed.

    Attributes:
        job: the job.
        fell_short: it has fewer good blocks than were thought before.
        gave_up: its copy is past its deadline on some rank, which was not known before.
        ended: it is over on all ranks.
    """

    job: StoreJob | LoadJob
    fell_short: bool
    gave_up: bool
    ended: bool


class JobLedger:
    """Jobs by id. A job ends when every rank has reported it over.

    ``num_copied`` counts the leading blocks that every rank that reported has copied. A job fails as soon as
    one rank falls short, and ends when all have let go of its memory.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ids = count()
        self._jobs: dict[int, StoreJob | LoadJob] = {}
        self.num_held_blocks = 0
        """GPU blocks held by stores in flight."""
        self.num_stuck_blocks = 0
        """GPU blocks that loads past their deadline may still write to."""
        self.num_given_up = 0
        """Jobs in flight past their deadline."""

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._jobs)

    def open_store(self, plan: StorePlan, blocks: list[Any]) -> StoreJob:
        """Begin a store of ``blocks``."""
        job = StoreJob(next(self._ids), plan, len(blocks), blocks, self._num_ranks, len(blocks))
        self._jobs[job.job_id] = job
        self.num_held_blocks += len(blocks)
        return job

    def open_load(self, restore: Restore, start: int, stop: int) -> LoadJob:
        """Begin to load blocks ``start <= i < stop`` of a restore."""
        job = LoadJob(next(self._ids), restore, start, stop, self._num_ranks, stop - start)
        self._jobs[job.job_id] = job
        if not restore.parts_left:
            restore.restore_id = job.job_id
        restore.parts_left += 1
        return job

    def __contains__(self, job_id: int) -> bool:
        """Whether that job is in flight."""
        return job_id in self._jobs

    def __iter__(self) -> Iterator[StoreJob | LoadJob]:
        """Jobs in flight, in the order in which they began."""
        return iter(self._jobs.values())

    def stores(self) -> Iterator[StoreJob]:
        """Stores in flight."""
        return (job for job in self._jobs.values() if isinstance(job, StoreJob))

    def loads(self) -> Iterator[LoadJob]:
        """Loads in flight."""
        return (job for job in self._jobs.values() if isinstance(job, LoadJob))

    def spoil_stores(self) -> None:
        """GPU blocks turned out to hold no valid KV: every store in flight will end as failed.

        Which stores copied those blocks, or KV computed on top of them, cannot be told from ids.
        """
        for job in self.stores():
            job.num_copied = 0
            job.is_spoiled = True

    def take_held(self, job: StoreJob) -> list[Any]:
        """The GPU blocks held by a store in flight, which from now on does without them."""
        blocks, job.blocks = job.blocks, []
        self.num_held_blocks -= len(blocks)
        return blocks

    def report(self, job_id: int, num_ranks: int, num_copied: int, given_up: bool = False) -> Progress | None:
        """``num_ranks`` more ranks have ended that job; at least ``num_copied`` leading blocks are good.

        None for a job that is not in flight.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        fell_short = num_copied < job.num_copied
        gave_up = given_up and not job.given_up
        job.num_copied = min(job.num_copied, num_copied)
        job.given_up |= given_up
        self.num_given_up += gave_up
        if gave_up and isinstance(job, LoadJob):
            self.num_stuck_blocks += job.num_blocks
        job.ranks_left -= num_ranks
        ended = job.ranks_left <= 0
        if ended:
            del self._jobs[job_id]
            self.num_given_up -= job.given_up
            if isinstance(job, LoadJob):
                job.restore.end_part(job.start, job.start + job.num_copied)
                self.num_stuck_blocks -= job.num_blocks if job.given_up else 0
            else:
                self.num_held_blocks -= len(job.blocks)
        return Progress(job, fell_short, gave_up, ended)

    def check_invariants(self) -> None:
        """Counters and jobs agree."""
        held = sum(len(job.blocks) for job in self.stores())
        assert held == self.num_held_blocks, f"{held} blocks in jobs, {self.num_held_blocks} counted"
        stuck = sum(job.num_blocks for job in self.loads() if job.given_up)
        assert stuck == self.num_stuck_blocks, f"{stuck} blocks stuck, {self.num_stuck_blocks} counted"
        given_up = sum(job.given_up for job in self._jobs.values())
        assert given_up == self.num_given_up, f"{given_up} jobs given up, {self.num_given_up} counted"
        for job_id, job in self._jobs.items():
            assert job.job_id == job_id, f"job {job.job_id} is filed under {job_id}"
            assert 0 < job.ranks_left <= self._num_ranks, f"{job} waits for {job.ranks_left} ranks"
            assert 0 <= job.num_copied <= job.num_blocks, f"{job} has {job.num_copied} blocks copied"
            assert job.given_up or isinstance(job, StoreJob) or not job.blocks, f"{job} holds blocks"
        for restore in {id(job.restore): job.restore for job in self.loads()}.values():
            parts = sum(job.restore is restore for job in self.loads())
            assert parts == restore.parts_left, f"{parts} parts in flight, {restore} says otherwise"
