"""Tags: what the virtual model computes instead of keys and values."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def mix(tag: int, value: int) -> int:
    """Fold ``value`` into ``tag``; 64 bits."""
    mixed = ((tag ^ (value + 1)) * _ODD) & _MASK
    return mixed ^ (mixed >> 29)


def salted_root(salt: str | None) -> int:
    """The tag before the first token. Requests with different salts must never share KV."""
    return fold(1, (salt or "").encode())


def fold(tag: int, data: bytes) -> int:
    """Fold all of ``data`` into ``tag``."""
    for byte in data:
        tag = mix(tag, byte)
    return tag


class TagChain:
    """The tags of a growing list of tokens: tag ``i`` is a function of what is at positions ``0 .. i``."""

    def __init__(self, root: int, items: Mapping[int, int]) -> None:
        """``root``: the tag before the first token. ``items`` by position are there beside a token."""
        self.tokens: list[int] = []
        self._root = root
        self._items = items
        self._tags: Words = np.empty(64, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tags(self) -> Words:
        """``uint64[len(self)]``, a view."""
        return self._tags[: len(self.tokens)]

    @property
    def last(self) -> int:
        """Tag of the last token."""
        return int(self._tags[len(self.tokens) - 1]) if self.tokens else self._root

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. O(new tokens)."""
        size = len(self.tokens)
        tag = self.last
        items = self._items
        values = tokens
        if items:
            values = [
                mix(token, items[at]) if at in items else token for at, token in enumerate(tokens, size)
            ]
        new = [tag := mix(tag, value) for value in values]
        while size + len(new) > len(self._tags):
            self._tags = np.concatenate([self._tags, np.empty_like(self._tags)])
        self._tags[size : size + len(new)] = new
        self.tokens.extend(tokens)

    def ahead(self, tokens: Sequence[int]) -> Words:
        """Tags of these tokens if they were appended; none is."""
        tag = self.last
        return np.array([tag := mix(tag, token) for token in tokens], dtype=np.uint64)

    def become(self, tokens: Sequence[int]) -> None:
        """Hold exactly ``tokens``, keeping the tags of the common beginning."""
        known = min(len(self.tokens), len(tokens))
        if self.tokens[:known] != list(tokens[:known]):
            known = 0
        del self.tokens[known:]
        self.extend(tokens[known:])
