"""A workload of followers: requests that leave a chain near its end while it is being restored."""

import random

from vllm.v1.request import Request, RequestStatus

from offload.testing.virtual.engine import VOCABULARY, VirtualEngine

_LATE_ENOUGH = 3
"""Blocks before the end of what is restored, at most, where a follower leaves."""

_AT_ONCE = 6
"""Requests at a time, at most."""


class Leavers:
    """Asks for long documents again; while one is restored, sends followers that leave it near its end.

    That splits segments whose slots are promised to a load, while others ask for slots.
    """

    def __init__(self, engine: VirtualEngine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._live: list[Request] = []
        longest = engine.settings.longest
        self._documents = [self._draw(longest * 2 // 5) for _ in range(2)]
        self._abort_rate = rng.choice([0.0, 0.0, 0.05])

    def move_to(self, engine: VirtualEngine) -> None:
        """The engine was killed, and another has taken its place: what was asked may be asked again."""
        engine.runner.drafter.follow(self._engine.runner.drafter)
        self._engine = engine
        self._live = []

    def turn(self) -> None:
        """Let things happen, then step the engine once."""
        rng, engine = self._rng, self._engine
        self._live = [request for request in self._live if not request.is_finished()]
        loading = [
            request for request in self._live if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        if not self._live:
            engine.reset(connector=False)  # what the GPU still has is not restored
            self._send(rng.choice(self._documents))
        elif len(self._live) < _AT_ONCE:
            if loading and rng.random() < 0.5:
                self._follow(rng.choice(loading))
            elif rng.random() < 0.3:
                self._send(self._draw(rng.randint(1, engine.settings.longest // 3)))
        if self._live and rng.random() < self._abort_rate:
            engine.abort(rng.choice(self._live).request_id)
        if rng.random() < engine.settings.rot_rate:
            engine.rot()
        engine.step()

    def _follow(self, leader: Request) -> None:
        size = self._engine.settings.block_tokens
        num_shared = leader.num_computed_tokens // size - self._rng.randint(1, _LATE_ENOUGH)
        prompt = list(leader.all_token_ids[: max(num_shared, 0) * size]) + self._draw(size)
        self._send(prompt, {"cpu_offload_load": False} if self._rng.random() < 0.7 else None)

    def _send(self, prompt: list[int], hints: dict[str, bool] | None = None) -> None:
        self._live.append(self._engine.add(prompt, 1, hints=hints))

    def _draw(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(max(num_tokens, 1))]
