"""The flow from peers into the pool: what they have is fetched while they still compute the rest."""

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any

from allocator import StorePlan
from offload.messages import BROKEN, Order
from offload.peer_messages import Unused
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import COMING, Offer
from offload.scheduler.tiers.fetch import NO_WISH, Fetch, Wish
from offload.scheduler.tiers.names import Path
from offload.scheduler.tiers.peer_wish import PeerWish, wish_of
from offload.scheduler.tiers.peers import PeerDirectory
from offload.scheduler.tiers.probes import WAIT_SECONDS
from offload.scheduler.tiers.shared import SharedReading
from offload.scheduler.tiers.siblings import SiblingFetches

_AGAIN = 1 / 8
"""Of the time since the last progress: then a peer is asked again whether there is more."""
_SOONEST, _LATEST = 0.005, 0.050
"""Seconds between two such questions, while few requests have any."""
_FEW = 8
_LOOKS = 64
"""Requests that a step looks at: others have their turn in the next ones, or when they are offered."""


class PeerFetches(SiblingFetches):
    """Brings what peers have of a request into the pool, as far as they have it, while the request waits.

    A request may say which peer has it, or will soon, and how far. What that peer has is fetched at once, and
    the rest as it comes. Of other requests all peers are asked, once. A request waits while there is
    progress: the peer has more than before, or the pool has. Without any it waits no longer than it takes to
    compute what is missing. What has landed by then is used, and the rest is computed.

    As long as nothing has changed for a request it is answered at once. A fetch has all the room it needs
    when it begins, so none waits for another. What a job brings before it falls short is used.
    """

    _directory: PeerDirectory

    def __init__(self, *arguments: Any, peer_wait_seconds: float = 0.0, **keywords: Any) -> None:
        """As ``Fetches``, with a ``PeerDirectory``, and ``peer_wait_seconds`` as ``FleetConfig`` has it."""
        super().__init__(*arguments, **keywords)
        self._peer_wait_seconds = peer_wait_seconds
        columns = max(self._grid.columns, 1)
        self._least_positions = max(
            1, min(self._grid.positions, self._common.slots_in(self._pool_share) // columns // 4)
        )
        self._quests: dict[str, PeerWish] = {}  # by request: of what may still come
        self._num_changes = 0
        self._begun: PeerWish | None = None  # for which something is begun to be fetched
        self._chains: dict[int, Sequence[bytes]] = {}  # of plans in flight
        self._num_good: dict[int, int] = {}  # of plans that fell short: leading blocks

    def arrived(self, request: Request, hints: RequestHints) -> None:
        """Ask for it, and fetch ahead while what others were fetched ahead for leaves room."""
        if hints.max_load_tokens is None:
            wish = self._begin_wish(request, 0, hints)
            if wish is not None:
                self._go_on(wish, self._common.clock())

    def offer(self, request: Request, num_local: int, hints: RequestHints) -> Offer | None:
        """It waits while something may come that is worth it. Then it goes on with what has come."""
        request_id, now = request.request_id, self._common.clock()
        if self._wishes.get(request_id) is NO_WISH:
            return None
        first = num_local // self._common.block_size
        wish = self._quests.get(request_id) or self._begin_wish(request, first, hints)
        if wish is None:
            return None
        self._note_answers()
        if not wish.has_asked or first > wish.first:
            self._begins_to_wait(wish, first, now)
        if wish.seen != self._num_changes or now >= wish.due:
            self._go_on(wish, now)
        if wish.is_done or not self._may_come(wish, now):
            self._over(wish)
            return None
        if wish.is_coming and not wish.grows:
            return self._coming_to(wish.chain, first, wish.target)
        return COMING

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        now = self._common.clock()
        self._note_answers()
        changed = (
            wish for wish in self._quests.values() if wish.seen != self._num_changes or now >= wish.due
        )
        for wish in list(islice(changed, _LOOKS)):
            self._go_on(wish, now)
            if wish.is_done:
                self._over(wish)
            else:  # behind those that the next step looks at
                self._quests[wish.request.request_id] = self._quests.pop(wish.request.request_id)
        self._directory.tidy()
        orders, self._orders = self._orders, []
        return orders

    def advance(self, job: Job[Fetch], progress: Progress) -> None:
        fetch = job.task
        is_kept = progress.fell_short and not (progress.gave_up or job.given_up or fetch.is_dropped)
        if is_kept and fetch.plan.bag is None and not fetch.is_over:
            good = fetch.starts[job.job_id] + job.num_good
            before = self._num_good.get(fetch.plan.plan_id, good)
            self._num_good[fetch.plan.plan_id] = min(before, good)
            progress = progress._replace(fell_short=False)  # what is before that may still be had
        super().advance(job, progress)
        self._num_changes += 1

    def finish(self, request: Request) -> list[Order]:
        wish = self._quests.get(request.request_id)
        if wish is not None:
            self._over(wish, is_wanted=False)
        return super().finish(request)

    def reset(self) -> list[int]:
        jobs = super().reset()
        for wish in list(self._quests.values()):
            wish.reason = Unused.OTHER_WEIGHTS
            self._over(wish)
        self._num_changes += 1
        return jobs

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self._directory.has_news

    def check_invariants(self) -> None:
        """Nobody waits for what is over, or for ever."""
        super().check_invariants()
        in_flight = {job.task.plan.plan_id for job in self._common.ledger.of(self)}
        assert self._chains.keys() == in_flight, f"{self._chains.keys()} are known, {in_flight} in flight"
        assert self._num_good.keys() <= in_flight, f"{self._num_good} fell short, {in_flight} are in flight"
        for request_id, wish in self._quests.items():
            assert wish.request.request_id == request_id, f"{wish} is filed under {request_id}"
            assert self._wishes.get(request_id) not in (None, NO_WISH), f"{wish} is over, and may come"
            assert wish.until < inf or not wish.has_asked, f"{wish} waits for ever"

    def left_over(self) -> dict[str, object]:
        more = {"requests that wait for peers": list(self._quests), "plans": list(self._chains)}
        return super().left_over() | more

    # Private

    def _begin_wish(self, request: Request, first: int, hints: RequestHints) -> PeerWish | None:
        """What it wants; None: nothing that peers have."""
        common, request_id, directory = self._common, request.request_id, self._directory
        chain, size = common.engine.chain(request), common.block_size
        params = common.engine.transfer_params(request)
        limit = (request.num_tokens - 1) // size if self._has_bags else len(chain)
        if hints.max_load_tokens is not None:
            limit = min(limit, first + hints.max_load_tokens // size)
        wish = wish_of(request, chain, max(0, min(limit, len(chain))), params, size)
        if params.peer is not None and directory.is_over:
            wish.reason = Unused.OTHER_WEIGHTS
        if wish.reason:
            common.notes.not_fetched(request_id, f"peer {params.peer}", limit, wish.reason)
            self._count_unused(wish.reason)
            wish.forget_reference()
        is_wanted = wish.chain and not directory.is_over
        if not is_wanted or (wish.life is None and directory.is_alone(request_id)):
            self._wishes[request_id] = NO_WISH
            return None
        self._wishes[request_id] = Wish(len(wish.chain), -1)
        self._quests[request_id] = wish
        return wish

    def _note_answers(self) -> None:
        """Requests whose questions were answered are looked at again."""
        for request_id in self._directory.answered():
            if request_id in self._quests:
                self._quests[request_id].seen = -1

    def _begins_to_wait(self, wish: PeerWish, first: int, now: float) -> None:
        """Its turn has come, or the GPU has more than before."""
        self._has_asked(wish.request.request_id)
        wish.first, wish.seen, is_new = first, -1, not wish.has_asked
        wish.has_asked = True
        if is_new and wish.until == inf:
            self._wait_on(wish, now)
        elif is_new:
            wish.until = max(wish.until, now + WAIT_SECONDS)

    def _wait_on(self, wish: PeerWish, now: float) -> None:
        """There was progress, or it begins to wait."""
        wish.since = now
        least = WAIT_SECONDS if wish.life is None else max(WAIT_SECONDS, self._peer_wait_seconds)
        wish.until = now + wish.seconds(self._common.costs.prefill, self._common.block_size, least)

    def _may_come(self, wish: PeerWish, now: float) -> bool:
        """Whether something may come that its request is to wait for."""
        if wish.first >= len(wish.sought):
            return False
        if now >= wish.until:
            return self._takes_what_there_is(wish, now)
        if wish.is_coming or wish.grows or wish.is_blocked:
            return True
        is_open = wish.answered_at == -inf and not wish.reason
        return is_open and self._directory.is_asked(wish.life, wish.sought)

    def _takes_what_there_is(self, wish: PeerWish, now: float) -> bool:
        """No more is waited for. A checkpoint before the last is fetched now."""
        if not (self._has_bags and wish.grows and wish.known > max(wish.there, wish.tried)):
            return False
        wish.goal = wish.known
        self._wait_on(wish, now)
        self._fetch(wish)
        return wish.is_coming

    def _go_on(self, wish: PeerWish, now: float) -> None:
        """Note what has come, fetch what is there, ask whether there is more."""
        wish.seen, wish.due = self._num_changes, inf
        self._take_answer(wish)
        chain, allocator = wish.chain, self._common.allocator
        depth = allocator.resident_depth(chain)
        if self._has_bags:
            depth = allocator.usable_depth(chain, len(chain))
        wish.there = max(depth, wish.first)
        if max(wish.there, wish.known) > wish.best:
            wish.gap = max(wish.gap, now - wish.since if wish.best else 0.0)
            wish.best = max(wish.there, wish.known)
            self._wait_on(wish, now)
        awaited = wish.tried - 1 if self._has_bags else wish.there
        wish.is_coming = 0 <= awaited < len(chain) and chain[awaited] in self._coming
        if not (wish.is_coming or wish.is_done or wish.reason):
            self._fetch(wish)
        if wish.is_blocked:
            wish.due = now + _LATEST
        if wish.grows or (wish.asked_at == -inf == wish.answered_at and not wish.reason):
            self._ask(wish, now)
        if wish.has_asked:
            wish.due = min(wish.due, wish.until)

    def _take_answer(self, wish: PeerWish) -> None:
        """Note what is known of its chain. What was said of a peer may turn out to be void."""
        directory = self._directory
        found = directory.answer(wish.life, wish.sought)
        if wish.life is not None and found.reason and found.at > wish.answered_at:
            self._common.notes.not_fetched(
                wish.request.request_id, f"peer {wish.life.peer}", wish.goal, found.reason
            )
            self._count_unused(found.reason)
            wish.forget_reference()
            if directory.is_alone(wish.request.request_id):
                wish.reason = found.reason
            found = directory.answer(None, wish.sought)
        is_news = found.at > wish.answered_at
        if is_news and (wish.life is not None or wish.asked_at > -inf or directory.is_fresh(found)):
            wish.answered_at, wish.known = found.at, found.depth

    def _ask(self, wish: PeerWish, now: float) -> None:
        """Unless that is being asked, or was just before. The longer it waits, the less often it asks."""
        directory = self._directory
        if directory.is_asked(wish.life, wish.sought):
            return
        often = min(max(_AGAIN * (now - wish.since), _SOONEST), _LATEST)
        again = wish.asked_at + often * max(1.0, len(self._quests) / _FEW)
        start = 0 if self._has_bags else max(wish.there, wish.known)
        if now >= again and start < len(wish.sought):
            wish.asked_at = now
            directory.ask(wish.request.request_id, wish.life, wish.sought, start)
            if directory.is_asked(wish.life, wish.sought):
                return
            again = now + often
        wish.due = min(wish.due, again)

    def _fetch(self, wish: PeerWish) -> None:
        """Open jobs for what the pool lacks of what is there, as far as there is room."""
        common, chain, there = self._common, wish.chain, wish.there
        stop = min(wish.known, len(wish.sought))
        is_more = stop > wish.tried or there > wish.behind
        if stop <= there or not is_more or (self._has_bags and wish.grows):
            return
        num_slots = self._num_slots(chain, stop)
        if not wish.has_asked:
            room = self._common.slots_in(self._pool_share) - self._fetched.num_ahead
            if not self._has_bags:
                stop = min(stop, there + room // self._grid.columns)
                num_slots = self._num_slots(chain, max(stop, there))
            if stop <= there or num_slots > room or common.engine.has(chain[stop - 1]):
                return
        if not (wish.is_worth or self._pays(wish)):
            wish.reason = Unused.CHEAPER_TO_COMPUTE
            return
        wish.is_worth, self._begun = True, wish
        if self._begin(wish.request, chain, stop):
            wish.tried, wish.behind = max(wish.tried, stop), there
            wish.is_coming, wish.is_blocked = True, False
            if not wish.has_asked:
                request_id = wish.request.request_id
                self._ahead[request_id] = self._ahead.get(request_id, 0) + num_slots
                self._fetched.num_ahead += num_slots
        elif self._num_coming:
            wish.is_blocked = True
        else:
            wish.reason = Unused.NO_ROOM

    def _pays(self, wish: PeerWish) -> bool:
        """What a peer was asked to compute need not be long; by what was measured it must be faster."""
        if wish.life is None:
            return self._is_worth(wish.chain, wish.there, wish.first, wish.target)
        num_bytes = self._num_slots(wish.chain, wish.target) * self._common.slot_bytes
        first, stop = wish.there * self._common.block_size, wish.target * self._common.block_size
        least = self._peer_wait_seconds
        return self.breaker.allows and self._pace.is_worth(first, stop, num_bytes, least)

    def _prefix_path(self, chain: Sequence[bytes], stop: int) -> Path:
        return self._grid.path(chain, stop)

    def _read(self, plan: StorePlan, path: Path, first: int, last: int) -> SharedReading:
        assert self._begun is not None, "what is fetched is fetched for somebody"
        self._chains[plan.plan_id] = self._begun.chain
        return super()._read(plan, path, first, last)._replace(life=self._begun.life)

    def _commit(self, fetch: Fetch) -> None:
        """What fell short is used up to where it did, if all before it is there."""
        allocator, plan = self._common.allocator, fetch.plan
        num_good = self._num_good.get(plan.plan_id)
        if num_good is None:
            super()._commit(fetch)
            return
        chain, num_positions = self._chains[plan.plan_id], num_good // self._grid.columns
        if not num_positions or allocator.resident_depth(chain[: plan.start]) < plan.start:
            allocator.abort(plan)
        elif allocator.commit(plan):
            self._common.tokens.keep(plan)
            allocator.drop(chain, plan.start + num_positions)

    def _end(self, job: Job[Fetch]) -> None:
        super()._end(job)
        fetch = job.task
        if job.num_good < job.num_blocks and not fetch.is_dropped:
            hashes = set(fetch.hashes)
            for wish in self._quests.values():
                awaited = wish.tried - 1 if self._has_bags else wish.there
                if 0 <= awaited < len(wish.chain) and wish.chain[awaited] in hashes:
                    said = "" if job.reason == BROKEN else job.reason
                    wish.reason = said or (Unused.NOT_THERE if job.is_sound else Unused.FAILED)
                    self._directory.forget(wish.life, wish.sought)
        if not fetch.num_left:
            del self._chains[fetch.plan.plan_id]
            self._num_good.pop(fetch.plan.plan_id, None)

    def _over(self, wish: PeerWish, *, is_wanted: bool = True) -> None:
        """Nothing more is fetched for it. A peer that keeps something for it need not any longer."""
        request_id = wish.request.request_id
        del self._quests[request_id]
        self._wishes[request_id] = NO_WISH
        self._has_asked(request_id)
        if wish.life is None:
            if is_wanted and wish.known > wish.there:
                reason = wish.reason or self._reason(wish)
                self._common.notes.not_fetched(request_id, self.route.source, wish.known, reason)
            return
        if wish.is_done:
            self._common.metrics.count("received_hand_offs")
        elif is_wanted:
            reason = wish.reason or self._reason(wish)
            self._common.notes.not_fetched(request_id, f"peer {wish.life.peer}", wish.goal, reason)
            self._count_unused(reason)
        self._directory.release(wish.life, wish.tip)

    def _reason(self, wish: PeerWish) -> Unused:
        """Why not all of it has come, as nobody else says why."""
        if wish.is_blocked:
            return Unused.NO_ROOM
        if wish.known >= wish.goal or wish.factor > 1:
            return Unused.LATE
        return Unused.TOO_SHORT if wish.known else Unused.NOT_THERE

    def _count_unused(self, reason: str) -> None:
        self._common.metrics.count("unused_hand_offs", 1, reason)
