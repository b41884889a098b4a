"""A soak from begin to end."""

import asyncio
import gc
import os
import random
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tests.proxy_soak.asking import Ask, draw_ask
from tests.proxy_soak.checking import WrongAnswerError
from tests.proxy_soak.clients import ask_for
from tests.proxy_soak.proxy import running_proxy
from tests.proxy_soak.world import World

_PATIENCE = 15.0
"""Seconds; a busy machine may stop for some."""


@dataclass
class Told:
    """What a soak has seen.

    Attributes:
        outcomes: how many requests ended how.
        faults: how many there were of each kind.
        wrong: requests that ended as they must not, and why.
        left_behind: what is there at the end and was not before.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)


async def soak(requests: int, seed: int, at_a_time: int, *, has_hangs: bool = True) -> Told:
    """So many requests, so many at a time. ``has_hangs``: of engines, which cost the proxy its patience."""
    told = Told()
    descriptors, tasks = _descriptors(), asyncio.all_tasks()
    rng = random.Random(seed)
    async with (
        World(random.Random(rng.random()), has_hangs=has_hangs) as world,
        running_proxy(world.urls, _PATIENCE) as proxy,
    ):
        asks = [draw_ask(rng, number) for number in range(requests)]
        numbers = iter(range(requests))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def ask_on() -> None:
                for number in numbers:
                    if number % 50 == 25:
                        await world.stir()
                    await _one(client, proxy.url, asks[number], world, told)

            await asyncio.gather(*(ask_on() for _ in range(at_a_time)))
        await world.heal()
        told.left_behind += await proxy.left_behind()
        told.faults = world.faults
    told.left_behind += await _left_behind(descriptors, tasks)
    return told


async def _one(client: aiohttp.ClientSession, url: str, ask: Ask, world: World, told: Told) -> None:
    try:
        outcome = await ask_for(client, url, ask, world.answered_4xx)
    except WrongAnswerError as error:
        told.wrong.append((ask.number, f"{error} ({ask.path}, {str(ask.body)[-300:]})"))
    except TimeoutError:
        told.wrong.append((ask.number, f"stuck ({ask.path})"))
    else:
        told.outcomes[outcome.value] += 1


async def _left_behind(descriptors: int, tasks: set[asyncio.Task[object]]) -> list[str]:
    """Descriptors and tasks that were not there before, once those that are ending have ended."""
    for _ in range(200):
        gc.collect()
        more = _descriptors() - descriptors
        others = asyncio.all_tasks() - tasks
        if more <= 0 and not others:
            return []
        await asyncio.sleep(0.01)
    return [f"{more} file descriptors", *(f"task {each.get_coro()}" for each in others)]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
