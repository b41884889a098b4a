"""What peers have: engines, here or elsewhere, that let others fetch from their pools."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

import numpy as np

from offload.messages import Ids, is_private
from offload.naming import ROOT, bag_names, rows
from offload.peer_messages import PeerLife
from offload.scheduler.tiers.beliefs import FRESH_SECONDS, Beliefs
from offload.scheduler.tiers.names import name_of, names_of, places_of
from offload.scheduler.tiers.probes import MOST_NAMES, Probes
from offload.scheduler.tiers.siblings import SiblingDirectory

_MOST_ANSWERS = 4096
_AGAIN_NAMES = 256
"""Of a question whether there is more by now."""
_MOST_RELEASES = 4096
_RELEASE = b"release "


class _Answer(NamedTuple):
    """What came of one question.

    Attributes:
        at: when; ``-inf``: none has come, or it was wrong.
        depth: positions that were found.
        reason: why there are no more, if a peer said so.
    """

    at: float
    depth: int
    reason: str


class Found(NamedTuple):
    """What peers had of a chain when they were asked last.

    Attributes:
        at: when the oldest of the answers came that make it up; ``-inf``: some have not.
        depth: leading positions; with checkpoints, those up to the deepest one.
        reason: why there are no more, if a peer said so.
    """

    at: float
    depth: int
    reason: str


_NO_ANSWER = _Answer(-inf, 0, "")


class PeerDirectory(SiblingDirectory):
    """Answers of an age, in which nothing is written.

    Names are those of positions, so what is there is known to the last one. A name that is found stands for
    all of its chain: how many names of a question are there says how far the chain goes. With checkpoints the
    last bag is looked for. A question goes to one peer, or to all, and what the best of them has counts.

    After a reset nobody has anything, until the new weights have a name.
    """

    def __init__(
        self, beliefs: Beliefs, probes: Probes, clock: Callable[[], float], *, num_parts: int, has_bags: bool
    ) -> None:
        """Know nothing.

        Args:
            beliefs: not asked for anything here.
            probes: asks.
            clock: in seconds.
            num_parts: ranks that divide names among them.
            has_bags: whether checkpoints are looked for.
        """
        super().__init__(beliefs, probes, clock, num_parts=num_parts)
        self._has_bags = has_bags
        self._known: dict[bytes, _Answer] = {}
        self._reason = (b"", "")  # of the answer that is learned next, by its key
        self._told: dict[PeerLife, deque[bytes]] = {}  # names of leases that are not needed any more
        self._numbers = count()

    @property
    def is_over(self) -> bool:
        """Whether peers have nothing for the weights that this engine has."""
        return is_private(self._suffix)

    def is_alone(self, request_id: str) -> bool:
        """Whether no peer has anything, as far as is known of late. Asks, now and then."""
        return self._is_useless(request_id)

    def answer(self, life: PeerLife | None, chain: Sequence[bytes]) -> Found:
        """What is known of all of a chain, at that peer or at the best."""
        found = [self._known.get(key, _NO_ANSWER) for key in self._keys(life, chain)]
        reason = next((each.reason for each in found if each.reason), "")
        return Found(min(each.at for each in found), max(each.depth for each in found), reason)

    def is_fresh(self, found: Found) -> bool:
        """Whether nobody need be asked again."""
        return found.at >= self._clock() - FRESH_SECONDS

    def is_asked(self, life: PeerLife | None, chain: Sequence[bytes]) -> bool:
        """Whether a question about that chain is under way."""
        return any(self._probes.is_asked(key) for key in self._keys(life, chain))

    def ask(self, request_id: str, life: PeerLife | None, chain: Sequence[bytes], start: int) -> bool:
        """Ask how far a chain goes there. Returns whether that request is to wait a moment for the answer.

        Args:
            request_id: who asks.
            life: the peer; None: all.
            chain: up to the last position that is of use.
            start: leading positions that nobody need be asked for.
        """
        keys, suffix = self._keys(life, chain), self._suffix
        if self._has_bags:
            depths = np.arange(max(start, len(chain) - MOST_NAMES), len(chain)) + 1
        else:
            most = _AGAIN_NAMES if keys[0] in self._known else MOST_NAMES
            depths = _depths(start, len(chain), most)
        names = rows(names_of([chain[depth - 1] for depth in depths.tolist()]))
        names = bag_names(names) if self._has_bags else names
        owners, waits = places_of(names) % len(keys), False
        for part, key in enumerate(keys):
            own = np.flatnonzero(owners == part)
            learn = partial(self._learn_depth, key, depths[own], 0 if self._has_bags else start)
            if not len(own):
                learn(0)
                continue
            note = partial(self._note, key)
            waits |= self._probes.ask(
                *(request_id, key, names[own], learn),
                suffix=suffix,
                is_last_wanted=self._has_bags,
                life=life,
                note=note,
            )
        return waits

    def forget(self, life: PeerLife | None, chain: Sequence[bytes]) -> None:
        """What was said of that chain could not be had."""
        for key in self._keys(life, chain):
            self._known.pop(key, None)

    def release(self, life: PeerLife, tip: bytes) -> None:
        """What that peer leases up to that name is not needed any more: tell it with the next plan."""
        tips = self._told.setdefault(life, deque(maxlen=_MOST_RELEASES))
        tips.append(tip)
        while len(self._told) > _MOST_RELEASES:
            del self._told[next(iter(self._told))]

    def tidy(self) -> None:
        for life, tips in list(self._told.items()):
            key = _RELEASE + next(self._numbers).to_bytes(8, "big")
            if self._probes.breaker.is_outage or self._probes.release(key, rows(tips), life):
                del self._told[life]  # in an outage leases end by time

    @property
    def has_news(self) -> bool:
        """Whether peers are yet to be told something."""
        return bool(self._told)

    def depth(self, names: Sequence[bytes]) -> int:
        """All of them: it is asked for what an answer said."""
        return len(names)

    def drop(self, names: Sequence[bytes], index: int) -> int:
        """Whoever wanted it is told elsewhere."""
        return 0

    def name_weights(self, suffix: bytes) -> None:
        super().name_weights(suffix)
        self._is_over = is_private(suffix)

    def check_invariants(self) -> None:
        """There are not too many answers, and nothing is told to nobody."""
        super().check_invariants()
        assert len(self._known) <= _MOST_ANSWERS, f"{len(self._known)} answers are known"
        assert all(self._told.values()), f"nothing is to be told: {self._told}"

    # Private

    def _begin(self, suffix: bytes) -> None:
        super()._begin(suffix)
        self._known = {}

    def _keys(self, life: PeerLife | None, chain: Sequence[bytes]) -> list[bytes]:
        """Of questions about a chain. Ranks that share bytes have some of the checkpoints' names each."""
        key = (name_of(chain[-1]) if chain else ROOT) + str(life or "").encode()
        num_parts = self._num_parts if self._has_bags else 1
        return [part.to_bytes(2, "big") + key for part in range(num_parts)]

    def _note(self, key: bytes, reason: str) -> None:
        self._reason = (key, reason)

    def _learn_depth(self, key: bytes, depths: Ids, start: int, num_found: int) -> None:
        """The name of that number among these, counted from 1, is there; behind it none."""
        depth = int(depths[num_found - 1]) if num_found else start
        (noted, reason), self._reason = self._reason, (b"", "")
        self._put(key, _Answer(self._clock(), depth, reason if noted == key else ""))

    def _put(self, key: bytes, answer: _Answer) -> None:
        if len(self._known) >= _MOST_ANSWERS and key not in self._known:
            self._known = {}
        self._known[key] = answer


def _depths(start: int, stop: int, most: int) -> Ids:
    """So many depths behind ``start`` at most, evenly, the last one among them. There is one at least."""
    step = max(1, -(-(stop - start) // most))
    return np.arange(stop, start, -step)[::-1].astype(np.int64)
