"""What peers are shown of a pool that had something before, and of tips that they release."""

import numpy as np
import pytest

from offload.messages import PRIVATE, Kept, Listening
from offload.worker.media.base import PoolSlots
from offload.worker.peers.shown import _MOST_RELEASED, Shown
from offload.worker.pool.region_index import SlotRows
from offload.worker.seals import SealTables
from tests.offload.worker.peers.pools import EPOCH, PEER, about, names

SLOT, SLOTS = 64, 8
CALLED = names(SLOTS)
MEMORY = np.zeros((SLOTS, SLOT), dtype=np.uint8)


def kept(slots: list[int], generation: int) -> Kept:
    at = np.array(slots)
    none = np.zeros((len(at), 32), dtype=np.uint8)
    return Kept(at, np.full(len(at), generation), CALLED[at], none, np.zeros(len(at), dtype=np.int64))


def shown(adopted: Kept | None = None) -> Shown:
    tables = SealTables.of_one(SLOTS)
    tables.fills[:] = 5
    made = about(slot_bytes=SLOT, columns=1, peer=PEER)
    return Shown(made, PoolSlots(MEMORY.ctypes.data, SLOTS, SLOT), tables, None, adopted)


@pytest.mark.parametrize("suffix", [b"", b"vnamed"])
def test_what_was_there_before_is_of_the_weights_at_the_start(suffix: bytes) -> None:
    found = shown(kept([0, 1, 2], 5))
    assert not found.holdings.has(CALLED).any()
    found.begin(Listening(PEER, EPOCH, suffix))
    assert found.holdings.has(CALLED).sum() == (0 if suffix else 3)
    found.begin(Listening(PEER, b"epoch002", b""))
    assert not found.holdings.has(CALLED).any(), "a reset is a reset"
    found.check_invariants()


def test_of_private_weights_nothing_is_shown() -> None:
    found = shown()
    found.begin(Listening(PEER, EPOCH, PRIVATE + b"x"))
    found.keep(kept([0, 1], 5))
    assert not found.holdings.has(CALLED).any()
    found.begin(Listening(PEER, EPOCH, b"v"))
    found.keep(kept([0, 1], 5))
    assert found.holdings.has(CALLED).sum() == 2


def test_if_another_life_cannot_begin_nothing_is_shown_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shown()
    found.begin(Listening(PEER, EPOCH, b""))

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(found.holdings, "clear", fail)
    with pytest.raises(MemoryError):
        found.begin(Listening(PEER, b"epoch002", b"v"))
    assert not found.shows(EPOCH)
    found.keep(kept([0, 1], 5))
    assert not found.holdings.has(CALLED).any(), "this is of other weights"


def test_tips_that_wait_are_bounded() -> None:
    found = shown()
    found.begin(Listening(PEER, EPOCH, b""))
    for tip in range(_MOST_RELEASED + 10):
        found.release(EPOCH, tip.to_bytes(32, "big"))
    found.check_invariants()
    waits = found.take_released()
    assert len(waits) == _MOST_RELEASED
    assert waits[-1] == (_MOST_RELEASED + 9).to_bytes(32, "big")


def test_neighbours_are_sent_in_one_piece() -> None:
    found = shown()
    slots = np.array([3, 4, 5, 1, 2, 7])
    pieces = found.pieces(SlotRows(slots, slots, slots.astype(np.uint64)))
    assert [len(piece) // SLOT for piece in pieces] == [3, 2, 1]
    assert found.pieces(SlotRows(slots[:0], slots[:0], slots[:0].astype(np.uint64))) == []
