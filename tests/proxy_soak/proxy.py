"""The proxy, in this process, with short patience."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from offload.proxy.policies import LeastLoad
from offload.proxy.server import Proxy
from offload.proxy.settings import ProxySettings


class Running(NamedTuple):
    """A proxy that listens."""

    proxy: Proxy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def left_behind(self) -> list[str]:
        """What engines have to do although no client waits, once what is ending has ended."""
        for _ in range(500):
            left = [text for member in self.proxy.core.members if (text := _work_of(member))]
            if not left:
                break
            await asyncio.sleep(0.01)
        for member in self.proxy.core.members:
            member.check_invariants()
        self.proxy.core.history.check_invariants()
        return left


@asynccontextmanager
async def running_proxy(engines: Sequence[tuple[str, str]], patience: float) -> AsyncIterator[Running]:
    """In front of engines at these URLs, with their roles. ``patience``: seconds that it waits for one."""
    settings = ProxySettings(
        engines=tuple(engines),
        port=0,
        min_prefill_tokens=32,
        connect_seconds=patience,
        first_byte_seconds=patience,
        answer_seconds=patience,
        stall_seconds=patience,
        prefill_seconds=patience,
        health_seconds=0.5,
        eject_seconds=0.2,
        max_answer_bytes=2 << 20,
    )
    async with Proxy(settings, LeastLoad()) as proxy:
        yield Running(proxy)


def _work_of(member: object) -> str:
    legs, tokens = len(member.legs), member.prompt_tokens  # type: ignore[attr-defined]
    return f"{legs} legs and {tokens} prompt tokens at {member.url}" if legs or tokens else ""  # type: ignore[attr-defined]
