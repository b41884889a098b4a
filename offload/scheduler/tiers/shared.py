"""What a tier has that others write, too: beliefs, and questions where there are none."""

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from allocator import Note
from offload.messages import PRIVATE, SUFFIX_BYTES, Extents, Ids
from offload.naming import bag_names, rows
from offload.peer_messages import PeerLife
from offload.scheduler.tiers.announced import Announced
from offload.scheduler.tiers.beliefs import FRESH_SECONDS, KEEP_SECONDS, Beliefs
from offload.scheduler.tiers.names import Path, name_of, names_of, places_of
from offload.scheduler.tiers.probes import MOST_NAMES, Probes

_MOST_ANSWERS = 4096
_UNKNOWN = (-inf, 0)


class SharedReading(NamedTuple):
    """Extents ``start`` and so on of a chain, that are read by name, from that peer if one is meant."""

    names: Sequence[bytes]
    start: int
    suffix: bytes
    life: PeerLife | None = None

    @property
    def place(self) -> str:
        return "" if self.life is None else f"peer {self.life.peer}"

    def extents(self, starts: Ids, skips: Ids) -> Extents:
        return _extents(self.names, self.start, self.suffix, starts, skips)._replace(life=self.life)


class SharedWriting(NamedTuple):
    """Extents ``start <= i < stop`` of a chain, that are written unless they are there, behind ``parent``.

    ``note``: made by that of ``Contents.write``.
    """

    names: Sequence[bytes]
    start: int
    stop: int
    suffix: bytes
    parent: bytes | None
    note: object


