"""The flow that asks a store what it has. Nobody waits long for an answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from offload.messages import Extents, Names, Order, Part, Route
from offload.peer_messages import PeerLife
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, Step
from offload.scheduler.flow import Job, Progress
from offload.scheduler.tiers.names import places_of

WAIT_SECONDS = 0.020
"""A request waits that long for answers, from its first question on."""

LATE_SECONDS = 1.0
"""A store that has not answered by then hangs. Nobody waits for one that does."""

MOST_QUESTIONS = 64
"""Under way. More are not asked."""

MOST_NAMES = 8192
"""Of one question."""


def _ignore(answer: object) -> None:
    """Nobody wants to know."""


def _extents_of(names: Names) -> Extents:
    num_names = len(names)
    ones, zeros = np.ones(num_names, dtype=np.int64), np.zeros(num_names, dtype=np.int64)
    return Extents(places_of(names), ones, np.arange(num_names + 1), zeros, names, depths=zeros)


@dataclass(slots=True, eq=False)
class Question:
    """A job's task.

    Attributes:
        key: what it is about; it is not asked twice at once.
        since: when it was asked.
        learn: what to do with the answer.
        note: told first why it is not more, where somebody says so.
        requests: those that wait for it.
        is_late: it hangs.
        is_dropped: its answer is not wanted any more.
    """

    key: bytes
    since: float
    learn: Callable[[int], None]
    note: Callable[[str], None]
    requests: set[str] = field(default_factory=set)
    is_late: bool = False
    is_dropped: bool = False


class Probes:
    """Asks for names, and hears how many there are. A request waits a moment, altogether.

    What comes later is of use to the next request. When the store hangs, or fails again and again, nobody
    waits, and a single question is asked now and then.
    """

    def __init__(self, route: Route, common: Common, *, wait_seconds: float = WAIT_SECONDS) -> None:
        """Begin with no question. ``route``: from the store to the scheduler."""
        self.route = route
        self.breaker = CircuitBreaker(f"questions to the {route.source} tier", common.clock)
        self._common = common
        self._wait_seconds = wait_seconds
        self._orders: list[Order] = []
        self._open: dict[bytes, Job[Question]] = {}  # by key
        self._since: dict[str, float] = {}  # of requests that have asked: their first question
        self._answered: list[str] = []

    def ask(
        self,
        request_id: str,
        key: bytes,
        names: Names,
        learn: Callable[[int], None],
        *,
        suffix: bytes,
        is_last_wanted: bool = False,
        life: PeerLife | None = None,
        note: Callable[[str], None] = _ignore,
    ) -> bool:
        """Ask, if nobody else has. Returns whether that request is to wait for the answer.

        Args:
            request_id: who asks.
            key: what it is about.
            names: of extents, ``uint8[n, 32]``, ``MOST_NAMES`` at most.
            learn: called with the answer.
            suffix: see ``Extents``.
            is_last_wanted: the same.
            life: the same.
            note: called before that where a peer says why it has no more; see ``Unused``.
        """
        now = self._common.clock()
        until = self._since.setdefault(request_id, now) + self._wait_seconds
        job = self._open.get(key)
        if job is None:
            if not self.breaker.allows or len(self._open) >= MOST_QUESTIONS:
                return False
            extents = _extents_of(names)._replace(suffix=suffix, is_last_wanted=is_last_wanted, life=life)
            job = self._begin(Question(key, now, learn, note), extents)
        job.task.requests.add(request_id)
        return now < until and not self.breaker.is_outage

    def is_asked(self, key: bytes) -> bool:
        """Whether a question about that is under way."""
        return key in self._open

    def release(self, key: bytes, names: Names, life: PeerLife) -> bool:
        """Tell a peer that what leads to these names is not needed any more. Returns whether that is done."""
        if key in self._open or not self.breaker.allows or len(self._open) >= MOST_QUESTIONS:
            return False
        extents = _extents_of(names)._replace(life=life, is_release=True)
        self._begin(Question(key, self._common.clock(), _ignore, _ignore), extents)
        return True

    def answered(self) -> list[str]:
        """Requests whose questions were answered since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        late = self._common.clock() - max(LATE_SECONDS, self._wait_seconds)
        for job in self._open.values():
            if job.task.since > late:
                break
            self._hangs(job)
        orders, self._orders = self._orders, []
        return orders

    def advance(self, job: Job[Question], progress: Progress) -> None:
        question = job.task
        if progress.gave_up:
            self._hangs(job)
        if not progress.ended:
            return
        if self._open.get(question.key) is job:
            del self._open[question.key]
        if question.is_dropped:
            self.breaker.dismissed(job.job_id)
            return
        self._answered += question.requests
        if job.is_sound:
            self._common.metrics.count("route_probed_extents", job.num_blocks, self.route)
            self._common.metrics.count("route_found_extents", job.num_good, self.route)
            if job.reason:
                question.note(job.reason)
            question.learn(job.num_good)
            self.breaker.succeeded(job.job_id)
            return
        for request_id in question.requests & self._since.keys():
            self._since[request_id] = -inf  # it does not wait for another
        if not question.is_late:
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id)

    def finish(self, request: Request) -> list[Order]:
        self._since.pop(request.request_id, None)
        return []

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """Nothing of adapters is asked for."""
        return []

    def reset(self) -> list[int]:
        """What the store has of other weights is of no use."""
        self._open.clear()
        return self._common.drop_jobs(self)

    @property
    def is_busy(self) -> bool:
        return bool(self._orders)

    @property
    def num_pins(self) -> int:
        return 0

    def check_invariants(self) -> None:
        """What is asked is in flight, and not too much of it."""
        jobs = {id(job) for job in self._common.ledger.of(self) if not job.task.is_dropped}
        assert {id(job) for job in self._open.values()} == jobs, f"{list(self._open.values())} are asked"
        assert len(self._open) <= MOST_QUESTIONS, f"{len(self._open)} questions at once"
        for key, job in self._open.items():
            assert job.task.key == key, f"{job} is filed under {key!r}"

    def left_over(self) -> dict[str, object]:
        return {"questions": list(self._open), "requests that have asked": list(self._since)}

    # Private

    def _begin(self, question: Question, extents: Extents) -> Job[Question]:
        num_names = len(extents.places)
        assert 0 < num_names <= MOST_NAMES, f"{num_names} names in a question"
        job = self._common.ledger.open(self, question, num_names)
        self.breaker.began(job.job_id)
        self._open[question.key] = job
        part = Part(job.job_id, 0, num_names)
        self._orders.append(Order(self.route, [part], extents.places, extents.places, None, None, extents))
        return job

    def _hangs(self, job: Job[Question]) -> None:
        if not job.task.is_late and not job.task.is_dropped:
            job.task.is_late = True  # the engine need not step on for it
            self._common.ledger.report(job.job_id, 0, job.num_blocks, given_up=True, is_sound=True)
            self._common.count_failed(self.route)
            self.breaker.failed(job.job_id, hangs=True)
