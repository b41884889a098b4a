"""Where a prefix is: the engines' trees themselves, or an index of what they publish."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from allocator import Event, Evicted, Stored
from benchmarks.fleet.engines import FleetEngine
from offload.observe.trace import IDS_BLOCK_TOKENS
from offload.proxy.policies import Request

__all__ = ["EngineTrees", "EventIndex", "deep_bytes"]


class EngineTrees:
    """Asks each engine for the depth of a chain in its tree, as it is now. O(engines log n).

    An engine would hash the token ids; here the request has the chain with it.
    """

    def __init__(self, engines: Sequence[FleetEngine]) -> None:
        self._engines = {each.name: each for each in engines}

    async def depths(
        self, token_ids: Sequence[int], request: Request, urls: Sequence[str]
    ) -> Mapping[str, int]:
        """See ``offload.proxy.prefixes.Tree``."""
        chain: Any = request.body["chain"]
        return {url: self._engines[url].allocator.resident_depth(chain) * IDS_BLOCK_TOKENS for url in urls}


class EventIndex:
    """For each prefix hash a bit per engine that has it, as engines have told. O(depth) to look up."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._engines: dict[bytes, int] = {}

    async def depths(
        self, token_ids: Sequence[int], request: Request, urls: Sequence[str]
    ) -> Mapping[str, int]:
        """See ``offload.proxy.prefixes.Tree``."""
        chain: Any = request.body["chain"]
        told: dict[str, int] = {}
        alive = (1 << len(self._urls)) - 1
        depth = 0
        for depth, name in enumerate(chain):
            here = self._engines.get(name, 0) & alive
            self._note(told, alive & ~here, depth)
            alive = here
            if not alive:
                return told
        self._note(told, alive, depth + 1)
        return told

    def take(self, engine: int, events: Sequence[Event]) -> None:
        """What an engine has published. O(blocks)."""
        bit = 1 << engine
        for event in events:
            if isinstance(event, Stored):
                for name in event.hashes:
                    self._engines[name] = self._engines.get(name, 0) | bit
            elif isinstance(event, Evicted):
                for name in event.hashes:
                    left = self._engines.get(name, 0) & ~bit
                    if left:
                        self._engines[name] = left
                    else:
                        self._engines.pop(name, None)

    def _note(self, told: dict[str, int], engines: int, depth: int) -> None:
        while depth and engines:
            lowest = engines & -engines
            told[self._urls[lowest.bit_length() - 1]] = depth * IDS_BLOCK_TOKENS
            engines ^= lowest


def deep_bytes(kept: object) -> int:
    """Bytes of an object and all that it has, each once. O(objects)."""
    seen: set[int] = set()
    stack, total = [kept], 0
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            stack += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set):
            stack += each
        elif hasattr(each, "__dict__"):
            stack.append(vars(each))
    return total
