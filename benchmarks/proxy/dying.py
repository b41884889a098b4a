"""One of two prefill engines dies, and requests go on coming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from offload.testing.proxies import ProxyProcess
from offload.testing.upstream import Upstream, answer, encode

__all__ = ["answered_after_a_death"]

_TOKENS = 16
_AT_A_TIME = 8


async def answered_after_a_death(
    name: str, start: Callable[[Sequence[str], Sequence[str]], ProxyProcess], requests: int
) -> dict[str, Any]:
    """The share of requests that a proxy answers whole after one of two prefill engines has died.

    Engines in memory answer, so it is known which tokens are right.
    """
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = [await enter(Upstream(f"p{at}", role="prefill")) for at in range(2)]
        decode = [await enter(Upstream(f"d{at}", role="decode", knows=prefill)) for at in range(2)]
        proxy = await enter(start([each.url for each in prefill], [each.url for each in decode]))
        client = await enter(aiohttp.ClientSession())
        before = await _ask(client, proxy.url, range(requests, requests + 16))
        assert before == 16, f"{name} answers {before} of 16 with all engines alive"
        await prefill[1].kill()
        whole = await _ask(client, proxy.url, range(requests))
    return {
        "proxy": name,
        "scene": "one of two prefill engines dies",
        "asked": requests,
        "answered": whole / requests,
    }


async def _ask(client: aiohttp.ClientSession, url: str, numbers: range) -> int:
    """How many have a whole answer."""
    left = iter(numbers)
    num_whole = 0

    async def ask_on() -> None:
        nonlocal num_whole
        for number in left:
            is_whole = await _is_whole(client, url, encode(" w5" * 400 + f" request {number}"))
            num_whole += is_whole

    await asyncio.gather(*(ask_on() for _ in range(_AT_A_TIME)))
    return num_whole


async def _is_whole(client: aiohttp.ClientSession, url: str, prompt: list[int]) -> bool:
    body = {"model": "model", "prompt": prompt, "max_tokens": _TOKENS, "return_token_ids": True}
    try:
        async with client.post(url + "/v1/completions", json=body) as response:
            if response.status != 200:
                return False
            told = await response.json(content_type=None)
    except (aiohttp.ClientError, ValueError):
        return False
    return bool(told["choices"][0]["token_ids"] == answer(prompt, _TOKENS))
