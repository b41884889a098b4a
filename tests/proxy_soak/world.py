"""Engines that misbehave, and one that does not, behind one proxy in this process."""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from offload.testing.upstream import Fault, Upstream, decode, render
from offload.testing.upstream.wire import Wire, WireFault

_NUMBER = re.compile(r"request (\d+):")
_BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"not JSON",
    b'{"choices": []}',
    b'{"choices": [{"index": 0}]}',
    b'{"choices": [{"index": 0, "text": 5, "message": 6, "delta": 7}]}',
    b'{"choices": {"index": 0}}',
    b"<html>It works</html>",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"data: [DONE]\n\n",
)
_WRITTEN = (
    b": a comment\n\n",
    b"event: ping\n\n",
    b"\n\n\n",
    b"data: {}\n\n",
    b"data: null\n\n",
    b'data: {"choices": []}\n\n',
    b'data: {"choices": "none"}\n\n',
    b'data: {"choices": [{"index": 5, "text": "x", "delta": {"content": "x"}}]}\n\n',
    b"data: [DONE]\n\n",
    b"data: {\xff\xfe}\n\n",
    b"no event at all\n\n",
    b"data: " + b"9" * 3_000_000 + b"\n\n",
    b"x" * 3_000_000,
)
_NOISE = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
    b"garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    b"\0" * 9,
)


class World:
    """Two engines that prefill and three that decode; the last of these always does what it should.

    All others lie behind wires that break, are told to fail, and now and then die and come back.

    Args:
        rng: draws all faults.
        fault_share: requests that an engine fails.
        wire_share: connections that break.
        has_hangs: engines and connections may say nothing more, until somebody loses patience.
    """

    def __init__(
        self,
        rng: random.Random,
        fault_share: float = 0.25,
        wire_share: float = 0.5,
        *,
        has_hangs: bool = True,
    ) -> None:
        self._has_hangs = has_hangs
        self._rng, self._fault_share, self._wire_share = rng, fault_share, wire_share
        self._stack = AsyncExitStack()
        self.faults: Counter[str] = Counter()
        self.answered_4xx: set[int] = set()
        self.prefill: list[Upstream] = []
        self.decode: list[Upstream] = []
        self.urls: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        for number in range(2):
            self.prefill.append(await enter(Upstream(f"p{number}", role="prefill")))
        for number in range(3):
            self.decode.append(
                await enter(Upstream(f"d{number}", role="decode", knows=self.prefill, patience=0.5))
            )
        for engine in [*self.prefill, *self.decode]:
            if engine is self.decode[-1]:
                self.urls.append((engine.url, "decode"))
                continue
            engine.faults.choose = self._choose
            wire = await enter(Wire(engine.port, self._wire_fault))
            self.urls.append((wire.url, engine.role))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def engines(self) -> Sequence[Upstream]:
        """All of them."""
        return [*self.prefill, *self.decode]

    async def stir(self) -> None:
        """An engine that may dies, or comes back."""
        engine = self._rng.choice(self.engines[:-1])
        if engine.is_running:
            self.faults["killed"] += 1
            await engine.kill()
        else:
            await engine.start()

    async def heal(self) -> None:
        """All that have died come back."""
        for engine in self.engines:
            if not engine.is_running:
                await engine.start()

    def _choose(self, path: str, body: Mapping[str, Any]) -> Fault | None:
        if self._rng.random() > self._fault_share:
            return None
        fault = self._fault()
        self.faults[fault.kind if fault.status in (200, 500) else f"status {fault.status}"] += 1
        if fault.kind == "status" and 400 <= fault.status < 500 and (number := _number_of(body)) is not None:
            self.answered_4xx.add(number)
        return fault

    def _fault(self) -> Fault:
        rng = self._rng
        after = rng.choice((-1, 0, 1, 2, 5, 17, 40))
        kind = rng.random()
        if kind < 0.25:
            return Fault("status", status=rng.choice((500, 502, 503, 504)))
        if kind < 0.28:
            return Fault("status", status=rng.choice((400, 404, 422)))
        if kind < 0.40:
            return Fault("status", status=200, body=rng.choice(_BODIES))
        if kind < 0.55:
            return Fault("drop", after)
        if kind < 0.56:
            return Fault("hang" if self._has_hangs else "drop", after)
        if kind < 0.68:
            return Fault("end", after)
        if kind < 0.76:
            return Fault("error_event", max(after, 0))
        if kind < 0.84:
            return Fault("garbage", after)
        return Fault("write", max(after, 0), body=rng.choice(_WRITTEN))

    def _wire_fault(self) -> WireFault | None:
        rng = self._rng
        if rng.random() > self._wire_share:
            return None
        after = int(10 ** rng.uniform(0, 4.5))
        kind = rng.random()
        self.faults["wire"] += 1
        if kind < 0.2:
            return WireFault("close", after)
        if kind < 0.4:
            return WireFault("reset", after)
        if kind < 0.41:
            return WireFault("hang" if self._has_hangs else "reset", after)
        if kind < 0.85:
            return WireFault("crumbs", rng.choice((0, after)), size=rng.choice((1, 2, 3, 7, 50)))
        if not self._has_hangs:
            after = 0  # between a chunk's size and its end, noise lets the proxy wait for more
        return WireFault("noise", rng.choice((0, 0, after)), noise=rng.choice(_NOISE))


def _number_of(body: Mapping[str, Any]) -> int | None:
    """Which request this is, by its prompt."""
    prompt = body.get("prompt")
    if isinstance(body.get("messages"), list):
        prompt = render(body["messages"])
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    text = decode(prompt) if isinstance(prompt, list) else str(prompt)
    found = _NUMBER.search(text)
    return int(found[1]) if found else None
