"""A third place: memory below the pool, with a flow and a lane for each of its two routes.

It shows what a place takes, and keeps all that it is given until it is full.
"""

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from allocator import Pin, StorePlan
from offload.messages import POOL, Order, Part, Route, TierFacts
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Below, Job, Progress
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import COMING, Offer
from offload.testing.copiers.seeded import CopySchedule, SeededCopier
from offload.vllm.places import Place
from offload.worker.copiers import CopyEnd
from offload.worker.lanes import CopyLane, Lane
from offload.worker.layout import BlockLayout, CopyBatch, Region
from offload.worker.media.lane import LanesBelow, PoolParts

MEMORY = "memory"
SPILL, FETCH = Route("spill", POOL, MEMORY), Route("fetch", MEMORY, POOL)
ROUTES = (SPILL, FETCH)

_LATEST = 12
"""Steps after the end of a request in which its blocks may still be spilled."""


# The scheduler's side


class Directory:
    """What the memory keeps: ids by prefix hash. An id that a job uses is not given away until that ends."""

    def __init__(self, num_blocks: int) -> None:
        self.kept: dict[bytes, int] = {}
        self.spilling: set[bytes] = set()
        self.free = list(range(num_blocks))
        self.num_reading: Counter[int] = Counter()
        self._gone: set[int] = set()  # ids that are free once nobody reads them

    def forget(self, prefix_hash: bytes) -> None:
        """It keeps that block no longer."""
        index = self.kept.pop(prefix_hash, None)
        if index is not None:
            self._gone.add(index)
            self._collect()

    def clear(self) -> None:
        """It keeps nothing any longer."""
        self._gone.update(self.kept.values())
        self.kept.clear()
        self._collect()

    def read(self, ids: list[int]) -> None:
        """A job reads these."""
        self.num_reading.update(ids)

    def done(self, ids: list[int]) -> None:
        """It does so no longer."""
        self.num_reading.subtract(ids)
        self._collect()

    def _collect(self) -> None:
        idle = {index for index in self._gone if not self.num_reading[index]}
        self._gone -= idle
        self.free += sorted(idle)

    def check_invariants(self, num_blocks: int, in_flight: list[int]) -> None:
        """Every id is free, kept, gone while somebody reads it, or being filled."""
        owned = Counter([*self.free, *self.kept.values(), *self._gone, *in_flight])
        assert owned == Counter(range(num_blocks)), f"ids of the memory have owners: {owned}"


@dataclass(slots=True, eq=False)
class Spill:
    pin: Pin
    hashes: list[bytes]
    ids: list[int]
    is_dropped: bool = False


class Spills:
    """The flow from the pool into the memory: prompts of requests that have ended, once they have landed."""

    route = SPILL

    def __init__(self, common: Common, directory: Directory, num_blocks: int) -> None:
        self.breaker = CircuitBreaker("spills", common.clock)
        self._common = common
        self._directory = directory
        self._num_blocks = num_blocks
        self._ended: dict[str, tuple[list[bytes], int]] = {}  # chain, and steps that are left

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        orders = [order for chain, _ in self._ended.values() for order in self._begin(chain)]
        self._ended = {name: (chain, left - 1) for name, (chain, left) in self._ended.items() if left > 1}
        return orders

    def _begin(self, chain: list[bytes]) -> Iterator[Order]:
        directory, allocator = self._directory, self._common.allocator
        depth = allocator.resident_depth(chain)
        known = directory.kept.keys() | directory.spilling
        start = next((index for index in range(depth) if chain[index] not in known), depth)
        stop = next((index for index in range(start, depth) if chain[index] in known), depth)
        stop = min(stop, start + len(directory.free))
        if start >= stop or not self.breaker.allows:
            return
        pin = allocator.pin(chain, start, stop)
        ids = [directory.free.pop() for _ in range(start, stop)]
        job = self._common.ledger.open(self, Spill(pin, chain[start:stop], ids), stop - start)
        directory.spilling.update(job.task.hashes)
        self.breaker.began(job.job_id)
        slots = pin.slots[:, 0]
        parts = [Part(job.job_id, 0, len(slots))]
        yield Order(SPILL, parts, slots, np.array(ids, dtype=np.int64), self._common.filled_by[slots])

    def advance(self, job: Job[Spill], progress: Progress) -> None:
        spill = job.task
        if progress.gave_up:
            self._common.count_failed(SPILL)
            self.breaker.failed(job.job_id, hangs=True)
        if not progress.ended:
            return
        self._common.allocator.unpin(spill.pin)
        self._directory.spilling.difference_update(spill.hashes)
        num_good = 0 if spill.is_dropped or job.given_up else job.num_good
        self._directory.kept.update(zip(spill.hashes[:num_good], spill.ids, strict=False))
        self._directory.free += spill.ids[num_good:]
        if job.num_good == job.num_blocks:
            self.breaker.succeeded(job.job_id)
        elif spill.is_dropped:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._common.count_failed(SPILL)
            self.breaker.failed(job.job_id)

    def finish(self, request: Request) -> list[Order]:
        num_prompt = request.num_prompt_tokens // self._common.block_size
        self._ended[request.request_id] = list(request.block_hashes[:num_prompt]), _LATEST
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """It does not know whose blocks it keeps."""
        return self.reset()

    def reset(self) -> list[int]:
        self._ended.clear()
        self._directory.clear()
        for job in self._common.ledger.of(self):
            job.task.is_dropped = True
        return [job.job_id for job in self._common.ledger.of(self)]

    @property
    def is_busy(self) -> bool:
        return bool(self._ended)

    @property
    def num_pins(self) -> int:
        return sum(1 for _ in self._common.ledger.of(self))

    def check_invariants(self) -> None:
        in_flight = [index for job in self._common.ledger.of(self) for index in job.task.ids]
        self._directory.check_invariants(self._num_blocks, in_flight)
        hashes = {each for job in self._common.ledger.of(self) for each in job.task.hashes}
        assert hashes == self._directory.spilling, f"{hashes} are spilled"

    def left_over(self) -> dict[str, object]:
        return {"ended requests to spill": list(self._ended)}


