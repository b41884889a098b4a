"""The proxy's policies over a simulated fleet, called as the proxy calls them, with what it gives them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allocator import Event
from benchmarks.fleet.engines import Asked, FleetEngine
from benchmarks.fleet.trees import EngineTrees, EventIndex, deep_bytes
from offload.observe.trace import IDS_BLOCK_TOKENS
from offload.proxy.history import History
from offload.proxy.policies import Engine, Fleet, LeastLoad, Policy, Request, RoundRobin
from offload.proxy.prefixes import PrefixPolicy, Sources
from offload.proxy.settings import ProxySettings

__all__ = ["POLICIES", "PolicyChooser", "chooser_of"]

POLICIES = ("round_robin", "least_load", "prefix", "trees", "events")
"""See `benchmarks.fleet`."""


class _Parts(NamedTuple):
    """A policy, and what it looks into."""

    policy: Policy
    history: History | None = None
    index: EventIndex | None = None


class PolicyChooser:
    """Gives requests to engines, all of them of both roles, as a policy says.

    Args:
        parts: the policy and what belongs to it.
        engines: of the fleet.

    Attributes:
        spent_ns: of this thread's processor, by the policy, for each request.
        told_ns: the same to take in what engines publish, all together.
        num_events: how many of these there were.
    """

    def __init__(self, parts: _Parts, engines: Sequence[FleetEngine]) -> None:
        self._policy, self._history, self._index = parts
        self._engines = engines
        self._running = [0] * len(engines)
        self._prompt_tokens = [0] * len(engines)
        self._numbers = {engine.name: number for number, engine in enumerate(engines)}
        self.spent_ns: list[int] = []
        self.told_ns = 0
        self.num_events = 0

    async def choose(self, asked: Asked) -> int:
        """See ``Chooser``, here and below."""
        request = _request_of(asked, has_ids=isinstance(self._policy, PrefixPolicy))
        states = zip(self._engines, self._running, self._prompt_tokens, strict=True)
        fleet = Fleet((), [Engine(each.name, "both", running, tokens) for each, running, tokens in states])
        began = time.thread_time_ns()
        route = self._policy.choose(request, fleet)
        if inspect.isawaitable(route):
            route = await route
        self.spent_ns.append(time.thread_time_ns() - began)
        number = self._numbers[route.decode.url]
        self._running[number] += 1
        self._prompt_tokens[number] += asked.num_prompt
        return number

    def began(self, asked: Asked, engine: int) -> None:
        self._prompt_tokens[engine] -= asked.num_prompt

    def ended(self, asked: Asked, engine: int) -> None:
        self._running[engine] -= 1
        if self._history is not None:
            self._history.add(_request_of(asked, has_ids=True), self._engines[engine].name)

    def told(self, engine: int, events: Sequence[Event]) -> None:
        if self._index is not None:
            began = time.thread_time_ns()
            self._index.take(engine, events)
            self.told_ns += time.thread_time_ns() - began
            self.num_events += len(events)

    def num_bytes(self) -> int:
        """What the policy, and the proxy for it, keep."""
        kept = self._history if self._history is not None else self._index
        return 0 if kept is None else deep_bytes(kept)


def chooser_of(name: str, engines: Sequence[FleetEngine]) -> PolicyChooser:
    """What a policy of ``POLICIES`` needs over these engines."""
    if name == "round_robin":
        return PolicyChooser(_Parts(RoundRobin()), engines)
    if name == "least_load":
        return PolicyChooser(_Parts(LeastLoad()), engines)
    history = index = None
    if name == "prefix":
        policy, history = PrefixPolicy(), History(_default("history_tokens"))
        policy.attach(Sources(_ids, history.depths))
    else:
        index = EventIndex([each.name for each in engines]) if name == "events" else None
        policy = PrefixPolicy([index if index is not None else EngineTrees(engines)])
        policy.attach(Sources(_ids, lambda request: {}))
    return PolicyChooser(_Parts(policy, history, index), engines)


async def _ids(request: Request) -> Sequence[int] | None:
    """Clients send token ids, so nobody tokenizes."""
    return request.token_ids


def _request_of(asked: Asked, has_ids: bool) -> Request:
    """Token ids stand for blocks: equal blocks have equal ones. What is behind the last block has none."""
    ids: list[int] | None = None
    if has_ids:
        numbers = np.array([int.from_bytes(each[-6:]) for each in asked.chain], dtype=np.int64)
        ids = (numbers[:, None] * IDS_BLOCK_TOKENS + np.arange(IDS_BLOCK_TOKENS)).ravel().tolist()
    body: dict[str, object] = {"chain": asked.chain}
    return Request("/v1/completions", "model", asked.num_prompt, ids, (), body, None)


def _default(name: str) -> int:
    return int(ProxySettings.__dataclass_fields__[name].default)
