"""Streams asked for, so many at a time, and what each took. Whatever is not a whole stream is an error."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.proxy.canned import CHUNKS

__all__ = ["Measured", "body_of", "cpu_seconds", "load", "num_prefilled"]

_FIRST_IDS = itertools.count(100)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests that were asked.

    Attributes:
        first, last: seconds to the first token and to the end, of each.
        wall: seconds of all together.
        failed: requests that had no whole answer.
    """

    first: list[float]
    last: list[float]
    wall: float
    failed: int

    def percentile(self, percent: float) -> float:
        """Of milliseconds to the first token."""
        return 1e3 * float(np.percentile(self.first, percent))


def body_of(num_tokens: int) -> bytes:
    """A request for a stream with a prompt of so many token ids; ``%d`` stands for the first of them."""
    ids = ",".join(str(100 + at % 30_000) for at in range(1, num_tokens))
    return b'{"model":"model","prompt":[%%d,%b],"max_tokens":%d,"stream":true}' % (ids.encode(), CHUNKS)


async def num_prefilled(urls: Sequence[str]) -> int:
    """Requests for one token that these engines have had."""
    total = 0
    async with aiohttp.ClientSession() as client:
        for url in urls:
            async with client.get(url + "/count") as response:
                total += int(await response.read())
    return total


async def load(urls: Sequence[str], body: bytes, requests: int, at_a_time: int) -> Measured:
    """Ask for so many streams.

    Args:
        urls: one after the other for each request: a prefill engine and a decode engine, or a proxy alone.
        body: of ``body_of``; no two requests have the same first token. Before the last URL it asks for one.
        requests, at_a_time: how many, and how many of them at any time.
    """
    one = body.replace(b'"max_tokens":%d,"stream":true' % CHUNKS, b'"max_tokens":1,"stream":false')
    first: list[float] = []
    last: list[float] = []
    failed = 0
    numbers = iter(range(requests))

    async def ask(client: aiohttp.ClientSession) -> None:
        nonlocal failed
        for _ in numbers:
            first_id = next(_FIRST_IDS)
            this, asked = body % first_id, one % first_id
            began = time.perf_counter()
            for url in urls[:-1]:
                async with client.post(url + "/v1/completions", data=asked, headers=headers) as response:
                    await response.read()
            first_at, num_tokens, is_done = 0.0, 0, False
            try:
                async with client.post(urls[-1] + "/v1/completions", data=this, headers=headers) as response:
                    async for line in response.content:
                        first_at = first_at or time.perf_counter()
                        num_tokens += line.startswith(b"data: {")
                        is_done |= line.startswith(b"data: [DONE]")
            except aiohttp.ClientError:
                is_done = False
            if response.status != 200 or not is_done or num_tokens < CHUNKS:
                failed += 1
            else:
                first.append(first_at - began)
                last.append(time.perf_counter() - began)

    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        began = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(at_a_time)))
        return Measured(first, last, time.perf_counter() - began, failed)


def cpu_seconds(pid: int) -> float:
    """What a process has had of processors so far, in user and in system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
