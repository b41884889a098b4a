"""GPU blocks that stores hold, and how they give way to requests that need them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

from offload.messages import STORE
from offload.scheduler import amounts
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job
from offload.scheduler.patience import Patience
from offload.scheduler.store import Store

_IN_FLIGHT_SECONDS = 2.0
"""What the link copies in that time may be in flight: more than an engine computes in most steps."""
_QUEUE_SECONDS = 0.5
"""What it copies in that time may wait in the queue while prompts are computed."""
_SOON_SECONDS = 0.5
"""A request waits for blocks that stores hold if the link has copied all of them by then."""


class Holds:
    """What stores may hold of the GPU's blocks, and what the queue of the backlog gives up, and when.

    The queue gives way right before a request would be refused. That is before a waiting one is looked at, if
    there is no patience left, and after every step to those that run. Blocks in flight cannot give way.

    On a link that does not keep up, as measured, all this is less: what waits for it long keeps others from
    the GPU's blocks, and from what its prefix cache would find.
    """

    def __init__(self, backlog: Backlog, common: Common, *, step_tokens: int) -> None:
        """Begin with nothing held; ``backlog`` has the queue, a step computes ``step_tokens`` at most."""
        self._backlog = backlog
        self._engine = common.engine
        self._link = common.costs.link(STORE)
        self._slot_bytes = common.slot_bytes  # what ranks tell of a block, each byte once
        self._metrics = common.metrics
        self._block_size = common.block_size
        self._groups = common.engine.groups
        self._columns = max(1, self._groups.columns)  # GPU blocks of a position, at least
        self._step_tokens = step_tokens
        self._patience = Patience(common.clock)
        self._in_flight: dict[Job[Store], Pending] = {}  # whose blocks a store job holds
        self.num_held = 0
        """GPU blocks held by stores in flight."""
        self._num_left = 0  # of these, blocks of requests that are over
        self._restoring: dict[str, int] = {}  # blocks that requests need when their KV has been loaded
        self._asking: str | None = None  # who asked last in this step, and has got no blocks yet
        self._refused: str | None = None  # who asked last in the step before, and got none
        self.to_run_with = 0
        """Blocks that running requests can take in the next step."""
        self.is_prefilling = False
        """Whether prompts of the last step may go on in the next one."""
        self.is_short = False
        """Whether it waits for more of them than the queue has, and without patience."""
        self.release_late: Callable[[Iterable[Any]], None] = self._engine.release
        """Ends a hold on each of blocks that the engine was about to reuse."""

    def num_holdable(self, *, by_link: bool = True) -> int:
        """GPU blocks that stores may hold now beside those in flight.

        ``by_link``: no more than the link copies soon. What is worth nothing in parts does without that.
        """
        is_patient = not self._patience.is_over
        most = amounts.holdable_blocks(self._engine.num_blocks, self.num_held, is_patient=is_patient)
        if not by_link:
            return most
        copied = max(self._copied_in(_IN_FLIGHT_SECONDS), self._groups.least)
        return int(max(0, min(most, copied - self.num_held)))

    @property
    def leave_room(self) -> bool:
        """Whether stores may hold as many blocks more as a position has."""
        return self.num_holdable() >= self._columns

    def limit(self, breaker: CircuitBreaker, *, by_link: bool = True) -> int:
        """GPU blocks that a store may hold now; see ``num_holdable``. A trial that hangs costs its slots."""
        return self._groups.least if breaker.is_outage else self.num_holdable(by_link=by_link)

    # Requests

    def give_way(self, request: Request, num_local: int, num_external: int) -> None:
        """A waiting request is about to ask the scheduler for blocks, some of which stores may hold.

        It waits for them while there is patience. Then the queue gives way, at once and by no more than the
        request lacks. A request that lacks more than the queue has waits for what is in flight, and meanwhile
        nothing more of the queue is stored. Nor does the queue give way to one that waits for others anyway,
        or for something else than blocks.

        Args:
            request: the request.
            num_local: leading tokens that the GPU has.
            num_external: tokens that we offer behind them.
        """
        self._asking = None
        num_held = self._backlog.num_queued + self._num_left
        if not num_held:
            return
        num_free = self._engine.num_free
        num_needed = self._num_to_admit(request.num_tokens, num_local, num_external)
        num_needed += self._engine.num_spare
        might_suffice = num_free >= num_needed + num_local // self._block_size * self._columns
        if num_needed > num_free + num_held or (might_suffice and not num_external):
            return
        self._asking = request.request_id
        is_soon = self._backlog.num_queued + self.num_held <= self._copied_in(_SOON_SECONDS)
        if is_soon and not self._patience.is_over:
            return
        found = islice(self._engine.chain(request), num_local // self._block_size)
        num_needed += self._engine.num_free_of(found) * self._columns
        num_lacking = num_needed - num_free
        if num_lacking > num_held:
            self._asking = None
        elif num_lacking > 0:
            self.is_short = num_lacking > self._backlog.num_queued
            if not self.is_short:
                self._give_way(num_needed)
        elif num_external and self._refused == self._asking:
            # The scheduler reserves blocks for others that prefill: nobody knows how many.
            self.give_up("gave_way")

    def was_given(self, request: Request, num_local: int, num_external: int) -> None:
        """It has got the blocks that it asked for, and asks for no more when ``num_external`` tokens come."""
        self._asking = None
        self._restoring.pop(request.request_id, None)
        if num_external:
            num_computed = num_local + num_external
            self._restoring[request.request_id] = self._num_to_admit(request.num_tokens, num_computed, 0)

    def finish(self, request_id: str, pending: Pending | None) -> None:
        """It is over: what its stores in flight hold is held by nobody else."""
        self._restoring.pop(request_id, None)
        if pending is not None:
            pending.is_over = True
            self._num_left += pending.num_in_flight

    # Jobs

    def begin(self, job: Job[Store], pending: Pending) -> None:
        """A store has begun."""
        self._in_flight[job] = pending
        self._count_in_flight(pending, len(job.blocks))

    def release_held(self, job: Job[Store]) -> int:
        """A store has ended, or is given up: release its blocks.

        Returns how many of them no request has any more.
        """
        pending = self._in_flight.pop(job, None)
        if pending is None:
            return 0
        if job.num_good < job.num_blocks:
            pending.lose("outage", job.task.plan.start)
        blocks, job.blocks = job.blocks, []
        self._count_in_flight(pending, -len(blocks))
        self._free(reversed(blocks), is_late=pending.is_late)
        return len(blocks) if pending.is_over else 0

    def drop(self, is_meant: Callable[[Request], bool] = lambda request: True) -> None:
        """What stores in flight copy for these requests has become worthless. O(stores in flight)."""
        for job, pending in self._in_flight.items():
            job.task.is_dropped |= is_meant(pending.request)

    def _count_in_flight(self, pending: Pending, num_blocks: int) -> None:
        self.num_held += num_blocks
        pending.num_in_flight += num_blocks
        if pending.is_over:
            self._num_left += num_blocks

    # Steps

    def begin_step(self, output: Step) -> None:
        """The scheduler is done with a step, and stores are to be planned."""
        if output.preempted_req_ids:
            if self._backlog.num_queued + self._num_left:
                self._patience.exhaust()
            self.give_up("gave_way")
        self._patience.spend(self._asking is not None)
        self._refused, self._asking = self._asking, None

    def end_step(self, output: Step, busy: list[str], num_admitted: int) -> None:
        """Stores are planned.

        Args:
            output: the step's.
            busy: requests that compute more in it than a token and drafts.
            num_admitted: requests that have begun and are not over.
        """
        self.is_short = False
        for request_id in [
            request_id for request_id in self._restoring if request_id in output.num_scheduled_tokens
        ]:
            del self._restoring[request_id]
        num_without_turn = num_admitted - len(self._restoring) - len(output.num_scheduled_tokens)
        num_left = self._tokens_to_prefill(output, busy)
        self.is_prefilling = bool(busy) and num_left > 0
        num_prefill = self._step_tokens if num_without_turn > 0 else num_left
        num_drafts = self._engine.drafts.num_tokens
        num_blocks = amounts.blocks_to_run(num_admitted, num_prefill, self._block_size, num_drafts)
        self.to_run_with = num_blocks * self._columns + sum(self._restoring.values())
        self.let_run()
        if busy and (num_late := self._backlog.num_queued - self._copied_in(_QUEUE_SECONDS)) > 0:
            self.give_up("gave_way", math.ceil(num_late))

    def let_run(self) -> None:
        """Give up what running requests can take in a step, so that none is preempted for the queue."""
        self._give_way(self.to_run_with)

    def _copied_in(self, seconds: float) -> float:
        """GPU blocks that the link copies in that time, as measured; infinity: nothing is known."""
        each = self._link.per_byte * self._slot_bytes
        return seconds / each if each else math.inf

    def _num_to_admit(self, num_tokens: int, num_local: int, num_external: int) -> int:
        """GPU blocks that it takes at least to admit a request, beside those of ``num_local`` tokens.

        One that runs at once has blocks for its drafts, too. One that is restored first needs some left.
        """
        drafts, size = self._engine.drafts, self._block_size
        num_there = num_local // size * self._columns
        if not num_external:
            return self._groups.least_blocks(num_tokens + drafts.num_lookahead) - num_there
        num_beside = (num_external // size + drafts.step_blocks(size)) * self._columns
        return max(self._groups.least_blocks(num_tokens) - num_there, num_beside)

    def _tokens_to_prefill(self, output: Step, busy: list[str]) -> int:
        """Prompt tokens that the next step computes at most, of requests that run already."""
        pending = [self._backlog.get(request_id) for request_id in busy]
        if output.total_num_scheduled_tokens >= self._step_tokens or None in pending:
            return self._step_tokens  # some may have had less than a turn, or are not known here
        requests = [each.request for each in pending if each is not None]
        num_left: int = sum(request.num_tokens - request.num_computed_tokens for request in requests)
        num_left -= sum(output.num_scheduled_tokens[request_id] for request_id in busy)
        return min(num_left, self._step_tokens)

    # Giving up

    def give_up(self, why: str, num_blocks: int | None = None) -> None:
        """Release the last blocks of the queue, or all. Late ones are the next to be reused again."""
        if (first := self._backlog.first) is not None:  # as all of them: they are late, or none is
            num_blocks = self._backlog.num_queued if num_blocks is None else num_blocks
            self.release(self._backlog.give_up(num_blocks, why), why, is_late=first.is_late)

    def release(self, blocks: list[Any], why: str | None, *, is_late: bool = False) -> None:
        """Release blocks that were queued, the first to be reused first; none is lost without ``why``.

        ``is_late``: they were the next to be reused, and are again.
        """
        self._free(blocks, is_late=is_late)
        if why is not None:
            self.count_unstored(len(blocks), why)

    def count_unstored(self, num_blocks: int, why: str) -> None:
        """So many full blocks are not stored."""
        self._metrics.count(f"unstored_blocks_{why}", num_blocks)

    def _free(self, blocks: Iterable[Any], *, is_late: bool) -> None:
        if is_late:
            self.release_late(blocks)
        else:
            self._engine.release(blocks)

    def _give_way(self, num_needed: int) -> None:
        """Give up as many blocks as it takes for ``num_needed`` to be free. Others may share some of them."""
        num_given_up = 0
        while self._backlog.num_queued:
            num_lacking = num_needed - self._engine.num_free
            if num_lacking <= 0:
                return
            num_given_up = max(num_lacking, 2 * num_given_up)
            self.give_up("gave_way", num_given_up)

    def check_invariants(self) -> None:
        """References are those of the queue and of the jobs in flight, and each of them is held."""
        self._patience.check_invariants()
        over = [pending for pending in set(self._in_flight.values()) if pending.is_over]
        num_left = sum(pending.num_in_flight for pending in over)
        assert num_left == self._num_left, f"{num_left} blocks left in flight, {self._num_left} counted"
        num_held = sum(pending.num_in_flight for pending in set(self._in_flight.values()))
        in_jobs = list(chain.from_iterable(job.blocks for job in self._in_flight))
        assert num_held == len(in_jobs) == self.num_held, (
            f"{num_held} blocks of requests, {len(in_jobs)} of jobs, {self.num_held} counted"
        )
        assert not (self.is_short or self._asking), "somebody asks since an earlier step"
        assert all(num >= 0 for num in self._restoring.values()), f"{self._restoring}"
        ours = self._engine.ids([*self._backlog.queued_blocks(), *in_jobs])
        for block_id, num in Counter(ours.tolist()).items():
            held = self._engine.num_holds(block_id)
            assert held >= num, f"we hold GPU block {block_id} {num} times, all together {held} times"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {"stores": list(self._in_flight), "requests that restore": list(self._restoring)}
