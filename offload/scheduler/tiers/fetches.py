"""The flow from a tier into the pool, from where restores take what it brings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from allocator import StorePlan
from offload.messages import Extents, Order, Part, Route
from offload.scheduler import amounts
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import COMING, Offer
from offload.scheduler.tiers.directory import Directory, Reading
from offload.scheduler.tiers.names import Grid
from offload.scheduler.tiers.pace import Pace
from offload.scheduler.tiers.spills import Spills

LEAST_TOKENS = 512
"""Fewer are computed sooner than they are asked for."""

_PART_BYTES = 16 << 20
_POOL_SHARE = 4
"""Fetches under way fill at most that part of the pool: 1 / 4."""
_MOST_BYTES = 1 << 30
"""Of them, so that a slow disk is done with them long before they are overdue."""


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs that were opened at once: how long they take together is what is measured.

    Attributes:
        since: when.
        num_left: that have not ended.
        num_blocks: that they move.
    """

    since: float
    num_left: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """A job's task.

    Attributes:
        plan: the positions that it fills.
        reading: the extents that it reads.
        names: of the chain's extents.
        batch: it is one of these.
        is_dropped: what it brings is not wanted any more.
    """

    plan: StorePlan
    reading: Reading
    names: Sequence[bytes]
    batch: Batch
    is_dropped: bool = False


class Wish(NamedTuple):
    """What a request wants of the tier.

    Attributes:
        stop: up to which position; negative: nothing any more.
        behind: the resident positions when jobs were opened for it last. There must be more before others
            are, or what the pool evicts meanwhile would be fetched for ever.
    """

    stop: int
    behind: int


_NO_WISH = Wish(-1, -1)


