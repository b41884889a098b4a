"""How much of a prompt the pool has: hashes are made a few at a time, up to the first that is not there."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from offload.messages import NAME_BYTES, Names
from offload.naming import bag_names
from offload.peering.locating import Locate, tokens_in
from offload.worker.peers.holdings import Holdings
from offload.worker.seals import num_leading

_SLICE_TOKENS = 1024
"""Hashed in one go. The interpreter is held for about half a millisecond, which a step of the engine may wait
for; then others have their turn."""
_MOST_SLICES = 2048
"""Whose hashes are kept: two million tokens in blocks of 16, about 5 MB."""
MOST_AT_ONCE = 8
"""Questions that are looked up in turns; others are told that it is busy."""


class HashPrompt(Protocol):
    """Makes prefix hashes as the engine does.

    Attributes:
        position_tokens: tokens of a chain position.
    """

    position_tokens: int

    def __call__(
        self,
        token_ids: Sequence[int],
        stop: int,
        hashes: list[bytes],
        cache_salt: str,
        adapter: tuple[str, ...],
    ) -> None:
        """Append to ``hashes``, which has those of leading positions, the next ones up to token ``stop``."""


class Locator:
    """For the server's thread. What is kept are hashes, never answers: the pool changes."""

    def __init__(self, hash_prompt: HashPrompt, columns: int, has_bags: bool) -> None:
        """Look up nothing yet.

        Args:
            hash_prompt: makes hashes.
            columns: slots of a position.
            has_bags: a request can go on only where there is a bag, too.
        """
        self.position_tokens = hash_prompt.position_tokens
        self.num_running = 0
        self._hash = hash_prompt
        self._columns = columns
        self._has_bags = has_bags
        self._slice = max(1, _SLICE_TOKENS // self.position_tokens) * self.position_tokens
        self._kept: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def look_up(self, question: Locate, holdings: Holdings) -> Iterator[int]:
        """Leading tokens that are there, as far as is known yet: the last is the answer.

        Each step hashes 1,024 tokens at most, and none that were hashed lately. It ends at the first position
        that is not there. Raises ProtocolError: the question is wrong.
        """
        ids = tokens_in(question)
        digest = hashlib.blake2b(
            repr((question.cache_salt, question.adapter)).encode(errors="replace"), digest_size=16
        )
        hashes: list[bytes] = []
        depth = 0
        while (at := len(hashes)) * self.position_tokens + self.position_tokens <= len(ids):
            first = at * self.position_tokens
            stop = min(first + self._slice, len(ids) // self.position_tokens * self.position_tokens)
            digest.update(question.tokens[4 * first : 4 * stop])
            key = digest.digest()
            known = self._kept.get(key)
            if known is None:
                self._hash(ids, stop, hashes, question.cache_salt, question.adapter)
                known = self._kept[key] = hashes[at:]
                if len(self._kept) > _MOST_SLICES:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
                hashes += known
            called = _as_names(known)
            num_there = self._num_there(called, holdings)
            there = called[:num_there]
            if self._has_bags:
                bags = np.flatnonzero(holdings.has(bag_names(there)))
                depth = at + int(bags[-1]) + 1 if len(bags) else depth
            else:
                depth = at + num_there
            yield depth * self.position_tokens
            if num_there < len(known):
                return
        yield depth * self.position_tokens

    def check_invariants(self) -> None:
        """No more is kept, and no more looked up, than may be."""
        assert len(self._kept) <= _MOST_SLICES, f"{len(self._kept)} slices are kept"
        assert 0 <= self.num_running <= MOST_AT_ONCE, f"{self.num_running} questions at once"

    def _num_there(self, names: Names, holdings: Holdings) -> int:
        """Leading positions that are there; all, where only bags are kept."""
        if not self._columns:
            return len(names)
        return num_leading(holdings.has(names))


def _as_names(hashes: Sequence[bytes]) -> Names:
    padded = b"".join(each.ljust(NAME_BYTES, b"\0") for each in hashes)
    return np.frombuffer(padded, dtype=np.uint8).reshape(-1, NAME_BYTES)