@dataclass(slots=True, eq=False)
class Fetch:
    plan: StorePlan
    ids: list[int]
    is_dropped: bool = False


class Fetches:
    """The flow from the memory into the pool, from where restores take them. Requests wait for it."""

    route = FETCH

    def __init__(self, common: Common, directory: Directory) -> None:
        self.breaker = CircuitBreaker("fetches", common.clock)
        self._common = common
        self._directory = directory
        self._orders: list[Order] = []
        self._coming: dict[bytes, Job[Fetch]] = {}  # jobs in flight and not given up
        self._waited: set[str] = set()  # requests that a fetch was made or awaited for

    def arrived(self, request: Request, hints: RequestHints) -> None:
        """It is fetched for when it asks."""

    def offer(self, request: Request, num_local: int, hints: RequestHints) -> Offer | None:
        """A request waits for one fetch, its own or others', and goes on with what that brought."""
        common, chain, request_id = self._common, request.block_hashes, request.request_id
        start = max(common.allocator.resident_depth(chain), num_local // common.block_size)
        if start >= len(chain):
            return None
        if chain[start] not in self._coming and not self._brings(chain, start, request_id):
            return None
        self._waited.add(request_id)
        return COMING

    def _brings(self, chain: list[bytes], start: int, request_id: str) -> bool:
        if request_id in self._waited or not self.breaker.allows:
            return False
        kept = self._directory.kept
        stop = next((at for at in range(start, len(chain)) if chain[at] not in kept), len(chain))
        plan = self._common.allocator.plan_store(chain, stop) if stop > start else None
        if plan is None:
            return False
        if any(each not in kept for each in plan.hashes):
            self._common.allocator.abort(plan)
            return False
        self._begin(plan)
        return True

    def _begin(self, plan: StorePlan) -> None:
        ids = [self._directory.kept[each] for each in plan.hashes]
        self._directory.read(ids)
        job = self._common.ledger.open(self, Fetch(plan, ids), len(ids))
        self._coming.update(dict.fromkeys(plan.hashes, job))
        self.breaker.began(job.job_id)
        slots = plan.slots[:, 0]
        self._common.filled_by[slots] = job.job_id
        parts = [Part(job.job_id, 0, len(ids))]
        self._orders.append(Order(FETCH, parts, np.array(ids, dtype=np.int64), slots))

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def advance(self, job: Job[Fetch], progress: Progress) -> None:
        plan = job.task.plan
        if progress.gave_up:
            self._common.count_failed(FETCH)
            self.breaker.failed(job.job_id, hangs=True)
        if progress.gave_up or progress.ended:
            for each in plan.hashes:
                if self._coming.get(each) is job:
                    del self._coming[each]
        if progress.ended:
            self._end(job)
        elif progress.gave_up:
            self._common.allocator.abandon(plan)

    def _end(self, job: Job[Fetch]) -> None:
        plan = job.task.plan
        self._directory.done(job.task.ids)
        if job.num_good == job.num_blocks:
            self.breaker.succeeded(job.job_id)
            self._common.allocator.commit(plan)
            return
        self._common.allocator.abort(plan)
        if job.task.is_dropped:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._common.count_failed(FETCH)
            self.breaker.failed(job.job_id)
            self._directory.forget(plan.hashes[job.num_good])

    def finish(self, request: Request) -> list[Order]:
        self._waited.discard(request.request_id)
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        return self.reset()

    def reset(self) -> list[int]:
        """What is under way lands nowhere: its positions have left the pool."""
        self._coming.clear()
        for job in self._common.ledger.of(self):
            job.task.is_dropped = True
        return [job.job_id for job in self._common.ledger.of(self)]

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

    @property
    def num_pins(self) -> int:
        return 0

    def check_invariants(self) -> None:
        jobs = list(self._common.ledger.of(self))
        reading = Counter(index for job in jobs for index in job.task.ids)
        assert +self._directory.num_reading == reading, f"{reading} are read"
        for job in self._coming.values():
            assert job in jobs and not job.given_up, f"{job} brings nothing"

    def left_over(self) -> dict[str, object]:
        return {"blocks that come": list(self._coming), "requests that waited": list(self._waited)}


# The worker's side


class CheckedCopier:
    """Copies into the memory and out of it. What comes out must be what went in, by a checksum of each block.

    It is taken of the source of a spill when that is submitted. The slots are pinned, and their generations
    are asked again when the copy has ended.
    """

    def __init__(self, inner: SeededCopier, block_bytes: int) -> None:
        self.inner = inner
        self._block_bytes = block_bytes
        self._sums: dict[int, int] = {}  # by address in the memory
        self._fetches: dict[int, CopyBatch] = {}

    def fence(self, route: Route) -> None:
        raise AssertionError(f"the engine touches no end of {route}")

    def submit(self, job_id: int, route: Route, batch: CopyBatch) -> None:
        if route == SPILL:
            self._sums |= {target: _checksum(source, size) for source, target, size in self._blocks(batch)}
        else:
            self._fetches[job_id] = batch
        self.inner.submit(job_id, route, batch)

    def poll(self) -> list[CopyEnd]:
        return [self._checked(end) for end in self.inner.poll()]

    def drain(self) -> None:
        self.inner.drain()

    def close(self, seconds: float) -> bool:
        return self.inner.close(seconds)

    def _checked(self, end: CopyEnd) -> CopyEnd:
        batch = self._fetches.pop(end.job_id, None)
        if batch is None:
            return end
        for number, (source, target, size) in enumerate(zip(*(each.tolist() for each in batch), strict=True)):
            one = CopyBatch(*(np.array([each]) for each in (source, target, size)))
            sums = [_checksum(at, nbytes) == self._sums.get(kept) for kept, at, nbytes in self._blocks(one)]
            if number < end.num_copied and not all(sums):
                return CopyEnd(end.job_id, number, "the memory has lost it")
        return end

    def _blocks(self, batch: CopyBatch) -> Iterator[tuple[int, int, int]]:
        """Source, target and size of each block, where neighbours were merged."""
        for source, target, size in zip(*(each.tolist() for each in batch), strict=True):
            for offset in range(0, size, self._block_bytes):
                yield source + offset, target + offset, self._block_bytes


def _checksum(address: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(ctypes.string_at(address, nbytes))


class MemoryTier:
    """Makes the place. Of one engine: what it has made can be looked at."""

    def __init__(self, num_blocks: int, copies: CopySchedule | None = None, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.copies = CopySchedule() if copies is None else copies
        self.copiers: list[SeededCopier] = []
        self.memories: list[npt.NDArray[np.uint8]] = []
        self.directory = Directory(num_blocks)
        self._rng = random.Random(seed)

    @property
    def place(self) -> Place:
        return Place(self._make_flows, self._make_lanes)

    def _make_flows(self, common: Common, facts: Sequence[TierFacts]) -> Below:
        self.directory = Directory(self.num_blocks)
        self.spills = Spills(common, self.directory, self.num_blocks)
        self.fetches = Fetches(common, self.directory)
        return Below([self.spills, self.fetches], [self.fetches])

    def _make_lanes(self, pool: PoolParts) -> LanesBelow:
        size = pool.slots.slot_bytes
        kept = np.zeros(self.num_blocks * size, dtype=np.uint8)
        region = Region(kept.ctypes.data, size, size)
        layout = BlockLayout([region], pool.slots.address)
        inner = SeededCopier(self.copies, random.Random(self._rng.random()), routes=ROUTES)
        self.memories.append(kept)
        self.copiers.append(inner)
        copier = CheckedCopier(inner, size)
        lanes: list[Lane] = [
            CopyLane(SPILL, copier, is_awaited=False, layout=layout),
            CopyLane(FETCH, copier, is_awaited=True, layout=layout),
        ]
        return LanesBelow(lanes)
