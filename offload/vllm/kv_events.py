"""KV events as vLLM publishes them, so many in a step and no more."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from allocator import Evicted, Stored

MAX_HASHES = 1 << 14
"""Prefix hashes published in one step. The next step goes on with the rest."""

_EVENT_COST = 32  # an event of its own costs as much as so many hashes
_INT_BYTES = 8
_MEDIUM = "CPU"


class KvEventStream:
    """Turns the allocator's events into vLLM's, in their order.

    A storm of them, such as a reset of a large pool, is spread over steps: an engine step waits until its
    hashes are converted. Removals that follow each other are one event.
    """

    def __init__(self, block_size: int) -> None:
        """``block_size`` in tokens."""
        self._block_size = block_size
        self._waiting: deque[Stored | Evicted] = deque()
        self._begun = 0  # hashes of the first waiting event that are published

    @property
    def is_behind(self) -> bool:
        """Whether there is more to publish than one step took."""
        return bool(self._waiting)

    def take(self, news: Iterable[Stored | Evicted]) -> list[KVCacheEvent]:
        """What to publish now, after ``news``. O(news + MAX_HASHES)."""
        self._waiting.extend(news)
        events: list[KVCacheEvent] = []
        if not self._waiting:
            return events
        parts = self._next_parts()
        hashes = _converted([each for part in parts for each in part.hashes])
        at = 0
        for part in parts:
            stop = at + len(part.hashes)
            if isinstance(part, Stored):
                events.append(self._stored(hashes[at:stop], part.parent_hash))
            elif events and isinstance(events[-1], BlockRemoved):
                events[-1].block_hashes.extend(hashes[at:stop])
            else:
                events.append(BlockRemoved(block_hashes=hashes[at:stop], medium=_MEDIUM))
            at = stop
        return events

    def check_invariants(self) -> None:
        """Only the first waiting event may be published in part, and none is published whole."""
        first = len(self._waiting[0].hashes) if self._waiting else 0
        assert 0 <= self._begun < max(first, 1), f"{self._begun} of {first} hashes are published"

    def _next_parts(self) -> list[Stored | Evicted]:
        """Take what one step publishes from what waits."""
        parts: list[Stored | Evicted] = []
        room = MAX_HASHES
        while self._waiting and room > 0:
            event, begun = self._waiting[0], self._begun
            hashes = event.hashes[begun : begun + room]
            if isinstance(event, Evicted):
                parts.append(Evicted(hashes))
            else:
                parts.append(Stored(list(hashes), event.hashes[begun - 1] if begun else event.parent_hash))
            room -= len(hashes) + _EVENT_COST
            self._begun = begun + len(hashes)
            if self._begun == len(event.hashes):
                self._waiting.popleft()
                self._begun = 0
        return parts

    def _stored(self, hashes: list[Any], parent: bytes | None) -> BlockStored:
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=[],
            block_size=self._block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None,
        )


def _converted(hashes: Sequence[bytes]) -> list[Any]:
    """``maybe_convert_block_hash`` of each, all at once: as bytes, or as the last 64 bits."""
    if not hashes or not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return list(hashes)
    size = len(hashes[0])
    content = b"".join(hashes)
    if size < _INT_BYTES or len(content) != size * len(hashes):
        return [maybe_convert_block_hash(BlockHash(each)) for each in hashes]
    rows = np.frombuffer(content, dtype=np.uint8).reshape(len(hashes), size)
    return rows[:, -_INT_BYTES:].copy().view(">u8")[:, 0].tolist()  # type: ignore[no-any-return]
