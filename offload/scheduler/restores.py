"""Restores: loads under way for requests that wait for them, and what others may make of them."""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from offload.messages import LOAD, Order, Part
from offload.restore_config import RestoreWhen
from offload.scheduler import amounts
from offload.scheduler.back_pressure import BackPressure
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.carryover import Carryover
from offload.scheduler.choices import Choices
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, State, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.hints import RequestHints
from offload.scheduler.hits import Hits
from offload.scheduler.offer import COMING, NOTHING, QUEUED, Offer, Why
from offload.scheduler.restore import LoadPart, Restore
from offload.scheduler.restore_checks import check_restores
from offload.scheduler.restore_index import RestoreIndex
from offload.scheduler.waiting import Waiting

SHARED_AT_ONCE = 512
"""Positions handed to the GPU's prefix cache in one step: vLLM takes about 1.5 µs for each."""

_BY_NOBODY = -2
"""No job has filled such a slot, so what reads it fails."""


class _Followed(NamedTuple):
    """A restore that a request waits for, and how many positions of it are also the request's."""

    restore: Restore
    depth: int


class Restores:
    """The flow from the pool to the GPU: all restores in flight.

    A restore is loaded in parts, each a job of its own. A request with the same beginning waits for no more
    than what it shares and loads none of it again. As soon as that has landed, it is handed to the GPU's
    prefix cache. Not before somebody needs it, because the scheduler would look at all of it again for every
    waiting request in every step.

    Many restores may end in one step. So much of them is handed over in it, and so many pins end; the rest is
    carried over. vLLM itself hands over a restore that has ended, as soon as its request goes on. Until then
    requests that follow it wait, or are given it in one of the next steps.

    A restore that ends with a bag is of use as a whole only: to its request, and to who shares all of it.
    """

    route = LOAD

    def __init__(self, common: Common, when: RestoreWhen, *, first_part: int, step_tokens: int) -> None:
        """Begin with none.

        Args:
            common: what all flows work with.
            when: restores are made.
            first_part: blocks in the first part of a restore.
            step_tokens: tokens that a step computes at most.
        """
        self.breaker = CircuitBreaker("restores", common.clock)
        self.first_part = first_part
        self._common = common
        self._metrics = common.metrics
        self.choices = Choices(common, when)
        self._pressure = BackPressure(common, self.choices, step_tokens)
        self._allocator = common.allocator
        self._ledger = common.ledger
        self._engine = common.engine
        self._groups = common.engine.groups
        self._hits = Hits(common)
        self._arrivals = common.arrivals
        self._block_size = common.block_size
        self.carryover = Carryover(common.allocator)
        self.shared_at_once = self._may_share = SHARED_AT_ONCE
        self._restores: dict[int, Restore] = {}
        self._failed: set[str] = set()  # requests that no KV may be loaded for once more
        self.num_stuck = 0
        """GPU blocks that loads past their deadline may still write to."""
        self._waiting = Waiting(common.engine, step_tokens)
        self._landed: dict[str, Restore] = {}  # by request: have ended, and are yet to be handed over
        self._followed: dict[str, _Followed] = {}  # what requests were last told to wait for
        self._index = RestoreIndex()  # of those that somebody may wait for
        self._is_filling = np.zeros(self._engine.num_blocks, dtype=np.bool_)

    def __iter__(self) -> Iterator[Restore]:
        return iter(self._restores.values())

    def early_offer(self, request: Request, num_local: int) -> Offer | None:
        """What to answer before any source is asked: it waits for a restore, or may have none now.

        None: ask. ``num_local``: leading tokens that the GPU has.
        """
        if self.choices.is_off:
            return NOTHING[Why.OFF]
        if request.request_id in self._failed:
            return COMING if self._waiting.must_let_pass(request) else NOTHING[Why.FAILED]
        if request.request_id == self._waiting.refused:
            return NOTHING[Why.REFUSED]
        if self.follow(request, num_local // self._block_size):
            return COMING
        if self.carryover.has_drops:
            return NOTHING[Why.DROPPING]
        if not self.breaker.allows:
            return NOTHING[Why.PAUSED]
        return None

    def arrived(self, request: Request, hints: RequestHints) -> None:
        """It has no blocks yet that a restore could fill."""

    def offer(self, request: Request, num_local: int, hints: RequestHints, coming: int = 0) -> Offer:
        """What the pool has behind the ``num_local`` leading tokens of the GPU. The last to be asked.

        ``coming``: leading positions that are resident, or on their way and may be followed.
        """
        offer = self._chosen(request, num_local, hints, coming)
        if not offer.tokens:
            return offer
        num_blocks = offer.tokens // self._block_size * self._groups.columns + self._groups.bag_slots
        if not amounts.may_load(self._engine.num_blocks, self.num_stuck, num_blocks):
            return NOTHING[Why.STUCK]
        if not coming and self._pressure.must_wait(request.request_id, num_local, offer.tokens):
            return QUEUED
        if self._waiting.need(request.request_id, num_blocks):
            return COMING
        self._waiting.offered(request.request_id)
        return offer

    def follow(self, request: Request, position: int) -> bool:
        """Have the request wait for the restore that brings the block at that position of its chain.

        Returns whether there is one, and the block is on its way or just arrived. What has landed for the
        request is handed over. O(1), and O(log n) more when the request is new to a restore.
        """
        request_id, chain = request.request_id, self._engine.chain(request)
        restore = self._index.find(chain, position)
        if restore is None:
            return False
        depth = restore.followers.get(request_id)
        if depth is None:
            depth = restore.num_common(chain, position)
            goes_on = request.num_tokens > len(restore.chain) * self._block_size
            if restore.is_whole and not (goes_on and depth == restore.num_positions):
                return False  # it can only be used by who goes on where it ends
            restore.follow(request_id, depth)
        self._followed[request_id] = _Followed(restore, depth)
        return self.still_waits(request_id, position)

    def still_waits(self, request_id: str, position: int) -> bool:
        """Whether the block at ``position``, which that request was told to wait for, is still on its way.

        Asked in every step for each request that waits, so it looks at little memory. O(1). What has landed
        for the request is handed over.
        """
        followed = self._followed.get(request_id)
        if followed is None:
            return False
        restore, depth = followed
        is_awaited = restore.parts_left and not (restore.is_void or restore.is_cancelled)
        if (
            not (is_awaited or self._has_landed(restore))
            or depth <= restore.num_shared
            or not 0 <= position - restore.first < depth
        ):
            del self._followed[request_id]
            return False
        if restore.num_landed >= depth:
            self._share(restore, depth)
        return True

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        """None: they begin when the scheduler gives blocks to their requests."""
        is_still = len(self._ledger) <= self._ledger.num_given_up
        self._waiting.end_step(is_idle=not step.num_scheduled_tokens, is_still=is_still)
        self._pressure.end_step()
        return []

    def finish(self, request: Request) -> list[Order]:
        """That request is over: it waits for nothing, and nobody for it."""
        self._followed.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self.choices.finish(request.request_id)
        self.went_on(request.request_id)
        return []

    def went_on(self, request_id: str) -> bool:
        """That request is admitted, so vLLM has handed over what was restored for it before.

        Returns whether it has waited for a restore.
        """
        has_waited = self._waiting.went_on(request_id)
        if has_waited:
            self._landed.pop(request_id, None)
        return has_waited

    def tidy(self) -> bool:
        """A step ends: what is carried over goes on. Returns whether slots were dropped that had to wait."""
        self._may_share = self.shared_at_once
        return self.carryover.tidy()

    def open(self, request: Request, positions: range) -> Order:
        """Begin to load these chain positions for a request that has blocks for them.

        They are resident, or may be followed. The request holds these blocks until the restore has ended.
        """
        first, stop = positions.start, positions.stop
        chain, request_id = list(self._engine.chain(request)[:stop]), request.request_id
        held = self._arrivals.slots(chain, positions)
        slots, block_ids, fits = self._hits.pairs(held.slots, held.bag, request_id, positions)
        columns = self._groups.columns
        restore = Restore(request, first, chain, block_ids, columns, self._groups.has_bags, held.pin)
        if restore.is_whole:
            self._engine.retain(request, stop * self._block_size)
        parts = amounts.following_parts(len(block_ids), self.first_part, held.cuts)
        jobs = [self._ledger.open(self, LoadPart(restore, *part), part[1] - part[0]) for part in parts]
        restore.restore_id = jobs[0].job_id
        restore.parts_left = len(jobs)
        self._arrivals.follow(restore, held.path)
        self._restores[restore.restore_id] = restore
        self._waiting.wait(request, stop * self._block_size)
        self._index.add(restore)
        self._is_filling[block_ids] = True
        self._pressure.began(len(block_ids))
        self.breaker.began(restore.restore_id)
        if not restore.follows:
            self.choices.queue.begin(len(block_ids) * self._common.block_bytes)
        named = [Part(job.job_id, *part) for job, part in zip(jobs, parts, strict=True)]
        fills = self._common.filled_by[slots] if fits else np.full(len(slots), _BY_NOBODY)
        return Order(self.route, named, slots, block_ids, fills, request_id)

    def reset(self) -> list[int]:
        """Nothing under way is wanted any longer. Returns the jobs."""
        return self.drop(lambda request: True)

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing under way for these requests is wanted any longer. Returns all jobs that are not wanted."""
        for restore in self:
            if is_meant(restore.request):
                restore.is_cancelled = True
                self._index.remove(restore)
        self._landed = {key: each for key, each in self._landed.items() if not is_meant(each.request)}
        return [job.job_id for job in self._ledger.of(self) if job.task.restore.is_cancelled]

    def are_filling(self, block_ids: Collection[int]) -> bool:
        """Whether all these GPU blocks are being filled for requests which wait for them. O(block_ids)."""
        ids = np.fromiter(block_ids, dtype=np.int64, count=len(block_ids))
        return bool(self._is_filling[ids].all())

    @property
    def is_busy(self) -> bool:
        """Whether ends of restores leave something to do."""
        return len(self.carryover) > 0

    @property
    def num_pins(self) -> int:
        """Of restores, and of those that have ended as far as that is carried over."""
        return sum(restore.pin is not None for restore in self) + self.carryover.num_pins

    def advance(self, job: Job[LoadPart], progress: Progress) -> None:
        """Take in what became of a part.

        What failed leaves the pool, and what landed is shared. The memory that a stuck copy may still write
        to is held until it has ended.
        """
        restore, start, stop = job.task
        if not restore.follows and (progress.gave_up or (progress.ended and not job.given_up)):
            self.choices.queue.end(job.num_blocks * self._common.block_bytes)
        if progress.ended:
            restore.end_part(start, start + job.num_good)
            restore.is_sound &= job.is_sound or restore.is_lost  # others may have the slots by now
        if progress.fell_short:
            restore.is_void = True
            self._index.remove(restore)
            if not restore.request.is_finished():
                # The scheduler counts such a request among the prefills it reserves blocks for ever after,
                # and would have it wait for blocks beside its own if it were offered a second load.
                self._failed.add(restore.request.request_id)
            if not restore.is_cancelled:
                self._drop(restore, start + job.num_good)
        if progress.gave_up:
            self.num_stuck += job.num_blocks
            if not restore.was_stuck:
                self._common.count_failed(self.route)
                self.breaker.failed(restore.restore_id, hangs=True)
                self._no_longer_fills(restore)
            self._share(restore, restore.num_landed)
            restore.was_stuck = True
            job.blocks = self._engine.blocks(restore.block_ids[start:stop])
            self._engine.hold(job.blocks)
        if not progress.ended:
            return
        if job.given_up:
            self.num_stuck -= job.num_blocks
            self._engine.release(reversed(job.blocks))
        num_wanted = restore.num_landed if restore.is_whole else restore.num_wanted
        self._share(restore, num_wanted)
        if not restore.parts_left:
            is_wanted = restore.num_shared < num_wanted and not (restore.is_void or restore.is_cancelled)
            if is_wanted and self._waits_for(restore):
                self._landed[restore.request.request_id] = restore
            self._end(restore)

    def check_invariants(self) -> None:
        """Index, parts and filling blocks are those of the restores in flight."""
        stuck = sum(job.num_blocks for job in self._ledger.of(self) if job.given_up)
        assert stuck == self.num_stuck, f"{stuck} blocks stuck, {self.num_stuck} counted"
        check_restores(self)

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {
            "restores": list(self),
            "restores to hand over": list(self._landed),
            **self._waiting.left_over(),
            "requests that are chosen for": self.choices.left_over(),
            "requests that follow": list(self._followed),
            "requests whose restores failed": list(self._failed),
            "pins and drops": len(self.carryover),
        }

    def _chosen(self, request: Request, num_local: int, hints: RequestHints, coming: int) -> Offer:
        """What of it is to be restored, by what that costs. A part ends at a checkpoint if there are any."""
        num_tokens = self._hits.num_tokens(request, num_local, hints.max_load_tokens, coming)
        if not num_tokens:
            return NOTHING[Why.ABSENT]
        stop = num_local + num_tokens
        chosen = self.choices.make(
            request, num_local, stop, len(self._restores), is_wanted=bool(hints.load), is_coming=coming > 0
        )
        if chosen >= stop:
            return Offer(num_tokens, Why.RESIDENT)
        most = chosen - num_local
        num_tokens = self._hits.num_tokens(request, num_local, most) if most > 0 else 0
        if num_tokens:
            return Offer(num_tokens, Why.PART)
        self.choices.dismissed(request.request_id)
        return NOTHING[Why.COMPUTED]

    def _drop(self, restore: Restore, index: int) -> None:
        """The bytes for block ``index`` of it are bad."""
        if restore.num_coming:
            restore.bad = index if restore.bad is None else min(index, restore.bad)
        restore.drop_from(self.carryover, index)

    def _end(self, restore: Restore) -> None:
        if restore.is_whole and restore.num_shared:
            self._hits.retain_known(restore.request, len(restore.chain))
        if restore.pin is not None:
            self.carryover.unpin(restore.pin)
        if restore.follows:
            self._arrivals.left(restore)
        del self._restores[restore.restore_id]
        self._index.remove(restore)
        if not restore.was_stuck:
            self._no_longer_fills(restore)
        num_blocks = 0 if restore.was_stuck else restore.num_blocks_landed
        num_positions = 0 if restore.was_stuck else restore.num_landed
        self._metrics.count("restored_requests", num_positions > 0)
        self._metrics.count("restored_tokens", num_positions * self._block_size)
        self._metrics.count("loaded_bytes", num_blocks * self._common.block_bytes)
        if num_blocks == len(restore.block_ids):
            self.breaker.succeeded(restore.restore_id)
        elif restore.is_cancelled or (restore.is_sound and not restore.was_stuck):
            self.breaker.dismissed(restore.restore_id)
        elif not restore.was_stuck:
            self._common.count_failed(self.route)
            self.breaker.failed(restore.restore_id)

    def _no_longer_fills(self, restore: Restore) -> None:
        self._is_filling[restore.block_ids] = False
        self._pressure.ended(len(restore.block_ids))

    def _share(self, restore: Restore, num_positions: int) -> None:
        """Hand over that many leading positions, which have landed, as far as this step has time for it.

        Also if the request was aborted: the scheduler keeps its blocks until the restore has ended. Not
        once a part is stuck, because then the request gives its blocks up before that.
        """
        is_held = self._waits_for(restore) or restore.request.is_finished()
        is_good = not (restore.is_cancelled or restore.was_stuck)
        if not restore.is_whole or self._may_share <= 0:
            num_positions = min(num_positions, restore.num_shared + self._may_share)
        if num_positions > restore.num_shared and is_held and is_good:
            self._may_share -= num_positions - restore.num_shared
            restore.num_shared = num_positions
            self._engine.share(restore.request, (restore.first + num_positions) * self._block_size)

    def _has_landed(self, restore: Restore) -> bool:
        """Whether it has ended, and is neither handed over yet nor has its request gone on."""
        return self._landed.get(restore.request.request_id) is restore and self._waits_for(restore)

    def _waits_for(self, restore: Restore) -> bool:
        """Whether its request waits for a restore, or for the step after it."""
        return self._engine.state(restore.request) is State.WAITS_FOR_KV
