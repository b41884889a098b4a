"""A random workload that goes where connectors break."""

import random
from typing import Any, NamedTuple

from vllm.v1.request import Request, RequestStatus

from offload.testing.virtual.engine import VOCABULARY, VirtualEngine
from offload.testing.virtual.resizes import note_size, resize, shrink

_SALTS = (None, None, "tenant")
_HINTS: tuple[dict[str, Any], ...] = (
    {"cpu_offload_store": False},
    {"cpu_offload_load": False},
    {"cpu_offload_keep": False},
    {"cpu_offload_priority": "low"},
    {"cpu_offload_priority": "high"},
    {"cpu_offload_priority": "high", "cpu_offload_ttl_seconds": 20},
    {"cpu_offload_ttl_seconds": 20},
    {"cpu_offload_pin_seconds": 40},
    {"max_load_tokens": 9},
    {"max_offload_tokens": 30},
)
_WEATHER = (0.05, 0.2, 0.5, 1.5)
"""Requests arriving per step; one of these blows for a while."""

_REMEMBERED = 16
"""Conversations that may come back."""


class _Conversation(NamedTuple):
    tokens: list[int]
    salt: str | None


class Workload:
    """Sends, aborts and resets; ``turn`` is one step of the engine and what happens around it."""

    def __init__(self, engine: VirtualEngine, rng: random.Random, *, resets: bool = True) -> None:
        self._engine = engine
        self._rng = rng
        self._resets = resets
        self._live: list[Request] = []
        self._past: list[_Conversation] = []
        self._rate = 0.5
        self._abort_rate = rng.choice([0.0, 0.02, 0.1])

    def move_to(self, engine: VirtualEngine) -> None:
        """The engine was killed, and another has taken its place: what was asked may be asked again."""
        engine.runner.drafter.follow(self._engine.runner.drafter)
        self._engine = engine
        self._live = []

    def ask_as(self, other: "Workload") -> None:
        """What comes back may be what the other one has asked, and the reverse: engines stand beside."""
        if other is not self:
            self._past = other._past
            self._engine.runner.drafter.stand_beside(other._engine.runner.drafter)

    def turn(self) -> None:
        """Let things happen, then step the engine once."""
        rng, engine = self._rng, self._engine
        if rng.random() < 0.02:
            self._rate = rng.choice(_WEATHER)
        self._retire()
        arrivals = int(self._rate) + (rng.random() < self._rate % 1)
        for _ in range(arrivals):
            if len(self._live) < 4 * engine.settings.max_num_seqs:
                self._arrive()
        if rng.random() < self._abort_rate:
            self._abort()
        if self._resets and rng.random() < 0.01:
            self._reset()
        if (resizes := engine.settings.resizes) is not None and rng.random() < resizes.rate:
            resize(engine, rng.random())
            if rng.random() < 0.2:
                shrink(engine)
        if rng.random() < engine.settings.rot_rate:
            engine.rot()
        during = [rng.choice(self._live).request_id] if self._live and rng.random() < self._abort_rate else []
        engine.step(during)
        if resizes is not None:
            note_size(engine)

    def _retire(self) -> None:
        """What has ended may be continued, repeated or diverged from, soon or much later."""
        rng = self._rng
        for request in [request for request in self._live if request.is_finished()]:
            self._live.remove(request)
            ended = _Conversation(list(request.all_token_ids), request.cache_salt)
            if len(self._past) < _REMEMBERED:
                self._past.append(ended)
            elif rng.random() < 0.3:
                self._past[rng.randrange(_REMEMBERED)] = ended

    def _arrive(self) -> None:
        rng, engine = self._rng, self._engine
        prompt, salt = self._draw_prompt()
        hints = None
        if rng.random() < 0.05:
            hints = rng.choice(_HINTS)
        for _ in range(rng.choice([1, 1, 1, 1, 2, 4])):
            room = engine.settings.longest - len(prompt)
            max_tokens = min(room, rng.choice([1, 2, 5, 12, 30]))
            priority = rng.randint(0, 3)
            if engine.settings.fleet and len(prompt) % 2:
                hints = {**(hints or {}), "do_remote_decode": True}
            hints = self._with_reference(prompt, hints)
            request = engine.add(prompt, max_tokens, priority=priority, salt=salt, hints=hints)
            self._live.append(request)

    def _with_reference(self, prompt: list[int], hints: dict[str, Any] | None) -> dict[str, Any] | None:
        """What ``kv_transfer_params`` say of that prompt beside these hints. Without others: nothing."""
        return hints

    def _abort(self) -> None:
        """Any request; with some preference for those whose KV is on its way."""
        loading = [req for req in self._live if req.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        victims = loading if loading and self._rng.random() < 0.5 else self._live
        if victims:
            self._engine.abort(self._rng.choice(victims).request_id)

    def _draw_prompt(self) -> _Conversation:
        rng = self._rng
        longest = self._engine.settings.longest - 1
        tokens: list[int] = []
        salt = rng.choice(_SALTS)
        if self._past and rng.random() < 0.8:
            tokens, salt = rng.choice(self._past)
            if rng.random() < 0.3:
                tokens = tokens[: rng.randint(1, len(tokens))]
            if rng.random() < 0.1:
                salt = rng.choice(_SALTS)
        longest_tail = rng.choice([0, 1, 3, longest // 4, longest])
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, longest_tail))]
        prompt = (tokens + tail)[:longest] or [rng.randrange(VOCABULARY)]
        return _Conversation(prompt, salt)

    def _reset(self) -> None:
        rng, engine = self._rng, self._engine
        if rng.random() < 0.5:
            engine.flush()
        running = engine.can_reset_running()
        connector, running = rng.random() < 0.7, running and rng.random() < 0.7
        version = random.Random(engine.history.step).choice([None, "A", "B"])
        if connector and version is not None:
            engine.load_weights(version, running=running)
        else:
            engine.reset(connector=connector, running=running)