class SharedDirectory:
    """Extents by name. The store decides where they lie, and for how long.

    It believes what it has seen, in answers and in what it has written itself. What it finds to be gone is
    not believed in, so that it is not offered again. After a reset all names get a random suffix, which no
    other engine has: so neither reads what the other has written, and nothing must be deleted. If the new
    weights are given a name, the suffix is made from that, and all that have it share.
    """

    num_used = None
    has_room = True

    def __init__(
        self,
        beliefs: Beliefs,
        probes: Probes,
        clock: Callable[[], float],
        make_secret: Callable[[int], bytes] = secrets.token_bytes,
        announced: Announced | None = None,
        *,
        num_parts: int = 1,
    ) -> None:
        """Believe in nothing.

        Args:
            beliefs: names that were seen.
            probes: asks.
            clock: in seconds.
            make_secret: gives so many other bytes at each call.
            announced: what KV events tell; None: there are none.
            num_parts: ranks that divide names among them.
        """
        self._beliefs = beliefs
        self._probes = probes
        self._clock = clock
        self._make_secret = make_secret
        self._announced = announced
        self._num_parts = num_parts
        self._suffix = b""
        self._writing: dict[bytes, float] = {}
        self._checkpoints: dict[bytes, tuple[float, int]] = {}  # by question: since when, and where

    def touch(self, names: Sequence[bytes]) -> None:
        """What goes first is the store's to say."""

    def find(self, request_id: str, names: Sequence[bytes]) -> int | None:
        fresh = self._beliefs.depth(names, FRESH_SECONDS)
        if fresh == len(names):
            return fresh
        if self._beliefs.is_open(names, fresh):
            asked = names[fresh : fresh + MOST_NAMES]
            learn = partial(self._learn, names, fresh, len(asked))
            if self._probes.ask(request_id, asked[-1], rows(asked), learn, suffix=self._suffix):
                return None
        return self._beliefs.depth(names)

    def find_checkpoint(
        self, request_id: str, chain: Sequence[bytes], limit: int, path_to: Callable[[int], Path]
    ) -> int | None:
        if limit < 1:
            return 0
        keys = [name_of(chain[limit - 1]) + part.to_bytes(2, "big") for part in range(self._num_parts)]
        if self._ask_for_last(request_id, keys, chain, limit, path_to):
            return None
        depth = max(self._checkpoints.get(key, _UNKNOWN)[1] for key in keys)
        if not depth:
            return 0
        path = path_to(depth)
        return depth if self._beliefs.depth(path.names) == len(path.names) else 0

    def answered(self) -> list[str]:
        return self._probes.answered()

    def depth(self, names: Sequence[bytes]) -> int:
        return self._beliefs.depth(names)

    def known_depth(self, names: Sequence[bytes]) -> int:
        return self._beliefs.depth(names, also=self._writing)

    def read(self, names: Sequence[bytes], start: int, stop: int) -> SharedReading:
        return SharedReading(names[start:stop], start, self._suffix)

    def end_read(self, reading: SharedReading) -> None:
        """Nothing keeps it there meanwhile."""

    def write(
        self, names: Sequence[bytes], stop: int, limit: int, note: Note | None = None
    ) -> SharedWriting | None:
        start = self.known_depth(names[:stop])
        stop = min(stop, start + limit)
        while stop > start and names[stop - 1] in self._writing:
            stop -= 1
        if start == stop:
            return None
        parent = names[start - 1] if start else None
        told = None if note is None else note(start, stop)
        writing = SharedWriting(names[start:stop], start, stop, self._suffix, parent, told)
        self._writing.update(dict.fromkeys(writing.names, inf))
        return writing

    def extents(self, writing: SharedWriting, job_id: int, starts: Ids) -> Extents:
        skips = np.zeros(len(writing.names), dtype=np.int64)
        return _extents(writing.names, writing.start, writing.suffix, starts, skips)

    def end_write(self, writing: SharedWriting, *, is_good: bool) -> None:
        if writing.suffix != self._suffix:
            return
        for name in self._writing.keys() & writing.names:
            del self._writing[name]
        if is_good:
            self._beliefs.believe(writing.names)
            if self._announced is not None:
                self._announced.announce(writing.names, writing.parent, writing.note)

    def drop(self, names: Sequence[bytes], index: int) -> int:
        return self._forget(names, index, KEEP_SECONDS)

    def reset(self) -> None:
        self._begin(PRIVATE + self._make_secret(SUFFIX_BYTES - 1))

    def name_weights(self, suffix: bytes) -> None:
        self._begin(suffix)

    def tidy(self) -> None:
        """Nothing is left to do."""

    def check_invariants(self) -> None:
        """There are not too many answers."""
        self._beliefs.check_invariants()
        if self._announced is not None:
            self._announced.check_invariants()
        assert len(self._checkpoints) <= _MOST_ANSWERS, f"{len(self._checkpoints)} answers are known"

    def _forget(self, names: Sequence[bytes], index: int, seconds: float) -> int:
        """That one is not asked for again so long; returns how many were believed to be behind it."""
        if self._announced is not None:
            self._announced.take_back(names[index:])
        num_behind = max(0, self._beliefs.depth(names) - index - 1)
        self._beliefs.deny(names, index, seconds)
        return num_behind

    def _begin(self, suffix: bytes) -> None:
        self._suffix = suffix
        self._beliefs.clear()
        self._writing, self._checkpoints = {}, {}
        if self._announced is not None:
            self._announced.clear()

    def _ask_for_last(
        self,
        request_id: str,
        keys: Sequence[bytes],
        chain: Sequence[bytes],
        limit: int,
        path_to: Callable[[int], Path],
    ) -> bool:
        """Ask which checkpoint is the last, where that is not known of late. Returns whether to wait.

        Ranks that share bytes have some of the names each. What all of them say of a question is the least
        that one says, so each of them gets a question of its own.
        """
        late = self._clock() - FRESH_SECONDS
        old = [part for part, key in enumerate(keys) if self._checkpoints.get(key, _UNKNOWN)[0] < late]
        if not old:
            return False
        first, waits = max(0, limit - MOST_NAMES), False
        names = bag_names(rows(names_of(chain[first:limit])))
        owners = places_of(names) % self._num_parts
        for part in old:
            own = np.flatnonzero(owners == part)
            learn = partial(self._learn_checkpoint, keys[part], own + first + 1, path_to)
            if not len(own):
                learn(0)
                continue
            waits |= self._probes.ask(
                request_id, keys[part], names[own], learn, suffix=self._suffix, is_last_wanted=True
            )
        return waits

    def _learn(self, names: Sequence[bytes], start: int, num_asked: int, num_found: int) -> None:
        """Of so many names from ``start`` on, ``num_found`` leading ones are there."""
        stop = start + num_found
        self._beliefs.believe(names[:stop])
        if num_found < num_asked:
            self._beliefs.deny(names, stop, FRESH_SECONDS)
            if self._announced is not None:
                self._announced.take_back(names[stop:])

    def _learn_checkpoint(
        self, key: bytes, depths: Ids, path_to: Callable[[int], Path], num_found: int
    ) -> None:
        """Of bags at these depths the last that is there is the one of that number, counted from 1."""
        depth = int(depths[num_found - 1]) if num_found else 0
        if depth:
            names = path_to(depth).names
            if self._beliefs.are_gone(names):
                depth = 0  # it is there, and what it takes to go on is not
            else:
                self._beliefs.believe(names)
        if len(self._checkpoints) >= _MOST_ANSWERS:
            self._checkpoints = {}
        self._checkpoints[key] = (self._clock(), depth)


def _extents(names: Sequence[bytes], start: int, suffix: bytes, starts: Ids, skips: Ids) -> Extents:
    named, num_extents = rows(names), len(names)
    generations = np.ones(num_extents, dtype=np.int64)
    depths = np.arange(start, start + num_extents)
    return Extents(places_of(named), generations, starts, skips, named, depths=depths, suffix=suffix)
