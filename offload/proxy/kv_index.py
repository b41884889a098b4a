"""What one engine has, as its KV events tell: looked up by token ids."""

from array import array
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

import msgspec
import xxhash

from offload.proxy.kv_messages import BlockHash, Cleared, KvEvent, Removed, Stored

__all__ = ["EngineIndex", "Prompt"]

LEAST_SIZE = 4
"""Tokens that all blocks of an engine are multiples of, at least."""
MOST_TOKENS = 1 << 17
"""Of a prompt that are looked up, as engines do that are asked."""
_ITEM = 4  # bytes of a token id
_GPU = ("GPU", None), (None, None)
"""The places of its cache; the second of an engine that does not say its media."""
_FULL = ("full_attention", "mla_attention", "sink_full_attention", None)
"""Kinds of groups that need all tokens; None: an engine that does not say."""
_MOST_PLACES, _MOST_GROUPS, _MOST_NAMES = 8, 64, 1024


class Prompt:
    """Token ids of a request, cut into pieces once for all engines whose blocks are alike."""

    def __init__(self, token_ids: Sequence[int], model: str, salt: str) -> None:
        """Raises ValueError: ids that no engine has."""
        packed = _packed(token_ids)
        if packed is None:
            raise ValueError("token ids are numbers of 32 bits")
        self._packed = packed
        self._model = model
        self._salt = salt
        self._keys: dict[tuple[int, bool], tuple[list[bytes], Iterator[bytes]]] = {}

    @property
    def model(self) -> str:
        """That it names: perhaps an adapter."""
        return self._model

    @property
    def num_tokens(self) -> int:
        """That it has."""
        return len(self._packed) // _ITEM

    def key(self, index: int, size: int, *, is_adapter: bool) -> bytes:
        """Of the piece of that index, and all before it. Made once: O(tokens) for all of a prompt."""
        keys, more = self._keys.get((size, is_adapter), (None, None))
        if keys is None or more is None:
            root = _root(self._model if is_adapter else None)
            extra = (self._salt,) if self._salt else ()
            keys, more = [], _keys(root, self._packed, size, extra)
            self._keys[size, is_adapter] = keys, more
        while len(keys) <= index:
            keys.append(next(more))
        return keys[index]


class _Block(NamedTuple):
    """Where a block ends: the key of all up to there, and its tokens."""

    key: bytes
    size: int


class _Place:
    """Blocks of one medium, by their hashes and by what they are made of."""

    def __init__(self) -> None:
        self.by_hash: dict[BlockHash, _Block] = {}
        self.by_key: dict[bytes, int] = {}  # tokens of the largest block that ends there

    def put(self, block_hash: BlockHash, block: _Block) -> None:
        self.take(block_hash)
        self.by_hash[block_hash] = block
        self.by_key[block.key] = max(block.size, self.by_key.get(block.key, 0))

    def take(self, block_hash: BlockHash) -> None:
        """Idempotent. Others that end there are gone with it: what one group lacks is no hit."""
        block = self.by_hash.pop(block_hash, None)
        if block is not None:
            self.by_key.pop(block.key, None)


