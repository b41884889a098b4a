"""The flow from a tier into the pool, from where restores take what it brings."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from allocator import StorePlan
from offload.messages import Order, Part, Route
from offload.scheduler.arrivals import Arrival
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import COMING, Offer, Why
from offload.scheduler.tiers.asked import count_asked
from offload.scheduler.tiers.contents import Contents, Reading
from offload.scheduler.tiers.fetch import LEAST_TOKENS, NO_WISH, POOL_SHARE, Batch, Fetch, Wish, parts_of
from offload.scheduler.tiers.names import Grid, Path
from offload.scheduler.tiers.pace import Pace
from offload.scheduler.why.reasons import Unfetched

_PART_BYTES = 16 << 20
_MOST_BYTES = 1 << 30
"""Of fetches under way, so that a slow disk is done with them long before they are overdue."""


class Fetches:
    """Brings what a waiting request can use from the tier into the pool. The request waits for it.

    A fetch is cut into parts, each a job of its own, so that what has come is resident at once. Those under
    way fill a part of the pool at most; when they have landed, others follow. What does not come, or not
    sooner than it is computed, is computed.
    """

    def __init__(
        self,
        route: Route,
        common: Common,
        directory: Contents,
        grid: Grid,
        note: Callable[[str, int], bool],
        pace: Pace,
        *,
        least_tokens: int = LEAST_TOKENS,
        pool_share: float = POOL_SHARE,
    ) -> None:
        """Begin with none.

        Args:
            route: from the tier into the pool.
            common: what all flows work with.
            directory: of the tier.
            grid: how chains are cut.
            note: told once of each request how many leading positions there are for it; says whether it is
                the first time.
            pace: what was measured.
            least_tokens: fewer are not worth a fetch.
            pool_share: fetches under way fill at most that part of the pool.
        """
        self.route = route
        self.breaker = CircuitBreaker(f"copies out of the {route.source} tier", common.clock)
        self._common = common
        self._directory = directory
        self._grid = grid
        self._note_arrival = note
        self._pace = pace
        self._least_tokens = least_tokens
        self._pool_share = pool_share
        self._has_bags = common.engine.groups.has_bags
        self._fetched = common.arrivals.fetched
        self._fetched.prepare()
        self._part_slots = max(1, _PART_BYTES // common.slot_bytes)
        self._orders: list[Order] = []
        self._coming: dict[bytes, Fetch] = {}  # by hash: in flight, and somebody may wait for them
        self._wishes: dict[str, Wish] = {}  # of requests that have asked
        self._ahead: dict[str, int] = {}  # slots fetched for requests that are yet to ask
        self._unsure: dict[str, tuple[Request, RequestHints]] = {}  # have come, and nobody knows what for
        self._num_filling = 0  # slots
        self._least_positions = grid.positions

    def arrived(self, request: Request, hints: RequestHints) -> None:
        """Fetch ahead for it, while what others were fetched ahead for and have yet to ask leaves room."""
        chain, request_id = self._common.engine.chain(request), request.request_id
        if not chain or hints.max_load_tokens is not None:
            return
        stop = self._first_wish(request, chain, 0, hints)
        if stop is None:
            self._unsure[request_id] = (request, hints)
            return
        num_usable = self._num_usable(request, chain, 0)
        self._note(request, hints, num_usable, stop)
        if not stop or self._common.engine.has(chain[stop - 1]):
            return
        room = self._common.slots_in(self._pool_share) - self._fetched.num_ahead
        ahead = stop if self._has_bags else min(stop, num_usable + room // self._grid.columns)
        num_slots = self._num_slots(chain, ahead)
        if ahead > num_usable and num_slots <= room and self._is_worth(chain, num_usable, 0, ahead):
            self._wishes[request_id] = Wish(stop, num_usable)
            self._ahead[request_id] = num_slots
            self._fetched.num_ahead += num_slots
            self._begin(request, chain, ahead)

    def offer(self, request: Request, num_local: int, hints: RequestHints) -> Offer | None:
        """A request waits for what it can use of the tier, and goes on with what that brought."""
        request_id = request.request_id
        wish = self._wishes.get(request_id)
        if wish is NO_WISH:
            return None
        self._has_asked(request_id)
        common, chain = self._common, self._common.engine.chain(request)
        first = num_local // common.block_size
        num_usable = self._num_usable(request, chain, first)
        if wish is None:
            has_enough = self._has_enough(chain, max(num_usable, first))
            stop = num_usable if has_enough else self._first_wish(request, chain, first, hints)
            if stop is None:
                return COMING
            self._unsure.pop(request_id, None)
            self._note(request, hints, num_usable, stop)
            wish = self._wishes[request_id] = Wish(stop, -1)
        if wish.stop <= first:  # the GPU has more
            self._wishes[request_id] = NO_WISH
            return None
        # a checkpoint comes at its end, plain blocks one after the other
        awaited = wish.stop - 1 if self._has_bags else max(num_usable, first)
        if 0 <= awaited < len(chain) and chain[awaited] in self._coming:
            return self._coming_to(chain, first, wish.stop)
        why = Unfetched.FELL_SHORT if num_usable <= wish.behind else Unfetched.CHEAPER
        if num_usable > wish.behind and self._is_worth(chain, num_usable, first, wish.stop):
            self._wishes[request_id], why = wish._replace(behind=num_usable), Unfetched.NO_ROOM
            if self._begin(request, chain, wish.stop):
                return self._coming_to(chain, first, wish.stop)
        self._wishes[request_id] = NO_WISH
        why = why if self.breaker.allows else Unfetched.PAUSED
        common.notes.not_fetched(request_id, self.route.source, wish.stop, why)
        return None

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        self._directory.tidy()
        for request_id in self._directory.answered():
            if request_id in self._unsure:
                self.arrived(*self._unsure.pop(request_id))
        orders, self._orders = self._orders, []
        return orders

    def advance(self, job: Job[Fetch], progress: Progress) -> None:
        if progress.gave_up:
            self._fetched.num_filling -= job.num_blocks
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id, hangs=True)
        if progress.gave_up or progress.fell_short:
            self._give_up(job.task)
        if progress.ended:
            self._end(job)

    def finish(self, request: Request) -> list[Order]:
        self._wishes.pop(request.request_id, None)
        self._has_asked(request.request_id)
        self._unsure.pop(request.request_id, None)
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing of adapters is kept below."""
        return []

    def reset(self) -> list[int]:
        """What is under way lands nowhere: its positions have left the pool."""
        self._coming.clear()
        self._common.arrivals.clear()
        return self._common.drop_jobs(self)

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

    @property
    def num_pins(self) -> int:
        return 0

    def check_invariants(self) -> None:
        """What is in flight is counted, and what is said to come is in flight."""
        self._fetched.check(job for job in self._common.ledger if isinstance(job.task, Fetch))
        Fetch.check_all(list(self._common.ledger.of(self)), self._coming.values(), self._num_filling)
        assert self._ahead.keys() <= self._wishes.keys(), f"{self._ahead} were fetched for nobody"

    def left_over(self) -> dict[str, object]:
        waiting = [*self._wishes, *self._unsure]
        return {"blocks that come": list(self._coming), "requests that wait": waiting}

    # Private

    def _coming_to(self, chain: Sequence[bytes], first: int, stop: int) -> Offer:
        """It comes: a restore may follow it to the GPU at once, or once it is in the pool."""
        groups = self._common.engine.groups
        num_blocks = (stop - first) * groups.columns + groups.bag_slots
        if self._common.arrivals.may_follow(chain, stop, num_blocks):
            return Offer(None, Why.FOLLOWING, stop)
        return COMING

    def _num_usable(self, request: Request, chain: Sequence[bytes], first: int) -> int:
        """Leading positions that the pool can bring, and with checkpoints only those that end with one."""
        if not self._has_bags:
            return self._common.allocator.resident_depth(chain)
        limit = (request.num_tokens - 1) // self._common.block_size
        return self._common.allocator.usable_depth(chain, limit, first)

    @property
    def _num_coming(self) -> int:
        """Slots that fetches fill. Those of other tiers that were given up are not waited for."""
        return max(self._num_filling, self._fetched.num_filling)

    def _has_asked(self, request_id: str) -> None:
        self._fetched.num_ahead -= self._ahead.pop(request_id, 0)

    def _first_wish(
        self, request: Request, chain: Sequence[bytes], first: int, hints: RequestHints
    ) -> int | None:
        """How far the tier has what this request may use, in positions; None: ask again."""
        size, directory, limit = self._common.block_size, self._directory, len(chain)
        if directory.num_used == 0:
            return 0
        if hints.max_load_tokens is not None:
            limit = min(limit, first + hints.max_load_tokens // size)
        if not self._has_bags:
            depth = directory.find(request.request_id, self._grid.names(chain))
            return None if depth is None else min(depth * self._grid.positions, limit)
        limit = min(limit, (request.num_tokens - 1) // size)
        return directory.find_checkpoint(request.request_id, chain, limit, partial(self._path, chain))

    def _has_enough(self, chain: Sequence[bytes], there: int) -> bool:
        """Whether what is behind so many positions is not worth a fetch, whatever a store has of it."""
        is_worth = (len(chain) - there) * self._common.block_size >= self._least_tokens
        is_coming = there < len(chain) and chain[there] in self._coming
        return self._directory.num_used is None and not (self._has_bags or is_worth or is_coming)

    def _note(self, request: Request, hints: RequestHints, num_usable: int, stop: int) -> None:
        """Once for each request: it uses what the tier has of its chain, and would have used the rest.

        The policy of a tier that has nothing is not told: its code and data are long out of the caches.
        """
        if self._note_arrival(request.request_id, max(num_usable, stop)):
            chain = self._common.engine.chain(request)
            if self._directory.num_used is not None and hints.max_load_tokens is None:
                count_asked(self._common, self.route, self._grid, request, num_usable, stop)
            if self._directory.num_used == 0:
                return
            if not self._has_bags:
                self._directory.touch(self._grid.names(chain))
            elif stop:
                self._directory.touch(self._path(chain, stop).names)

    def _path(self, chain: Sequence[bytes], stop: int) -> Path:
        return self._grid.path(chain, stop, self._common.engine.groups.num_in_bag(stop))

    def _num_slots(self, chain: Sequence[bytes], stop: int) -> int:
        """That the pool needs for the first ``stop`` positions, and their bag."""
        known = self._common.allocator.known_depth(chain, stop)
        return (stop - known) * self._grid.columns + self._common.engine.groups.num_in_bag(stop)

    def _is_worth(self, chain: Sequence[bytes], num_usable: int, first: int, stop: int) -> bool:
        common = self._common
        there, end = max(num_usable, first) * common.block_size, stop * common.block_size
        return (
            end - there >= self._least_tokens
            and self.breaker.allows
            and self._pace.is_worth(there, end, self._num_slots(chain, stop) * common.slot_bytes)
        )

    def _begin(self, request: Request, chain: Sequence[bytes], stop: int) -> bool:
        """Open jobs for what the pool lacks of the first ``stop`` positions, as far as there is room."""
        common, grid = self._common, self._grid
        batch = Batch(common.clock())
        most = min(self._common.slots_in(self._pool_share), _MOST_BYTES // common.slot_bytes)
        if self._has_bags:
            if self._num_slots(chain, stop) <= most - self._num_coming:
                self._begin_checkpoint(request, chain, stop, batch)
            return batch.num_left > 0
        path = self._prefix_path(chain, stop)
        if not (stop := path.stop):
            return False
        part = max(1, self._part_slots // grid.slots) * grid.positions
        while (room := (most - self._num_coming) // grid.columns) >= self._least_positions:
            plan = common.allocator.plan_store(chain, stop, min(part, room), note=common.note_of(request))
            if plan is None:
                break
            self._open(plan, path, batch)
        return batch.num_left > 0

    def _prefix_path(self, chain: Sequence[bytes], stop: int) -> Path:
        """To the last of the first ``stop`` positions that may be fetched."""
        names = self._grid.names(chain, stop)
        return self._grid.path(chain, self._directory.depth(names) * self._grid.positions)

    def _begin_checkpoint(self, request: Request, chain: Sequence[bytes], stop: int, batch: Batch) -> None:
        """All of what it takes to go on there, or nothing."""
        allocator, path = self._common.allocator, self._path(chain, stop)
        if self._directory.depth(path.names) < len(path.names):
            return
        plan = allocator.plan_store(chain, stop, None, None, path.num_bag, note=self._common.note_of(request))
        if plan is None:
            return
        if plan.stop == stop and (plan.bag is not None or not path.num_bag):
            self._open(plan, path, batch)
        else:
            allocator.abort(plan)

    def _open(self, plan: StorePlan, path: Path, batch: Batch) -> None:
        """Jobs that fill these positions, and the bag behind them."""
        common, grid = self._common, self._grid
        slots = plan.all_slots
        first = grid.at(path, plan.start)
        last = len(path.names) if plan.bag is not None else grid.at(path, plan.stop - 1) + 1
        reading = self._read(plan, path, first, last)
        edges = grid.edges(path, first, last) - plan.start * grid.columns
        skips = np.zeros(last - first, dtype=np.int64)
        skips[0] = max(-edges[0], 0)
        edges = np.clip(edges, 0, len(slots))
        hashes = plan.hashes if plan.bag is None else [*plan.hashes, path.end]
        cuts = list(parts_of(edges, self._part_slots))
        arrival = Arrival(plan, path.end, [part_start for part_start, _ in cuts])
        fetch = Fetch(plan, reading, path.names, first, edges, batch, hashes, arrival)
        parts = []
        for part_start, part_stop in cuts:
            job = common.ledger.open(self, fetch, part_stop - part_start)
            self.breaker.began(job.job_id)
            common.filled_by[slots[part_start:part_stop]] = job.job_id
            self._fetched.begin(slots[part_start:part_stop], job.job_id, reading.place or self.route.source)
            fetch.starts[job.job_id] = part_start
            parts.append(Part(job.job_id, part_start, part_stop))
        fetch.num_left = len(parts)
        batch.num_left += len(parts)
        batch.num_blocks += len(slots)
        self._num_filling += len(slots)
        self._fetched.num_filling += len(slots)
        self._coming.update(dict.fromkeys(fetch.hashes, fetch))
        common.arrivals.add(arrival)
        extents = reading.extents(edges, skips)
        places = np.repeat(extents.places, np.diff(edges))
        self._orders.append(Order(self.route, parts, places, slots, None, None, extents))

    def _read(self, plan: StorePlan, path: Path, first: int, last: int) -> Reading:
        """Begin to read these extents of a path. Of the last one the plan may lack what is behind."""
        return self._directory.read(path.names, first, last)

    def _release(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        for each in fetch.hashes:
            if self._coming.get(each) is fetch:
                del self._coming[each]

    def _give_up(self, fetch: Fetch) -> None:
        """It will not be whole: nobody waits for it, and its positions leave the pool."""
        self._release(fetch)
        if not fetch.is_over:
            fetch.is_over = True
            self._common.allocator.abandon(fetch.plan)
            self._common.arrivals.give_up(fetch.arrival)

    def _commit(self, fetch: Fetch) -> None:
        """All jobs have ended, and none was given up."""
        if self._common.allocator.commit(fetch.plan):
            self._common.committed(fetch.plan)

    def _end(self, job: Job[Fetch]) -> None:
        fetch, common = job.task, self._common
        self._num_filling -= job.num_blocks
        if not job.given_up:
            self._fetched.num_filling -= job.num_blocks
        fetch.num_left -= 1
        fetch.batch.num_left -= 1
        if job.num_good == job.num_blocks:
            self.breaker.succeeded(job.job_id)
        elif fetch.is_dropped:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            if job.is_sound:
                self.breaker.dismissed(job.job_id)
                common.metrics.count("route_missed_blocks", job.num_blocks - job.num_good, self.route)
            else:
                common.count_failed(self.route)
                self.breaker.failed(job.job_id)
            bad = fetch.extent_of(fetch.starts[job.job_id] + job.num_good)
            num_orphans = self._directory.drop(fetch.names, fetch.first + bad)
            common.metrics.count("route_orphaned_extents", num_orphans, self.route)
        if fetch.num_left:
            return
        self._directory.end_read(fetch.reading)
        if fetch.is_over:
            common.allocator.abort(fetch.plan)
        else:
            self._release(fetch)
            self._commit(fetch)
        common.arrivals.end(fetch.arrival)
        if not fetch.batch.num_left:
            self._pace.fetched(fetch.batch.num_blocks * common.slot_bytes, common.clock() - fetch.batch.since)
