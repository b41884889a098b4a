"""The flow from the pool into a tier."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from allocator import Pin
from offload.messages import Ids, Order, Part, Route
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.tiers.budget import WriteBudget
from offload.scheduler.tiers.cold_end import MOST_POOLS, Chain, ColdEnd
from offload.scheduler.tiers.contents import Contents, Writing
from offload.scheduler.tiers.names import Grid, Path
from offload.scheduler.tiers.told import ExtentsNote
from offload.settings import Admit

MOST_BYTES = 64 << 20
"""In flight, on all ranks together."""

_JOB_BYTES = 16 << 20
_LOOKED_AT = 8
"""Chains looked at in one step."""
_MOST_LEFT = 8
"""Steps in a row that leave spills to later ones."""
_LITTLE = 16
"""What waits is little up to that part of the pool: 1 / 16."""
_BUSY_SECONDS = 1.0
"""The engine steps on that long for what is yet to be spilled, when nobody else needs it to."""


@dataclass(slots=True, eq=False)
class Spill:
    """A job's task.

    Attributes:
        pin: on the slots that it reads.
        writing: the places that it fills.
        num_bytes: of it, on all ranks.
        is_dropped: what it writes is of weights that may have changed.
    """

    pin: Pin
    writing: Writing
    num_bytes: int
    is_dropped: bool = False


class Spills:
    """What requests have left in the pool is written below it, in chain order, bit by bit.

    A request's chain is looked at when it is over, and again until all of it that is in the pool is in the
    tier, too, or the tier takes no more of it. The oldest chains come first. Where there are too many, the
    oldest are forgotten. By ``Admit.POLICY``, a full tier is not given what may be used again before the pool
    evicts it: such a chain waits until that is about to happen. So the cold end of the pool is written below,
    and the pool evicts without waiting. What came from another tier is there: it is written only where it
    leads to something that is not.

    A step that has opened other jobs has done enough: it leaves spills to the next ones, while little waits.
    """

    def __init__(
        self,
        route: Route,
        common: Common,
        directory: Contents,
        grid: Grid,
        budget: WriteBudget,
        admit: Admit,
        shutdown_seconds: float,
    ) -> None:
        """Begin with nothing to spill.

        Args:
            route: from the pool into the tier.
            common: what all flows work with.
            directory: of the tier.
            grid: how chains are cut.
            budget: what may be written.
            admit: what is written.
            shutdown_seconds: that a shutdown takes at most for what is yet to be written.
        """
        self.route = route
        common.arrivals.fetched.add_tier(route.target)
        self.breaker = CircuitBreaker(f"copies into the {route.target} tier", common.clock)
        self._common = common
        self._directory = directory
        self._grid = grid
        self._budget = budget
        self._shutdown_seconds = shutdown_seconds
        self._second_use = admit is Admit.SECOND_USE
        # an inner checkpoint is no end of the pool's: it is written at once
        self._may_wait = admit is Admit.POLICY and not common.engine.groups.has_bags
        self._cold_end = ColdEnd(common.allocator)
        self._chains: OrderedDict[bytes, Chain] = OrderedDict()  # by the last hash
        self._used_before: dict[str, int] = {}  # of requests: positions that were there when they came
        self._num_waiting = 0  # positions of these
        self._expected: OrderedDict[str, Chain] = OrderedDict()  # by request: the GPU may have more of them
        self._num_expected = 0  # positions of these
        if common.late is not None:
            common.late.hear.append(self._stored_late)
        self._num_bytes = 0  # in flight
        self._num_left = 0  # latest steps that have left spills to later ones
        self._num_opened = 0  # jobs of all flows, when that was looked at last
        self._busy_until = -1.0
        self._show()

    def arrived(self, request_id: str, num_positions: int) -> bool:
        """A request has come that has so many leading positions in the pool, or below.

        Returns whether that is new.
        """
        if request_id in self._used_before:
            return False
        self._used_before[request_id] = num_positions
        return True

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        due = self._cold_end.due()
        for chain in due:
            self._put(chain)
        if self._is_left_to_others(due) or not self._chains:
            return []
        orders: list[Order] = []
        for _ in range(min(_LOOKED_AT, len(self._chains))):
            if self._num_bytes >= MOST_BYTES or not self.breaker.allows:
                break
            chain = next(iter(self._chains.values()))
            self._forget(chain.hashes[-1])
            order = self._begin(chain)
            if order is not None:
                orders.append(order)
            if self._is_unfinished(chain, order is not None):
                self._put(chain)
        self._num_opened = self._common.ledger.num_opened
        return orders

    def finish(self, request: Request) -> list[Order]:
        """That request is over: what it leaves in the pool may be spilled."""
        num_before, common = self._used_before.pop(request.request_id, 0), self._common
        if request.lora_request is not None or request.resumable:
            return []
        hints, chain = common.engine.hints(request), common.engine.chain(request)
        stop = min(num_before, len(chain)) if self._second_use else len(chain)
        if stop and hints.store and hints.keep:
            prompt = min(request.num_prompt_tokens // common.block_size, stop)
            left = Chain(chain[:stop], (prompt, stop))
            self._file(left)
            if common.late is not None:
                self._expect(request.request_id, left)
        return []

    def ending(self) -> None:
        """The engine shuts down, and steps on for what is yet to be written: first what was used last."""
        for chain in self._cold_end.take():
            self._put(chain)
        self._busy_until = self._common.clock() + self._shutdown_seconds

    def advance(self, job: Job[Spill], progress: Progress) -> None:
        spill = job.task
        if progress.gave_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id, hangs=True)
        if not progress.ended:
            return
        self._num_bytes -= spill.num_bytes
        self._common.allocator.unpin(spill.pin)
        is_good = job.num_good == job.num_blocks and not spill.is_dropped
        self._directory.end_write(spill.writing, is_good=is_good)
        self._show()
        if is_good:
            self.breaker.succeeded(job.job_id)
        elif spill.is_dropped:
            self.breaker.dismissed(job.job_id)
        elif not job.given_up:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id)

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing of adapters is spilled."""
        return []

    def reset(self) -> list[int]:
        self._chains.clear()
        self._expected.clear()
        self._num_expected = 0
        self._cold_end.clear()
        self._num_waiting = 0
        self._directory.reset()
        self._show()
        return self._common.drop_jobs(self)

    @property
    def is_busy(self) -> bool:
        return bool(self._chains) and self.breaker.allows and self._common.clock() < self._busy_until

    @property
    def num_pins(self) -> int:
        return sum(1 for _ in self._common.ledger.of(self))

    def check_invariants(self) -> None:
        """What is in flight is counted, and the directory agrees with itself."""
        self._directory.check_invariants()
        self._budget.check_invariants()
        self._cold_end.check_invariants()
        in_flight = sum(job.task.num_bytes for job in self._common.ledger.of(self))
        assert in_flight == self._num_bytes, f"{in_flight} bytes in flight, {self._num_bytes} counted"
        expected = sum(len(chain.hashes) for chain in self._expected.values())
        assert expected == self._num_expected, f"{expected} positions expected, {self._num_expected} counted"
        waiting = sum(len(chain.hashes) for chain in self._chains.values())
        assert waiting == self._num_waiting, f"{waiting} positions wait, {self._num_waiting} counted"
        for name, chain in self._chains.items():
            assert chain.hashes[-1] == name, (
                f"a chain that ends with {chain.hashes[-1]!r} is filed under {name!r}"
            )

    def left_over(self) -> dict[str, object]:
        return {"arrived requests of spills": list(self._used_before)}

    # Private

    def _is_left_to_others(self, due: list[Chain]) -> bool:
        """Whether this step has opened other jobs, and little waits, so that later steps may look at it.

        What is ``due``, or goes into a full tier, is about to leave the pool, and is never left.
        """
        num_opened, before = self._common.ledger.num_opened, self._num_opened
        self._num_opened = num_opened
        is_left = (
            bool(self._chains)
            and not due
            and num_opened > before
            and self._num_left < _MOST_LEFT
            and self._num_waiting * _LITTLE <= self._common.allocator.capacity
            and self._directory.has_room
        )
        self._num_left = self._num_left + 1 if is_left else 0
        return is_left

    def _file(self, chain: Chain) -> None:
        """What the pool has of it may be spilled: now, or when the pool is about to evict it."""
        if self._may_wait and not self._directory.has_room:
            self._cold_end.add(chain)
        else:
            self._put(chain)
            self._busy_until = self._common.clock() + _BUSY_SECONDS

    def _expect(self, request_id: str, chain: Chain) -> None:
        """The rest of it may come into the pool once the GPU evicts it. The oldest are forgotten."""
        before = self._expected.pop(request_id, None)
        self._expected[request_id] = chain
        self._num_expected += len(chain.hashes) - (0 if before is None else len(before.hashes))
        while self._num_expected > MOST_POOLS * self._common.engine.num_blocks:
            self._num_expected -= len(self._expected.popitem(last=False)[1].hashes)

    def _stored_late(self, request_id: str) -> None:
        """More of what that request has left has come into the pool."""
        chain = self._expected.get(request_id)
        if chain is not None:
            self._file(chain)

    def _put(self, chain: Chain) -> None:
        """Look at it after the others; forget the first ones if there are too many."""
        self._forget(chain.hashes[-1])
        self._chains[chain.hashes[-1]] = chain
        self._num_waiting += len(chain.hashes)
        while self._num_waiting > MOST_POOLS * self._common.allocator.capacity:
            self._forget(next(iter(self._chains)))

    def _forget(self, name: bytes) -> None:
        chain = self._chains.pop(name, None)
        if chain is not None:
            self._num_waiting -= len(chain.hashes)

    def _show(self) -> None:
        num_used = self._directory.num_used
        if num_used is None:
            return
        num_kept = num_used * self._grid.slots * self._common.slot_bytes
        self._common.metrics.show("route_kept_bytes", num_kept, self.route)

    def _begin(self, chain: Chain) -> Order | None:
        """Spill the next extents of a chain that are in the pool and not below."""
        for path in self._paths(chain):
            order = self._write(chain, path)
            if order is not None:
                return order
        return None

    def _paths(self, chain: Chain) -> Iterator[Path]:
        """What of it is in the pool: whole extents, or what it takes to go on at a checkpoint."""
        allocator, groups = self._common.allocator, self._common.engine.groups
        if not groups.has_bags:
            yield self._path(chain, self._whole(allocator.resident_depth(chain.hashes)), 0)
            return
        for limit in chain.limits:
            depth = allocator.usable_depth(chain.hashes, limit)
            if depth:
                yield self._path(chain, depth, groups.num_in_bag(depth))

    def _path(self, chain: Chain, depth: int, num_bag: int) -> Path:
        """Made once: a chain is looked at again and again."""
        path = chain.paths.get(depth)
        if path is None:
            path = chain.paths[depth] = self._grid.path(chain.hashes, depth, num_bag)
        return path

    def _write(self, chain: Chain, path: Path) -> Order | None:
        common, directory, grid = self._common, self._directory, self._grid
        num_below = directory.known_depth(path.names)
        num_names = self._num_own(chain, path, num_below)
        if num_names <= num_below:
            return None
        extent_bytes = grid.slots * common.slot_bytes
        most = min(_JOB_BYTES // extent_bytes or 1, int(self._budget.left // extent_bytes))
        if most < 1:
            num_bytes = (num_names - num_below) * extent_bytes
            common.metrics.count("route_refused_bytes", num_bytes, self.route)
            return None
        note = partial(self._note, chain, path) if common.record_events else None
        writing = directory.write(path.names, num_names, most, note)
        if writing is None:
            return None
        first, last = writing.start, writing.stop
        edges = grid.edges(path, first, last)
        pin, slots = self._slots(chain, path, edges)
        if slots.min() < 0:  # the pool has not all columns of it
            common.allocator.unpin(pin)
            directory.end_write(writing, is_good=False)
            return None
        num_bytes = (last - first) * extent_bytes
        self._budget.take(num_bytes)
        self._num_bytes += num_bytes
        job = common.ledger.open(self, Spill(pin, writing, num_bytes), len(slots))
        self.breaker.began(job.job_id)
        extents = directory.extents(writing, job.job_id, edges - edges[0])
        places = np.repeat(extents.places, np.diff(edges))
        part = Part(job.job_id, 0, len(slots))
        return Order(self.route, [part], slots, places, common.filled_by[slots], None, extents)

    def _note(self, chain: Chain, path: Path, first: int, last: int) -> ExtentsNote:
        """For events about extents ``first <= i < last``. O(tokens), in C, if token ids are known."""
        positions, allocator = self._grid.positions, self._common.allocator
        start, stop = min(first * positions, path.stop), min(last * positions, path.stop)
        if start == stop:
            return ExtentsNote(path)
        pin = allocator.pin(chain.hashes, start, path.stop)  # with bags, a checkpoint is there only
        allocator.unpin(pin)
        return ExtentsNote(path, self._common.tokens.of(pin.slots[: stop - start, 0]), first)

    def _num_own(self, chain: Chain, path: Path, num_below: int) -> int:
        """Extents of a path up to the last that did not come from another tier: others are written there."""
        common, num_names = self._common, len(path.names)
        fetched = common.arrivals.fetched
        if num_names <= num_below or not fetched.has_several:
            return num_names
        edges = self._grid.edges(path, num_below, num_names)
        pin, slots = self._slots(chain, path, edges)
        common.allocator.unpin(pin)
        own = np.flatnonzero(~fetched.from_others(slots, common.filled_by[slots], self.route.target))
        if not len(own):
            return num_below
        if common.engine.groups.has_bags:  # a checkpoint is of use as a whole
            return num_names
        return num_below + int(np.searchsorted(edges - edges[0], own[-1], side="right"))

    def _slots(self, chain: Chain, path: Path, edges: Ids) -> tuple[Pin, Ids]:
        """A pin on what is written, and the slots between these edges."""
        columns = self._grid.columns
        start = min(int(edges[0]) // columns if columns else path.stop, path.stop - 1)
        pin = self._common.allocator.pin(chain.hashes, start, path.stop)
        slots = pin.slots.reshape(-1) if pin.bag is None else np.concatenate([pin.slots.reshape(-1), pin.bag])
        before = start * columns
        return pin, slots[edges[0] - before : edges[-1] - before]

    def _whole(self, num_positions: int) -> int:
        """As many as whole extents have."""
        return num_positions - num_positions % self._grid.positions

    def _is_unfinished(self, chain: Chain, has_begun: bool) -> bool:
        """Whether there may be something to spill of it later: more of it is on its way into the pool."""
        allocator, hashes = self._common.allocator, chain.hashes
        chain.num_looks -= 1
        if self._common.engine.groups.has_bags:
            return has_begun or chain.num_looks > 0  # its bag may be on its way
        known = allocator.known_depth(hashes, len(hashes))
        if not has_begun and known == allocator.resident_depth(hashes):
            return False  # nothing is coming
        names = self._path(chain, self._whole(known), 0).names
        return len(names) > self._directory.known_depth(names)
