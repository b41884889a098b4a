"""One run: users before an engine whose link and GPU have a speed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from benchmarks.engine_replay import ReplayEngine, ReplaySettings, TimeModel
from benchmarks.never_slower.users import BLOCK, Kind, Turn
from offload.testing.copiers.paced import VirtualClock

__all__ = ["ALWAYS", "AUTO", "NEVER", "Machine", "Outcome", "replay"]

TOKEN_BYTES = 128 << 10
DOUBLE_AT = 32_768
"""Tokens before one that make it take twice as long: of a model of 8 billion parameters."""
STEP_SECONDS = 0.010
CHUNK = 2_048
WARM_SECONDS = 60.0

NEVER, ALWAYS, AUTO = "never", "always", "auto"

_FIRST_PART = 16 * 16 // BLOCK  # 32 MiB
_MOST_IDLE_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast things are: the link each way, and tokens at the beginning of a prompt."""

    bytes_per_second: float
    tokens_per_second: float


@dataclass(slots=True)
class Outcome:
    """What came after the first minute.

    Attributes:
        seconds: that passed.
        tokens: of prompts and answers of requests that were answered then.
        ttft: seconds to the first token, of requests that arrived then.
        computed: tokens that were computed, and
        loaded: that were loaded instead.
    """

    seconds: float = 0.0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    computed: int = 0
    loaded: int = 0


def replay(
    mode: str,
    kind: Kind,
    machine: Machine,
    num_requests: int,
    seed: int,
    *,
    overlapped: bool = False,
    store: str = AUTO,
) -> Outcome:
    """Until so many requests were answered after the first minute.

    Args:
        mode: "never": an engine without connector; else what the connector does.
        kind: who asks.
        machine: how fast it is.
        num_requests: to be answered after the first minute.
        seed: of what users ask.
        overlapped: a step is scheduled while the one before it runs.
        store: the connector's setting of that name.

    Raises:
        RuntimeError: the engine steps on and on without computing a token.
    """
    clock = VirtualClock()
    engine = ReplayEngine(
        ReplaySettings(
            connector="none" if mode == NEVER else "offload",
            gpu_blocks=kind.gpu_tokens // BLOCK + 1,
            cpu_blocks=kind.pool_tokens // BLOCK,
            block_size=BLOCK,
            max_num_seqs=64,
            chunk=CHUNK,
            max_model_len=kind.longest,
            watch=False,
            restore=ALWAYS if mode == NEVER else mode,
            store="eager" if mode == NEVER else store,
            time=TimeModel(
                step_seconds=STEP_SECONDS,
                tokens_per_second=machine.tokens_per_second,
                block_bytes=BLOCK * TOKEN_BYTES,
                link_bytes_per_second=machine.bytes_per_second,
                double_at=DOUBLE_AT,
            ),
            clock=clock,
            overlapped=overlapped,
        )
    )
    try:
        if engine.connector is not None:
            engine.connector._scheduler.restores.first_part = _FIRST_PART
        return _Run(engine, clock, kind, seed).until(num_requests)
    finally:
        engine.close()


@dataclass(slots=True)
class _Asked:
    """A request under way: whose, its turn, and when it arrived."""

    user: int
    turn: Turn
    arrival: float


class _Run:
    def __init__(self, engine: ReplayEngine, clock: VirtualClock, kind: Kind, seed: int) -> None:
        self._engine = engine
        self._clock = clock
        rngs = [random.Random(f"{seed} {user}") for user in range(kind.users)]
        self._turns: list[Iterator[Turn]] = [kind.turns(rng, user) for user, rng in enumerate(rngs)]
        # they do not begin all at once
        self._due = [
            (random.Random(f"begin {seed} {user}").uniform(0, 2), user) for user in range(kind.users)
        ]
        heapify(self._due)
        self._next: list[Turn | None] = [None] * kind.users
        self._asked: dict[str, _Asked] = {}
        self._num_asked = 0
        self._outcome = Outcome()
        self._num_answered = 0

    def until(self, num_requests: int) -> Outcome:
        engine, clock, idle_steps = self._engine, self._clock, 0
        begun = math.inf
        while self._num_answered < num_requests:
            self._send()
            if engine.is_idle():
                clock.wait_until(self._due[0][0])
                continue
            is_warm = clock.now >= WARM_SECONDS
            if is_warm and begun == math.inf:
                begun = clock.now
            step = engine.step(self._due[0][0] if self._due else None)
            num_computed = step.output.total_num_scheduled_tokens
            idle_steps = 0 if num_computed else idle_steps + 1
            if idle_steps > _MOST_IDLE_STEPS:
                raise RuntimeError(f"{idle_steps} steps without a token; {len(self._asked)} requests wait")
            if is_warm:
                self._outcome.computed += num_computed
            for answer in step.answers:
                asked = self._asked[answer.request_id]
                if answer.prefill_stats is not None and asked.arrival >= begun:
                    self._outcome.ttft.append(clock.now - asked.arrival)
                    self._outcome.loaded += answer.prefill_stats.num_external_cached_tokens
                if answer.finished:
                    self._answered(answer.request_id, is_warm=is_warm)
        self._outcome.seconds = clock.now - begun
        return self._outcome

    def _send(self) -> None:
        while self._due and self._due[0][0] <= self._clock.now:
            arrival, user = heappop(self._due)
            turn = self._next[user] or next(self._turns[user])
            request_id = f"{user}-{self._num_asked}"
            self._num_asked += 1
            self._asked[request_id] = _Asked(user, turn, arrival)
            self._engine.add(request_id, turn.hashes, turn.num_prompt, turn.num_output, arrival)

    def _answered(self, request_id: str, *, is_warm: bool) -> None:
        asked = self._asked.pop(request_id)
        if is_warm:
            self._outcome.tokens += asked.turn.num_prompt + asked.turn.num_output
            self._num_answered += 1
        self._next[asked.user] = turn = next(self._turns[asked.user])
        heappush(self._due, (self._clock.now + turn.pause, asked.user))
