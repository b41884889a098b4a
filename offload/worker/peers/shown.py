"""What peers are shown of this rank's pool: which life it is in, what it holds, and the bytes."""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from offload.messages import MOST_REFUSED, PRIVATE, Kept, Listening, Verdict, is_private
from offload.worker.media.base import PoolSlots
from offload.worker.peers.askers import Askers
from offload.worker.peers.holdings import Holdings
from offload.worker.peers.locator import Locator
from offload.worker.peers.protocol import EPOCH_BYTES, About, Memory, Reachable
from offload.worker.pool.region_index import SlotRows
from offload.worker.seals import SealTables

_MOST_RELEASED = 1 << 14
"""Tips that wait for the engine's next step. What is not told ends by time."""
_REFUSED_SECONDS = 10.0
"""So long a refusal is told: whoever waits asks twenty times a second, and others may ask for it anew."""


class Count:
    """What peers have had."""

    def __init__(self) -> None:
        """Nothing."""
        self.connections = 0
        """That have been let in."""
        self.refused = 0
        """That have not, or were not of the protocol."""
        self.questions = 0
        self.located = 0
        """Prompts that were asked about."""
        self.slots = 0
        """Whose bytes were sent, or read by peers themselves."""
        self.bytes_sent = 0
        self.gone = 0
        """Extents that were found and not there any more when they had been sent."""


class Shown:
    """For several threads: one that writes down what slots hold, the engine's, and those that answer."""

    def __init__(
        self,
        about: About,
        slots: PoolSlots,
        tables: SealTables,
        memory: Memory | None = None,
        adopted: Kept | None = None,
    ) -> None:
        """Nothing is shown before the first ``begin``.

        Args:
            about: what peers must have in common with it.
            slots: the pool.
            tables: seals of its slots.
            memory: where peers on the same machine find it; None: they cannot.
            adopted: what it has from before, if it outlives engines.
        """
        self.about = about
        self.memory = memory
        self.reachable = Reachable()
        """Where peers find it that read it by NIXL; without metadata: they cannot."""
        self.slot_bytes = slots.slot_bytes
        self.num_slots = slots.num_slots
        self.holdings = Holdings(tables, about.columns)
        self.life = Listening(about.peer, bytes(EPOCH_BYTES), b"")
        """The one that is shown. Before the first step of the engine nothing is in it."""
        self.count = Count()
        self.askers = Askers(about.peer.hex())
        self.locator: Locator | None = None
        """Says how much of a prompt is there; None: another rank does."""
        self._adopted = adopted
        self._released: deque[bytes] = deque(maxlen=_MOST_RELEASED)
        self._refused: dict[
            bytes, float
        ] = {}  # names of prompts that are not handed off, and when that was said
        num_bytes = slots.num_slots * slots.slot_bytes
        self._bytes = memoryview((ctypes.c_uint8 * num_bytes).from_address(slots.address)).cast("B")

    def begin(self, life: Listening) -> None:
        """Another life: what was shown before is not, from now on. On the thread that writes it down."""
        adopted, self._adopted = self._adopted, None
        self.life = Listening(life.peer, bytes(EPOCH_BYTES), PRIVATE)  # whatever comes of the next line
        self.holdings.clear()
        self._refused.clear()
        self.life = life
        if adopted is not None and not life.suffix:
            self.keep(adopted)

    def keep(self, kept: Kept) -> None:
        """Slots hold that since this life began. On the thread that writes it down."""
        if not is_private(self.life.suffix):
            self.holdings.keep(kept)

    def judge(self, verdicts: Sequence[Verdict]) -> None:
        """Peers may, or need not, wait for these prompts. On the thread that writes it down."""
        refused = self._refused
        for verdict in verdicts:
            refused.pop(verdict.name, None)
            if verdict.is_refused:
                refused[verdict.name] = time.monotonic()
        while len(refused) > MOST_REFUSED:
            del refused[next(iter(refused))]

    def refuses(self, name: bytes) -> bool:
        """Whether the prompt that ends there is not handed off, as far as is known."""
        return time.monotonic() < self._refused.get(name, -inf) + _REFUSED_SECONDS

    def shows(self, epoch: bytes) -> bool:
        """Whether it is in that life still."""
        return self.life.epoch == epoch

    def release(self, epoch: bytes, tip: bytes) -> None:
        """A peer has all that it needs of that chain."""
        if self.shows(epoch):
            self._released.append(tip)

    def take_released(self) -> list[bytes]:
        """What peers have said so of, since the last call."""
        found = []
        while self._released:
            found.append(self._released.popleft())
        return found

    def pieces(self, rows: SlotRows) -> list[memoryview]:
        """The bytes of these slots, in order: a piece for each run of neighbours."""
        if not len(rows.slots):
            return []
        edges = [0, *(np.flatnonzero(np.diff(rows.slots) != 1) + 1).tolist(), len(rows.slots)]
        firsts: Sequence[int] = rows.slots[edges[:-1]].tolist()
        size = self.slot_bytes
        return [
            self._bytes[first * size : (first + stop - start) * size]
            for first, (start, stop) in zip(firsts, pairwise(edges), strict=True)
        ]

    def check_invariants(self) -> None:
        """Nothing is shown of no life."""
        self.holdings.check_invariants()
        self.askers.check_invariants()
        assert len(self._released) <= _MOST_RELEASED, f"{len(self._released)} tips wait"
        assert len(self._refused) <= MOST_REFUSED, f"{len(self._refused)} prompts are refused"


class Standing(NamedTuple):
    """One who is connected.

    Attributes:
        address: from where.
        peer: the engine; "" if it does not listen itself.
        stage: what it is at.
        questions: that it has asked.
        bytes_sent: that it has got.
    """

    address: str
    peer: str
    stage: str
    questions: int
    bytes_sent: int