class Fetches:
    """Brings what a waiting request can use from the tier into the pool. The request waits for it.

    A fetch is cut into parts, each a job of its own, so that what has come is resident at once. Those under
    way fill a quarter of the pool at most; when they have landed, others follow. What does not come, or not
    sooner than it is computed, is computed.
    """

    def __init__(
        self,
        route: Route,
        common: Common,
        directory: Directory,
        grid: Grid,
        spills: Spills,
        pace: Pace,
        *,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """Begin with none.

        Args:
            route: from the tier into the pool.
            common: what all flows work with.
            directory: of the tier.
            grid: how chains are cut.
            spills: of the same tier.
            pace: what was measured.
            least_tokens: fewer are not worth a fetch.
        """
        self.route = route
        self.breaker = CircuitBreaker(f"copies out of the {route.source} tier", common.clock)
        self._common = common
        self._directory = directory
        self._grid = grid
        self._spills = spills
        self._pace = pace
        self._least_tokens = least_tokens
        self._orders: list[Order] = []
        self._coming: dict[bytes, Job[Fetch]] = {}  # by hash: jobs in flight that somebody may wait for
        self._wishes: dict[str, Wish] = {}  # of requests that have asked
        self._num_filling = 0  # slots

    def offer(self, request: Request, num_local: int, hints: RequestHints) -> Offer | None:
        """A request waits for what it can use of the tier, and goes on with what that brought."""
        request_id = request.request_id
        wish = self._wishes.get(request_id)
        if wish is not None and wish.stop < 0:
            return None
        common, chain = self._common, self._common.engine.chain(request)
        num_resident = common.allocator.resident_depth(chain)
        position = max(num_resident, num_local // common.block_size)
        if wish is None:
            stop = self._first_wish(request, num_local, position, hints)
            wish = self._wishes[request_id] = Wish(stop, -1)
        if position < len(chain) and chain[position] in self._coming:
            return COMING
        if num_resident > wish.behind and self._is_worth(num_resident, position, wish.stop):
            self._wishes[request_id] = wish._replace(behind=num_resident)
            if self._begin(chain, wish.stop):
                return COMING
        self._wishes[request_id] = _NO_WISH
        return None

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        self._pace.step(step.total_num_scheduled_tokens)
        self._directory.tidy()
        orders, self._orders = self._orders, []
        return orders

    def advance(self, job: Job[Fetch], progress: Progress) -> None:
        fetch = job.task
        if progress.gave_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id, hangs=True)
        if progress.gave_up or progress.ended or progress.fell_short:
            for each in fetch.plan.hashes:
                if self._coming.get(each) is job:
                    del self._coming[each]
        if progress.ended:
            self._end(job)
        elif progress.gave_up:
            self._common.allocator.abandon(fetch.plan)

    def finish(self, request: Request) -> list[Order]:
        self._wishes.pop(request.request_id, None)
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing of adapters is kept below."""
        return []

    def reset(self) -> list[int]:
        """What is under way lands nowhere: its positions have left the pool."""
        self._coming.clear()
        jobs = list(self._common.ledger.of(self))
        for job in jobs:
            job.task.is_dropped = True
        return [job.job_id for job in jobs]

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

    @property
    def num_pins(self) -> int:
        return 0

    def check_invariants(self) -> None:
        """What is in flight is counted, and what is said to come is in flight."""
        jobs = list(self._common.ledger.of(self))
        num_filling = sum(job.num_blocks for job in jobs)
        assert num_filling == self._num_filling, f"{num_filling} slots fill, {self._num_filling} counted"
        for job in self._coming.values():
            assert job in jobs and not job.given_up, f"{job} brings nothing"

    def left_over(self) -> dict[str, object]:
        return {"blocks that come": list(self._coming), "requests that wait": list(self._wishes)}

    # Private

    def _first_wish(self, request: Request, num_local: int, position: int, hints: RequestHints) -> int:
        """How far the tier has what this request may use, in positions."""
        names = self._grid.names(self._common.engine.chain(request))
        depth = self._directory.depth(names) * self._grid.positions
        self._spills.arrived(request.request_id, max(position, depth))
        if not depth:
            return 0
        self._directory.touch(names)
        block_size = self._common.block_size
        usable = amounts.loadable_tokens(
            depth, num_local, request.num_tokens, block_size, hints.max_load_tokens
        )
        return (num_local + usable) // block_size

    def _is_worth(self, num_resident: int, position: int, stop: int) -> bool:
        common = self._common
        num_tokens = (stop - position) * common.block_size
        return (
            num_tokens >= self._least_tokens
            and self.breaker.allows
            and self._pace.is_worth(num_tokens, (stop - num_resident) * common.slot_bytes)
        )

    def _begin(self, chain: Sequence[bytes], stop: int) -> bool:
        """Open jobs for what the pool lacks of the first ``stop`` positions, as far as there is room."""
        common, size = self._common, self._grid.positions
        names = self._grid.names(chain, stop)
        stop = min(stop, self._directory.depth(names) * size)
        part = max(size, _PART_BYTES // common.slot_bytes // size * size)
        batch = Batch(common.clock())
        most = min(common.allocator.capacity // _POOL_SHARE, _MOST_BYTES // common.slot_bytes)
        while (room := most - self._num_filling) >= size:
            plan = common.allocator.plan_store(chain, stop, min(part, room))
            if plan is None:
                break
            self._open(plan, names, batch)
        return batch.num_left > 0

    def _open(self, plan: StorePlan, names: Sequence[bytes], batch: Batch) -> None:
        """A job that fills these positions."""
        common, size = self._common, self._grid.positions
        first, last = plan.start // size, -(-plan.stop // size)
        reading = self._directory.read(names, first, last)
        num_slots = len(plan.hashes)
        job = common.ledger.open(self, Fetch(plan, reading, names, batch), num_slots)
        batch.num_left += 1
        batch.num_blocks += num_slots
        self._num_filling += num_slots
        self._coming.update(dict.fromkeys(plan.hashes, job))
        self.breaker.began(job.job_id)
        slots = plan.slots[:, 0]
        common.filled_by[slots] = job.job_id
        edges = np.clip(np.arange(first, last + 1) * size, plan.start, plan.stop) - plan.start
        skips = np.maximum(plan.start - np.arange(first, last) * size, 0)
        extents = Extents(reading.places, reading.generations, edges, skips)
        places = np.repeat(extents.places, np.diff(edges))
        named = Part(job.job_id, 0, num_slots)
        self._orders.append(Order(self.route, [named], places, slots, None, None, extents))

    def _end(self, job: Job[Fetch]) -> None:
        fetch, common = job.task, self._common
        self._num_filling -= job.num_blocks
        self._directory.end_read(fetch.reading)
        fetch.batch.num_left -= 1
        if job.num_good == job.num_blocks:
            self.breaker.succeeded(job.job_id)
            common.allocator.commit(fetch.plan)
            if not fetch.batch.num_left:
                num_bytes = fetch.batch.num_blocks * common.slot_bytes
                self._pace.fetched(num_bytes, common.clock() - fetch.batch.since)
            return
        common.allocator.abort(fetch.plan)
        if fetch.is_dropped:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            common.count_failed(self.route)
            self.breaker.failed(job.job_id)
            self._directory.drop(fetch.names, (fetch.plan.start + job.num_good) // self._grid.positions)
