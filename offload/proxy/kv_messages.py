"""KV events as engines publish them: parsed one by one, so that one that is wrong costs itself alone."""

from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["MAX_BYTES", "Cleared", "KvEvent", "Removed", "Stored", "events_in"]

MAX_BYTES = 4 << 20
"""Of one message: longer ones are not received."""
MOST_EVENTS = 1 << 17
"""Of one message: what is behind them is not read, as if messages had been missed."""
_MOST_TOKENS = 1 << 20
"""Of one block."""
_MOST_HASH_BYTES, _MOST_NAME = 64, 1024
"""Of what is kept: a block's hash in bytes, and an adapter's or a medium's name in characters."""

BlockHash = int | bytes
"""As vLLM publishes them: whole, or 64 bits of them."""


class Stored(msgspec.Struct, tag="BlockStored", frozen=True):
    """Blocks that an engine has now, in chain order. Fields are those of vLLM's event that matter here."""

    block_hashes: list[BlockHash]
    block_size: int
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Blocks that it has no longer."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """The GPU's cache was emptied."""


KvEvent = Stored | Removed | Cleared


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: msgspec.Raw


_batches = msgspec.msgpack.Decoder(_Batch)
_lists = msgspec.msgpack.Decoder(list[msgspec.Raw])
_events = msgspec.msgpack.Decoder(KvEvent)


def events_in(payload: bytes) -> Iterator[KvEvent | None]:
    """Events of a message, in order; None: one that is not as it must be. Raises ValueError: no message.

    O(bytes) in all, and no more than one event at a time is unpacked.
    """
    try:
        listed = _batches.decode(payload).events
        num_events = _num_in(listed)
        if num_events > MOST_EVENTS:
            raise ValueError(f"{num_events} events in one message, and {MOST_EVENTS} are read at most")
        batch = _lists.decode(listed)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ValueError(f"no batch of events: {error}") from None
    for raw in batch:
        try:
            event = _events.decode(raw)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            yield None
            continue
        yield event if _is_sound(event) else None


def _num_in(listed: msgspec.Raw) -> int:
    """How many there are in a packed list, by its first bytes; 0: that is no list, and is refused later."""
    head = bytes(memoryview(listed)[:5])
    if head[:1] == b"\xdc":
        return int.from_bytes(head[1:3], "big")
    if head[:1] == b"\xdd":
        return int.from_bytes(head[1:5], "big")
    return head[0] & 0x0F if head and head[0] >> 4 == 0x9 else 0


def _is_sound(event: KvEvent) -> bool:
    """Whether its parts fit each other, and none is larger than it can be."""
    if isinstance(event, Cleared):
        return True
    if any(isinstance(each, bytes) and len(each) > _MOST_HASH_BYTES for each in event.block_hashes):
        return False
    names = [event.medium, event.locality, event.lora_name if isinstance(event, Stored) else None]
    if any(name is not None and len(name) > _MOST_NAME for name in names):
        return False
    if not isinstance(event, Stored):
        return True
    num, size = len(event.block_hashes), event.block_size
    has_keys = event.extra_keys is None or len(event.extra_keys) == num
    return 0 < size <= _MOST_TOKENS and len(event.token_ids) in (0, num * size) and has_keys
