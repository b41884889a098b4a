"""How slots of a pool and bags of checkpoints are called, and how names are found among many."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from offload.messages import NAME_BYTES, Ids, Names

ROOT = bytes(NAME_BYTES)
"""The parent of the first position, or extent, of a chain."""

NO_PARENT, MISSING = -1, -2
"""In the place of something that is looked for: its name is ``ROOT``, or it is not there."""

NUMBER_BITS = 20
BAG = 1 << NUMBER_BITS
WIDTH_SHIFT = 32
"""A mark is ``bytes of a prefix hash << 32 | BAG or 0 | number``. The number says which slot it is of its
position, or of the bag of the checkpoint behind that."""

_FACTORS = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63)
_MARK = 0xB5


def rows(names: Sequence[bytes]) -> Names:
    """Names as an array, ``uint8[n, 32]``."""
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, NAME_BYTES)


def as_bytes(names: Names) -> list[bytes]:
    """The rows of such an array."""
    found: list[bytes] = np.ascontiguousarray(names).view(f"V{NAME_BYTES}").reshape(-1).tolist()
    return found


def bag_name(name: bytes, index: int) -> bytes:
    """Of an extent of the bag behind that prefix; ``bag_name(bag_name(name, i), i)`` is ``name``."""
    mask = _MARK.to_bytes(1, "big") * (NAME_BYTES - 4) + (index + 1).to_bytes(4, "big")
    return (int.from_bytes(name, "big") ^ int.from_bytes(mask, "big")).to_bytes(NAME_BYTES, "big")


def bag_names(names: Names) -> Names:
    """``bag_name(name, 0)`` of many, ``uint8[n, 32]``."""
    return names ^ rows([bag_name(ROOT, 0)])


def slot_names(names: Names, numbers: Ids) -> Names:
    """Of slots that have a name in common: number 0 is called as all together, ``uint8[n, 32]``."""
    words = np.array(names).view(np.uint64)
    words[:, -1] ^= numbers.view(np.uint64)
    return words.view(np.uint8)


def keys_of(names: Names) -> npt.NDArray[np.uint64]:
    """As good as different for different names, ``uint64[n]``."""
    words = np.ascontiguousarray(names).view(np.uint64)
    keys = np.zeros(len(words), dtype=np.uint64)
    for column, factor in enumerate(_FACTORS):
        keys = (keys ^ words[:, column]) * np.uint64(factor)
        keys ^= keys >> np.uint64(29)
    return keys


class NameIndex:
    """Finds names among others, by a hash of 64 bits and then in full."""

    def __init__(self, names: Names) -> None:
        """``names``: each once, or one of those that are equal is found."""
        self._names = names
        keys = keys_of(names)
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def find(self, names: Names) -> Ids:
        """Where each is, ``int64[n]``; one of the constants above if it is not there."""
        found: Ids = np.full(len(names), MISSING, dtype=np.int64)
        found[~names.any(axis=1)] = NO_PARENT
        if not len(self._keys):
            return found
        keys = keys_of(names)
        order = np.argsort(keys)  # to look for them in this order is three times as fast
        at = np.empty(len(names), dtype=np.int64)
        at[order] = np.searchsorted(self._keys, keys[order])
        at = self._order[np.minimum(at, len(self._keys) - 1)]
        is_there = (self._names[at] == names).all(axis=1)
        found[is_there] = at[is_there]
        return found
