"""Token ids of prompts that come as text: an engine makes them, and they are kept for the next time.

The proxy has no tokenizer and no chat template. An engine has both, and makes token ids in its API server's
process, not in its scheduler's.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from offload.proxy.faults import EngineError
from offload.proxy.members import Leg, Members
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.policies import Request
from offload.proxy.settings import ProxySettings
from offload.proxy.upstream import Upstreams

__all__ = ["Tokens"]

MAX_AT_ONCE = 16
"""Prompts that engines tokenize for the proxy at one time."""
_PATIENCE = 20
"""Times what a request waits, an engine may take: the next request finds what this one did not wait for."""
_NUM_FAILURES = 3
"""In a row, after which nobody is asked for a while."""
_ASKED = (
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "mm_processor_kwargs",
)
"""Fields of a request that its token ids follow from."""


class Tokens:
    """Asks engines, and remembers.

    Args:
        settings, members, upstreams, metrics: of the proxy.
        clock: in seconds.
    """

    def __init__(
        self,
        settings: ProxySettings,
        members: Members,
        upstreams: Upstreams,
        metrics: ProxyMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._members = members
        self._upstreams = upstreams
        self._metrics = metrics
        self._clock = clock
        self._known: OrderedDict[int, list[int]] = OrderedDict()
        self._num_tokens = 0
        self._asked: dict[int, asyncio.Task[list[int] | None]] = {}
        self._num_failures = 0
        self._paused_until = 0.0

    def known(self, request: Request) -> Sequence[int] | None:
        """The token ids of a prompt, if they are at hand. O(bytes)."""
        if request.token_ids is not None:
            return request.token_ids
        return self._known.get(_digest(request)) if request.text else None

    async def of(self, request: Request) -> Sequence[int] | None:
        """The token ids of a prompt. None: they are not to be had in time."""
        if request.token_ids is not None or not request.text:
            return request.token_ids
        digest = _digest(request)
        ids = self._known.get(digest)
        if ids is not None:
            self._known.move_to_end(digest)
            self._metrics.tokenized.labels("known").inc()
            return ids
        task = self._asked.get(digest)
        if task is None:
            if len(self._asked) >= MAX_AT_ONCE or self._clock() < self._paused_until:
                self._metrics.tokenized.labels("not asked").inc()
                return None
            task = self._asked[digest] = asyncio.create_task(self._ask(request, digest))
        done, _ = await asyncio.wait([task], timeout=self._settings.tokenize_seconds)
        ids = task.result() if done else None
        self._metrics.tokenized.labels("asked" if ids else "failed" if done else "late").inc()
        return ids

    async def close(self) -> None:
        """Nobody waits any more."""
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def _ask(self, request: Request, digest: int) -> list[int] | None:
        """Never raises, but when it is cancelled."""
        ids = None
        try:
            ids = await self._from_engine(request)
        except EngineError:
            pass  # as of any other answer that is none
        finally:
            del self._asked[digest]
        if ids is None:
            self._num_failures += 1
            if self._num_failures >= _NUM_FAILURES:
                self._paused_until = self._clock() + self._settings.eject_seconds
            return None
        self._num_failures = 0
        self._keep(digest, ids)
        return ids

    async def _from_engine(self, request: Request) -> list[int] | None:
        members = self._members.any_of(set())
        if not members:
            return None
        member = min(members, key=lambda each: (len(each.legs), each.prompt_tokens))
        fields = {key: request.body[key] for key in _ASKED if request.body.get(key) is not None}
        headers = {"Content-Type": "application/json"}
        if request.authorization is not None:
            headers["Authorization"] = request.authorization
        told = await self._upstreams.whole(
            f"{member.url}/tokenize",
            headers,
            msgspec.json.encode(fields),
            Leg(lambda: False),
            _PATIENCE * self._settings.tokenize_seconds,
            False,
        )
        if told.status != 200:
            return None
        try:
            return msgspec.json.decode(told.body, type=_Tokenized).tokens
        except (ValueError, RecursionError):
            return None

    def _keep(self, digest: int, ids: list[int]) -> None:
        limit = self._settings.tokenized_tokens
        if len(ids) > limit:
            return
        self._num_tokens += len(ids) - len(self._known.pop(digest, ()))
        self._known[digest] = ids
        while self._num_tokens > limit:
            self._num_tokens -= len(self._known.popitem(last=False)[1])

    def check_invariants(self) -> None:
        """What holds between any two calls. O(prompts)."""
        assert self._num_tokens == sum(map(len, self._known.values())) <= self._settings.tokenized_tokens
        assert len(self._asked) <= MAX_AT_ONCE


class _Tokenized(msgspec.Struct):
    """What ``/tokenize`` answers, as far as it matters."""

    tokens: list[int]


def _digest(request: Request) -> int:
    digest = xxhash.xxh3_128()
    for piece in request.text:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    flags = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
    digest.update(repr([request.path, *(request.body.get(key) for key in flags)]).encode(errors="replace"))
    return digest.intdigest()
