"""How extents are called in a store that engines share, and how names are looked for there."""

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from offload.messages import Names

KEY_PREFIX = b"kvo1:"
"""Of all keys of ours. Behind it come the namespace, the rank, the name, and maybe a suffix."""

NAMESPACE = KEY_PREFIX + b"namespace-"
"""The same of keys that have namespaces in clear."""

_POINTS = 16
"""Names that a search asks for at once."""
_BATCH = 256
"""The same where all are asked for."""

Exist = Callable[[Sequence[bytes]], Sequence[bool]]
"""Asks a store, in one go, which of these keys it has."""


class Whose(NamedTuple):
    """Of whom the bytes are.

    Attributes:
        namespace: all that must be equal for bytes to be usable, in clear; without the rank.
        rank: and how many there are, and its share of what they hold alike.
    """

    namespace: str
    rank: str

    @property
    def digest(self) -> bytes:
        """Of both, 32 bytes."""
        return hashlib.sha256(f"{self.namespace}\n{self.rank}".encode()).digest()

    @property
    def prefix(self) -> bytes:
        """Of its keys."""
        name = hashlib.sha256(self.namespace.encode()).hexdigest()[:16]
        return KEY_PREFIX + f"{name}:{self.digest.hex()[:8]}:".encode()


class StoreNames(NamedTuple):
    """What extents are called there.

    Attributes:
        prefix: of all keys; see ``Whose``.
        name_key: names are keyed with it, so that nobody who lists the store can confirm a guess of a prompt;
            None: they are not.
    """

    prefix: bytes
    name_key: bytes | None = None

    def name(self, name: Names) -> bytes:
        """The store's name for that of an extent."""
        plain = name.tobytes()
        return plain if self.name_key is None else hmac.digest(self.name_key, plain, "sha256")

    def key(self, name: bytes, suffix: bytes) -> bytes:
        """The key of what has that name there."""
        key = self.prefix + name.hex().encode()
        return key + b":" + suffix.hex().encode() if suffix else key

    def find(self, names: Names, suffix: bytes, exist: Exist, *, is_last_wanted: bool) -> int:
        """How many leading names are there, or those up to the last that is: see ``MediumEnd.num_good``."""
        keys = [self.key(self.name(name), suffix) for name in names]
        return _last_found(exist, keys) if is_last_wanted else _num_leading(exist, keys)


def namespace_key(name: bytes) -> bytes:
    """Where the namespace of that short name lies in clear."""
    return NAMESPACE + name


def _num_leading(exist: Exist, keys: Sequence[bytes]) -> int:
    """How many leading ones are there, if none is behind one that is not. A few round trips."""
    low, high = 0, len(keys)  # so many are there; so many may be
    while low < high:
        points = sorted({low + (high - low) * step // _POINTS for step in range(1, _POINTS + 1)})
        points = [point for point in points if point > low]
        for point, is_there in zip(points, exist([keys[each - 1] for each in points]), strict=True):
            if not is_there:
                high = point - 1
                break
            low = point
    return low


def _last_found(exist: Exist, keys: Sequence[bytes]) -> int:
    """How many there are up to the last that is there, looked for from the end."""
    for stop in range(len(keys), 0, -_BATCH):
        start = max(0, stop - _BATCH)
        found = np.flatnonzero(exist(keys[start:stop]))
        if len(found):
            return start + int(found[-1]) + 1
    return 0