class EngineIndex:
    """Blocks with their token ids, by engine. It makes keys of its own: an engine's hashes are only names.

    A key is a digest of all token ids up to a place, made piece by piece. Blocks of all sizes are multiples
    of a piece, so a key tells what a block ends with however long it is. An adapter, a salt and other extra
    keys go into it. Blocks behind one that is not known are left out. So are those of windows and states: a
    request can go on only where all tokens before are there.

    It is bounded: what does not fit is left out, and so is what comes behind it. Whatever events say, it
    raises nothing: they cost routing only. About 300 bytes for a block.

    Attributes:
        is_whole: it has heard everything since its engine began. Otherwise the engine may have more.
        num_left_out: blocks that could have been put into it, and were not: an unknown parent, or no room.
    """

    def __init__(self, max_blocks: int) -> None:
        """It knows of nothing; ``max_blocks``: in all media together."""
        self._max_blocks = max_blocks
        self.num_left_out = 0
        self.clear(is_whole=False)

    def __len__(self) -> int:
        """Blocks that are known."""
        return sum(len(place.by_hash) for place in self._places.values())

    def by_medium(self) -> dict[str, int]:
        """How many blocks are known, by medium."""
        return {medium or "": len(place.by_hash) for (medium, _), place in self._places.items()}

    def clear(self, *, is_whole: bool) -> None:
        """Forget everything; ``is_whole``: the engine begins now."""
        self.is_whole = is_whole
        self._places: dict[tuple[str | None, str | None], _Place] = {}
        self._groups: set[int | None] = set()  # of full attention
        self._adapters: set[str] = set()
        self._size = 0  # of a piece, in tokens
        self._largest = 0

    def hear(self, event: KvEvent) -> None:
        """Take an event in. O(its tokens)."""
        if isinstance(event, Cleared):
            for medium in _GPU:
                self._places.pop(medium, None)
        elif event.locality == "REMOTE":
            pass  # what engines share tells none from the others
        elif isinstance(event, Removed):
            place = self._places.get((event.medium, event.locality))
            if place is not None and event.group_idx in self._groups:
                for block_hash in event.block_hashes:
                    place.take(block_hash)
        elif event.kv_cache_spec_kind in _FULL:
            self._put(event)

    def depth(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that the engine has. O(these), and those of its largest block."""
        size, places = self._size, [place.by_key for place in self._places.values()]
        if not size or not places:
            return 0
        is_adapter = prompt.model in self._adapters
        reach = 0
        for index in range(min(prompt.num_tokens, MOST_TOKENS) // size):
            end = (index + 1) * size
            if end > reach + self._largest:
                break
            key = prompt.key(index, size, is_adapter=is_adapter)
            if any(end - by_key.get(key, 0) <= reach for by_key in places):
                reach = end
        return reach

    def check_invariants(self) -> None:
        """It is bounded, and both ways to a block agree. For tests. O(blocks)."""
        assert len(self) <= self._max_blocks, f"{len(self)} blocks, and {self._max_blocks} at most"
        assert len(self._places) <= _MOST_PLACES and len(self._groups) <= _MOST_GROUPS
        assert len(self._adapters) <= _MOST_NAMES
        for place in self._places.values():
            ends = {block.key for block in place.by_hash.values()}
            assert place.by_key.keys() <= ends, "ends of no block are known"
            for block in place.by_hash.values():
                assert block.size % self._size == 0 and block.size <= self._largest, f"{block}"

    # Private

    def _put(self, event: Stored) -> None:
        size, num = event.block_size, len(event.block_hashes)
        place = self._place_of(event)
        before = self._parent(event)
        packed = _packed(event.token_ids) if event.token_ids else None
        if place is None or before is None or packed is None or not self._fits(size):
            self._leave_out(num)
            return
        self._groups.add(event.group_idx)
        self._largest = max(self._largest, size)
        for index, block_hash in enumerate(event.block_hashes):
            extra = _extra(event, index)
            is_full = len(self) >= self._max_blocks and block_hash not in place.by_hash
            if is_full or extra is None:
                self._leave_out(num - index)
                return
            piece = packed[index * size * _ITEM : (index + 1) * size * _ITEM]
            for key in _keys(before, piece, self._size, extra):
                before = key
            place.put(block_hash, _Block(before, size))

    def _leave_out(self, num: int) -> None:
        """The engine has these, and nobody is told."""
        self.num_left_out += num
        self.is_whole = False

    def _place_of(self, event: Stored) -> _Place | None:
        at = event.medium, event.locality
        if at not in self._places and len(self._places) < _MOST_PLACES:
            self._places[at] = _Place()
        is_known = event.group_idx in self._groups or len(self._groups) < _MOST_GROUPS
        return self._places.get(at) if is_known else None

    def _parent(self, event: Stored) -> bytes | None:
        """The key of all before it; None: that is not known."""
        if event.lora_name is not None and event.lora_name not in self._adapters:
            if len(self._adapters) >= _MOST_NAMES:
                return None
            self._adapters.add(event.lora_name)
        if event.parent_block_hash is None:
            return _root(event.lora_name)
        for place in self._places.values():
            block = place.by_hash.get(event.parent_block_hash)
            if block is not None:
                return block.key
        return None

    def _fits(self, size: int) -> bool:
        """Whether blocks of so many tokens can be cut; from now on they are. Smaller pieces begin anew."""
        piece = gcd(self._size, size)
        if piece < LEAST_SIZE:
            return False
        if piece == self._size:
            return True
        has_blocks = len(self) > 0
        if has_blocks:
            self.clear(is_whole=False)
        self._size = piece
        return not has_blocks


def _packed(token_ids: Sequence[int]) -> bytes | None:
    """As 32 bits each; None: some are not."""
    try:
        return array("I", token_ids).tobytes()
    except (TypeError, OverflowError, ValueError):
        return None


def _extra(event: Stored, index: int) -> tuple[Any, ...] | None:
    """Extra keys of a block but for its adapter, which is in its root; None: they are none."""
    keys = None if event.extra_keys is None else event.extra_keys[index]
    if keys is None:
        return ()
    if not isinstance(keys, list):
        return None
    return tuple(key for key in keys if key != event.lora_name)


def _root(lora_name: str | None) -> bytes:
    """The key of nothing, for an adapter."""
    return xxhash.xxh3_128_digest(b"" if lora_name is None else b"\x01" + lora_name.encode(errors="replace"))


def _keys(before: bytes, packed: bytes, size: int, extra: tuple[Any, ...]) -> Iterator[bytes]:
    """Keys of all whole pieces behind that key; ``extra`` goes into the first."""
    step = size * _ITEM
    if extra:
        before = xxhash.xxh3_128_digest(before + msgspec.msgpack.encode(extra))
    for start in range(0, len(packed) - step + 1, step):
        before = xxhash.xxh3_128_digest(before + packed[start : start + step])
        yield before
