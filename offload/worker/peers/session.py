"""One who asks, and what is answered: a conversation that knows of no sockets."""

import time
from collections.abc import Callable
from enum import StrEnum

import numpy as np

from offload.messages import NAME_BYTES, Listening
from offload.peering.frames import Refused, decoder, framed
from offload.peering.locating import Asks, Heard, Locate, Located
from offload.peering.talk import RefusedError, Talk, hear, say
from offload.worker.peers.askers import Asker
from offload.worker.peers.handshake import answer
from offload.worker.peers.holdings import Held
from offload.worker.peers.locator import MOST_AT_ONCE
from offload.worker.peers.protocol import (
    About,
    Check,
    Get,
    Over,
    Ping,
    Probe,
    Question,
    Reach,
    Release,
    Rows,
    Told,
    Unchanged,
    Welcome,
    check_get,
    ids_in,
    in_bytes,
    names_in,
)
from offload.worker.peers.shown import Shown
from offload.worker.pool.region_index import SlotRows
from offload.worker.seals import BROKEN, num_leading, num_whole

_QUESTION, _LOCATE = decoder(Question), decoder(Locate)
_ASKER = About({}, 0, 0, 0, 0, 0, 0)
"""Whoever only asks where prompts are."""
_ASK_FIRST_RANK = "only rank 0 of an engine says which prompts it has; give the port that listen names"
_VIEWS = 256
"""Sent at once."""


class Stage(StrEnum):
    """What a conversation is at."""

    SHAKES_HANDS = "handshake"
    WAITS = "idle"
    """For the next question."""
    ANSWERS = "busy"
    """Or a question has come in part."""


