"""Requests go where their prefix is, as long as that engine has not much more to do than others."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from offload.proxy.policies import Engine, Fleet, LeastLoad, Request, Route, least

__all__ = ["PrefixPolicy", "PrefixTextPolicy", "Sources", "Tree"]

_FACTOR, _SPARE_REQUESTS, _SPARE_TOKENS = 2, 8, 32_768
"""An engine may have so many times the least load, and so much more, and is chosen for its prefix."""


class Tree(Protocol):
    """Answers how much of a prompt engines have: an index, or the engines themselves."""

    async def depths(
        self, token_ids: Sequence[int], request: Request, urls: Sequence[str]
    ) -> Mapping[str, int]:
        """Leading tokens that engines have, by URL; of those that it knows nothing of, nothing."""
        ...


class Sources(NamedTuple):
    """What a policy may ask the proxy. One with a method ``attach(sources)`` is given it at the start.

    Attributes:
        token_ids: of a prompt; None: they are not to be had within ``--tokenize-seconds``.
        depths: leading tokens that engines have had, by URL, as far as the proxy remembers.
        trees: of engines that tell by events, by ``--kv-events``; of those that can be asked, by ``--fleet``.
    """

    token_ids: Callable[[Request], Awaitable[Sequence[int] | None]]
    depths: Callable[[Request], Mapping[str, int]]
    trees: Sequence[Tree] = ()


class PrefixPolicy:
    """By token ids. Without them, in time, by the least load. O(engines), and O(tokens) for the prefix.

    Args:
        trees: asked before what the proxy remembers, in order; the first that knows an engine is believed.
    """

    by_tokens = True

    def __init__(self, trees: Sequence[Tree] = ()) -> None:
        self._trees = trees
        self._fallback = LeastLoad()
        self._sources: Sources | None = None
        self._num_chosen = 0

    def attach(self, sources: Sources) -> None:
        """From now on these are asked."""
        self._sources = sources
        self._trees = (*self._trees, *sources.trees)

    async def choose(self, request: Request, fleet: Fleet) -> Route:
        if self._sources is None:
            return self._fallback.choose(request, fleet)
        if self.by_tokens:
            ids = await self._sources.token_ids(request)
            if ids is None:
                return self._fallback.choose(request, fleet)
            request = request._replace(token_ids=ids, num_tokens=len(ids))
        depths = dict(self._sources.depths(request))
        if request.token_ids is not None and self._trees:
            urls = [each.url for each in (*fleet.prefill, *fleet.decode)]
            asked = [tree.depths(request.token_ids, request, urls) for tree in self._trees]
            for told in reversed(await asyncio.gather(*asked, return_exceptions=True)):
                if not isinstance(told, BaseException):
                    depths.update(told)
        self._num_chosen += 1
        prefill = self._nearest(
            fleet.prefill, [each.prompt_tokens for each in fleet.prefill], depths, _SPARE_TOKENS
        )
        decode = self._nearest(fleet.decode, [each.running for each in fleet.decode], depths, _SPARE_REQUESTS)
        assert decode is not None
        return Route(prefill, decode)

    def _nearest(
        self, engines: Sequence[Engine], loads: Sequence[int], depths: Mapping[str, int], spare: int
    ) -> Engine | None:
        """The engine that has most of the prompt, of those with no load far beyond the least."""
        if not engines:
            return None
        limit = _FACTOR * min(loads) + spare
        near = [(each, load) for each, load in zip(engines, loads, strict=True) if load <= limit]
        deepest = max(depths.get(each.url, 0) for each, _ in near)
        best = [(each, load) for each, load in near if depths.get(each.url, 0) == deepest]
        return least([each for each, _ in best], [load for _, load in best], self._num_chosen)


class PrefixTextPolicy(PrefixPolicy):
    """By the text, where a request comes as text: nobody tokenizes. It misses what templates add."""

    by_tokens = False
