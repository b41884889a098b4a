"""A random workload that goes where connectors break."""

import random

from vllm.v1.request import Request

from offload.vllm.virtual.engine import VOCABULARY, VirtualEngine

_SALTS = (None, None, None, "tenant-a", "tenant-b")
_WEATHER = (0.05, 0.2, 0.5, 1.5)
"""Requests arriving per step; one of these blows for a while."""


class Workload:
    """Sends, aborts and resets; ``turn`` is one step of the engine and what happens around it."""

    def __init__(self, engine: VirtualEngine, rng: random.Random, *, resets: bool = True) -> None:
        self._engine = engine
        self._rng = rng
        self._resets = resets
        self._live: list[Request] = []
        self._past: list[list[int]] = []
        self._rate = 0.5
        self._abort_rate = rng.choice([0.0, 0.02, 0.1])

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
        if self._live and rng.random() < self._abort_rate:
            engine.abort(rng.choice(self._live).request_id)
        if self._resets and rng.random() < 0.01:
            self._reset()
        during = [rng.choice(self._live).request_id] if self._live and rng.random() < self._abort_rate else []
        engine.step(during)

    def _retire(self) -> None:
        for request in [request for request in self._live if request.is_finished()]:
            self._live.remove(request)
            self._past.append(list(request.all_token_ids))
        del self._past[:-24]

    def _arrive(self) -> None:
        rng, engine = self._rng, self._engine
        prompt = self._draw_prompt()
        salt = rng.choice(_SALTS)
        hints = None
        if rng.random() < 0.05:
            hints = {rng.choice(["cpu_offload_store", "cpu_offload_load"]): False}
        for _ in range(rng.choice([1, 1, 1, 1, 2, 4])):
            room = engine.settings.longest - len(prompt)
            max_tokens = min(room, rng.choice([1, 2, 5, 12, 30]))
            priority = rng.randint(0, 3)
            request = engine.add(prompt, max_tokens, priority=priority, salt=salt, hints=hints)
            self._live.append(request)

    def _draw_prompt(self) -> list[int]:
        rng = self._rng
        longest = self._engine.settings.longest - 1
        old = list(rng.choice(self._past)) if self._past and rng.random() < 0.7 else []
        if old and rng.random() < 0.5:
            del old[rng.randint(1, len(old)) :]
        tail = rng.choice([0, 1, 3, longest // 4, longest])
        prompt = old + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, tail))]
        return prompt[:longest] or [rng.randrange(VOCABULARY)]

    def _reset(self) -> None:
        rng, engine = self._rng, self._engine
        if rng.random() < 0.5:
            engine.flush()
        running = engine.can_reset_running()
        engine.reset(connector=rng.random() < 0.7, running=running and rng.random() < 0.7)