class Session:
    """The side that answers. Wrong questions end it, and it harms nobody else.

    Attributes:
        stage: what it is at.
        other: who asks; None: not known yet.
        num_questions: so far.
        bytes_sent: of slots.
    """

    def __init__(
        self, shown: Shown, key: bytes, host: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nobody has said anything.

        Args:
            shown: what is served.
            key: the fleet's; empty: it has none.
            host: who asks is there.
            clock: in seconds.
        """
        self.stage = Stage.SHAKES_HANDS
        self.other: About | None = None
        self.num_questions = 0
        self.bytes_sent = 0
        self._shown = shown
        self._key = key
        self._host = host
        self._clock = clock

    def talk(self) -> Talk[None]:
        """All of it, until the connection is closed from outside. Raises OSError: close it."""
        shown = self._shown
        other = yield from answer(self._key, shown.about)
        life = shown.life
        if isinstance(other, Asks):
            yield from self._locate()
            return
        memory = shown.memory if self._is_near(other) else None
        yield from say(Welcome(shown.about, life.epoch, life.suffix, memory))
        self.other = other
        shown.count.connections += 1
        asker = shown.askers.enter(self._host, other.peer.hex())
        try:
            yield from self._answer(asker)
        finally:
            shown.askers.leave(asker)

    def _answer(self, asker: Asker) -> Talk[None]:
        """Question after question."""
        shown = self._shown
        while True:
            self.stage = Stage.WAITS
            question = yield from hear(_QUESTION)
            self.stage = Stage.ANSWERS
            self.num_questions += 1
            shown.count.questions += 1
            asker.questions += 1
            life = shown.life
            if isinstance(question, Get):
                begun = self._clock()
                num_slots = yield from self._get(question, life)
                shown.askers.serve(asker, num_slots * shown.slot_bytes)
                asker.is_near = question.is_near and self._is_near(self.other)
                asker.seconds += 0.0 if question.is_near else self._clock() - begun
            elif isinstance(question, Reach):
                yield from say(shown.reachable)
            elif isinstance(question, Check):
                yield from say(Unchanged(self._num_unchanged(question)))
            else:
                num_found = self._tell(question, life)
                yield from say(Told(life.epoch, life.suffix, num_found, self._refuses(question, num_found)))

    def _is_near(self, other: About | None) -> bool:
        """Whether that one is on this machine; by NIXL others read slots themselves, too."""
        return other is not None and bool(other.machine) and other.machine == self._shown.about.machine

    def _locate(self) -> Talk[None]:
        """Say which prompts the pool has, in small steps: others have their turns in between."""
        shown, locator = self._shown, self._shown.locator
        if locator is None:
            yield from say(Refused(_ASK_FIRST_RANK))
            raise RefusedError(_ASK_FIRST_RANK)
        yield from say(Heard(locator.position_tokens))
        self.other = _ASKER
        shown.count.connections += 1
        while True:
            self.stage = Stage.WAITS
            question = yield from hear(_LOCATE)
            self.stage = Stage.ANSWERS
            self.num_questions += 1
            shown.count.located += 1
            if locator.num_running >= MOST_AT_ONCE:
                yield from say(Located(0, True))
                continue
            life, num_tokens = shown.life, 0
            locator.num_running += 1
            try:
                for num_tokens in locator.look_up(question, shown.holdings):  # noqa: B007
                    yield ()
            finally:
                locator.num_running -= 1
            yield from say(Located(num_tokens if shown.shows(life.epoch) else 0))

    def check_invariants(self) -> None:
        """Nobody unknown has asked or got anything."""
        assert self.other is not None or not self.num_questions, f"{self.num_questions} questions of nobody"
        assert self.other is not None or self.stage is Stage.SHAKES_HANDS, f"nobody is at {self.stage}"

    def _tell(self, question: Ping | Probe | Release, life: Listening) -> int:
        if isinstance(question, Release):
            self._shown.release(question.epoch, question.tip)
            return 0
        if isinstance(question, Ping) or question.suffix != life.suffix or not question.names:
            return 0
        found = self._shown.holdings.has(names_in(question.names))
        if not self._shown.shows(life.epoch):
            return 0
        if question.is_last_wanted:
            return int(np.flatnonzero(found).max(initial=-1)) + 1
        return num_leading(found)

    def _refuses(self, question: Ping | Probe | Release, num_found: int) -> bool:
        """Whether the prompt that is asked about is not handed off. What is all there is had all the same."""
        if not isinstance(question, Probe) or num_found * NAME_BYTES == len(question.names):
            return False
        return self._shown.refuses(question.names[-NAME_BYTES:])

    def _get(self, get: Get, life: Listening) -> Talk[int]:
        """Returns of how many slots it has had the bytes."""
        num_asked = check_get(get)
        held = Held(0, _NO_ROWS)
        if num_asked and get.suffix == life.suffix:
            held = self._shown.holdings.find(names_in(get.names), get.counts, get.skips)
        rows = held.rows
        where = (in_bytes(rows.slots), in_bytes(rows.generations)) if get.is_near else (b"", b"")
        if not self._shown.shows(life.epoch):
            held, where = Held(0, _NO_ROWS), (b"", b"")
            rows = held.rows
        head = framed(Rows(life.epoch, life.suffix, held.num_extents, in_bytes(rows.sums), *where))
        num_bytes = len(rows.slots) * self._shown.slot_bytes
        self._shown.count.slots += len(rows.slots)
        if get.is_near:
            yield [head]
            return len(rows.slots)
        pieces: list[bytes | memoryview] = [head, *self._shown.pieces(rows)]
        for start in range(0, len(pieces), _VIEWS):
            yield pieces[start : start + _VIEWS]
        self.bytes_sent += num_bytes
        self._shown.count.bytes_sent += num_bytes
        num_good = self._num_current(held, get.counts) if self._shown.shows(life.epoch) else 0
        self._shown.count.gone += held.num_extents - num_good
        yield from say(Over(num_good))
        return len(rows.slots)

    def _num_unchanged(self, check: Check) -> int:
        """Leading slots that still hold what was said; whoever asks may say anything."""
        count = len(check.slots) // 8
        slots, generations = ids_in(check.slots, count), ids_in(check.generations, count)
        if not count or slots.min() < 0 or slots.max() >= self._shown.num_slots:
            return 0
        are = self._shown.holdings.are_current(SlotRows(slots, generations, _NO_ROWS.sums))
        are &= generations > BROKEN
        if not self._shown.shows(check.epoch):
            return 0
        self._shown.count.gone += not are.all()
        return num_leading(are)

    def _num_current(self, held: Held, counts: list[int]) -> int:
        """Leading extents of which no slot has been filled anew since they were found."""
        ends = np.cumsum([0, *counts[: held.num_extents]])
        return num_whole(ends, num_leading(self._shown.holdings.are_current(held.rows)))


_NO_ROWS = SlotRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))
