"""Clients of the proxy: those that read at once, those that are slow, and those that go away."""

import asyncio
import json

import aiohttp

from tests.proxy_soak.asking import Ask
from tests.proxy_soak.checking import Outcome, WrongAnswerError, check_stream, check_whole

STUCK_SECONDS = 120.0
"""After which a request is stuck; the longest pause of an engine is a small part of that."""


async def ask_for(client: aiohttp.ClientSession, url: str, ask: Ask, answered_4xx: set[int]) -> Outcome:
    """One request from begin to end. Raises WrongAnswerError, or TimeoutError if it is stuck.

    Args:
        client, url: of the proxy.
        ask: the request.
        answered_4xx: numbers of requests that an engine has told to be wrong although they are not.
    """
    async with asyncio.timeout(STUCK_SECONDS):
        try:
            return await _ask_for(client, url, ask, answered_4xx)
        except aiohttp.ClientError as error:
            raise WrongAnswerError(f"the proxy broke off: {error!r}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise WrongAnswerError(f"what came is no answer: {error!r}") from error


async def _ask_for(client: aiohttp.ClientSession, url: str, ask: Ask, answered_4xx: set[int]) -> Outcome:
    body = json.dumps(ask.body, ensure_ascii=ask.number % 2 == 0).encode()
    headers = {"Content-Type": "application/json"}
    if ask.leaves_after == 0:
        with_timeout = aiohttp.ClientTimeout(total=0.02)
        try:
            async with client.post(
                url + ask.path, data=body, headers=headers, timeout=with_timeout
            ) as response:
                await response.read()
        except TimeoutError:
            pass
        return Outcome.LEFT
    async with client.post(url + ask.path, data=body, headers=headers) as response:
        if response.status != 200:
            raw = await response.read()
            return _refused(ask, response.status, raw, answered_4xx)
        if ask.is_invalid:
            raise WrongAnswerError("a request that no engine takes was answered")
        if not ask.is_stream:
            check_whole(ask, await response.read())
            return Outcome.WHOLE
        if not response.headers["Content-Type"].startswith("text/event-stream"):
            raise WrongAnswerError(f"a stream of {response.headers['Content-Type']}")
        raw = b""
        async for piece in response.content.iter_chunked(64 if ask.is_slow else 1 << 16):
            raw += piece
            if ask.is_slow:
                await asyncio.sleep(0.002)
            if ask.leaves_after is not None and raw.count(b"\n\n") >= ask.leaves_after:
                response.close()
                return Outcome.LEFT
    outcome = check_stream(ask, raw)
    if outcome is Outcome.ERROR_EVENT and not ask.keeps:
        raise WrongAnswerError(f"an error event in a stream that can go on: {raw[-300:]!r}")
    return outcome


def _refused(ask: Ask, status: int, raw: bytes, answered_4xx: set[int]) -> Outcome:
    error = json.loads(raw)["error"]
    if not error["message"]:
        raise WrongAnswerError(f"a status {status} without a reason")
    if ask.is_invalid and 400 <= status < 500:
        return Outcome.REFUSED
    if 400 <= status < 500 and ask.number in answered_4xx:
        return Outcome.PASSED_ON
    raise WrongAnswerError(f"status {status}: {raw[:300]!r}")
