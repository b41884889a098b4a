"""A proxy in front of engines in memory, all on sockets of this machine and on one loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps
from typing import Any, NamedTuple

import aiohttp

from offload.proxy import Policy
from offload.proxy.policies import RoundRobin
from offload.proxy.server import Proxy
from offload.proxy.settings import ProxySettings
from offload.testing.upstream import Upstream

PROMPT = "a long story" + " w7" * 400
"""Of more than the tokens below which nobody else prefills."""


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as a function; it is stuck after a minute."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


class Told(NamedTuple):
    """What a client was told.

    Attributes:
        status, headers: of the answer.
        events: JSON of a stream's events; ``[DONE]`` as text.
        body: JSON of an answer that is no stream, or its bytes.
        is_broken: the connection ended in the middle.
    """

    status: int
    headers: Mapping[str, str]
    events: list[Any]
    body: Any
    is_broken: bool

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Those with a choice."""
        return [each for each in self.events if isinstance(each, dict) and each.get("choices")]

    @property
    def text(self) -> str:
        if not self.events:
            choice = self.body["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        choices = [each["choices"][0] for each in self.chunks]
        return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)

    @property
    def finish(self) -> tuple[Any, Any]:
        """Reason and stop reason, of the one choice that ends."""
        ends = [each["choices"][0] for each in self.chunks if each["choices"][0].get("finish_reason")]
        assert len(ends) == 1, ends
        return ends[0]["finish_reason"], ends[0].get("stop_reason")

    @property
    def usage(self) -> Any:
        return next(each["usage"] for each in self.events if isinstance(each, dict) and "usage" in each)

    @property
    def error(self) -> Any:
        """The one in a stream, or None."""
        return next(
            (each["error"] for each in self.events if isinstance(each, dict) and "error" in each), None
        )


class Stand(NamedTuple):
    """All of it.

    Attributes:
        proxy: it.
        client: whoever asks.
        prefill, decode: engines.
    """

    proxy: Proxy
    client: aiohttp.ClientSession
    prefill: Sequence[Upstream]
    decode: Sequence[Upstream]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def ask(self, path: str = "/v1/completions", headers: Any = None, **body: Any) -> Told:
        """One request, and all of its answer."""
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return await told_by(response)

    def count(self, name: str, **labels: str) -> float:
        """What a counter says."""
        full = f"kv_offload_proxy_{name}_total"
        value = self.proxy.core.metrics.registry.get_sample_value(full, labels)
        return value or 0.0


async def told_by(response: aiohttp.ClientResponse) -> Told:
    raw, is_broken = b"", False
    try:
        async for part in response.content.iter_any():
            raw += part
    except aiohttp.ClientError:
        is_broken = True
    events, body = [], None
    if response.content_type == "text/event-stream":
        for each in raw.decode().split("\n\n"):
            if each.startswith("data: "):
                events.append(each[6:] if each == "data: [DONE]" else json.loads(each[6:]))
    else:
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw
    return Told(response.status, response.headers, events, body, is_broken)


@asynccontextmanager
async def stand(
    *,
    prefill: int | Sequence[Upstream] = 0,
    decode: int | Sequence[Upstream] = 1,
    both: bool = False,
    policy: Policy | None = None,
    **settings: Any,
) -> AsyncIterator[Stand]:
    """A proxy in front of so many engines, or of these; ``both``: those that decode have both roles."""
    if isinstance(prefill, int):
        prefill = [Upstream(f"p{number}", role="prefill") for number in range(prefill)]
    if isinstance(decode, int):
        role = "both" if both else "decode"
        decode = [Upstream(f"d{number}", role=role, knows=prefill) for number in range(decode)]
    async with AsyncExitStack() as stack:
        for each in (*prefill, *decode):
            await stack.enter_async_context(each)
        engines = [(each.url, "prefill") for each in prefill]
        engines += [(each.url, "both" if both else "decode") for each in decode]
        values = {"port": 0, "health_seconds": 60.0, "stall_seconds": 30.0, "history_tokens": 0, **settings}
        made = ProxySettings(engines=tuple(engines), **values)
        proxy = await stack.enter_async_context(Proxy(made, policy or RoundRobin()))
        client = await stack.enter_async_context(aiohttp.ClientSession(read_bufsize=1 << 20))
        yield Stand(proxy, client, prefill, decode)
        proxy.core.members.check_invariants()
        proxy.core.history.check_invariants()
        proxy.core.trees.check_invariants()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks of the loop are about to do. TimeoutError after 30 seconds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
