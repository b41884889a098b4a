"""The protocol over connections in memory: whatever comes, what is taken for right is right."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import Kept, Listening
from offload.peering.frames import (
    HANDSHAKE_BYTES,
    HEAD_BYTES,
    MOST_FRAME_BYTES,
    ProtocolError,
    Refused,
    decoded,
    decoder,
    framed,
    sealed,
)
from offload.peering.talk import RefusedError, Talk, hear
from offload.scheduler.tiers.probes import MOST_NAMES as MOST_ASKED
from offload.testing.media.links import JoinedLink
from offload.worker.media.base import PoolSlots
from offload.worker.peers.client import Client, Got, Wanted
from offload.worker.peers.handshake import call
from offload.worker.peers.link import run
from offload.worker.peers.protocol import (
    EPOCH_BYTES,
    MOST_EXTENTS,
    MOST_NAMES,
    MOST_SLOTS,
    About,
    Get,
    Probe,
    Rows,
)
from offload.worker.peers.session import Session, Stage
from offload.worker.peers.shown import Shown
from offload.worker.seals import BROKEN, SealTables, checksums_of
from tests.offload.worker.peers.pools import EPOCH, KEY, PEER, about, contents, names
from tests.strategies import thorough

SLOT, SLOTS, NAMES = 64, 32, 24
OWN = about(slot_bytes=SLOT, columns=1)
CALLED = names(NAMES)


class Side:
    """A pool in ordinary memory."""

    def __init__(self) -> None:
        self.bytes = np.zeros((SLOTS, SLOT), dtype=np.uint8)
        self.slots = PoolSlots(self.bytes.ctypes.data, SLOTS, SLOT)


class Peer(Side):
    """One whose slots are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = SealTables.of_one(SLOTS)
        self.shown = Shown(about(slot_bytes=SLOT, columns=1, peer=PEER), self.slots, self.tables)
        self.shown.begin(Listening(PEER, EPOCH, b""))
        self.generation = 0
        self.content = contents(NAMES, SLOT)
        self.fill(range(NAMES), self.content)
        self.keep(range(NAMES), CALLED)

    def fill(self, slots: Sequence[int], content: np.ndarray) -> None:
        self.generation += 1
        at = np.array(slots)
        self.tables.fills[at] = BROKEN
        self.bytes[at] = content
        self.tables.sums[at] = checksums_of(self.slots.addresses(at)[:, None], [SLOT])
        self.tables.fills[at] = self.generation

    def keep(self, slots: Sequence[int], called: np.ndarray) -> None:
        at = np.array(slots)
        parents = np.concatenate([np.zeros_like(called[:1]), called[:-1]])
        marks = np.zeros(len(at), dtype=np.int64)
        self.shown.keep(Kept(at, np.full(len(at), self.generation), called, parents, marks))

    def refill(self, slot: int, seed: int) -> None:
        """Another store comes to a slot; of it nobody is told."""
        self.fill([slot], contents(1, SLOT, 1000 + seed))


def wanted(first: int = 0, count: int = NAMES) -> Wanted:
    """Positions of one slot each, into the last slots first."""
    slots = np.arange(SLOTS)[::-1][:count].copy()
    return Wanted(CALLED[first : first + count], [1] * count, [0] * count, slots, b"")


def check(got: Got, side: Side, peer: Peer, asked: Wanted, first: int = 0) -> None:
    """What counts as right is what was stored under these names."""
    assert got.num_right <= got.num_extents <= len(asked.counts)
    right = side.bytes[asked.slots[: got.num_right]]
    assert np.array_equal(right, peer.content[first : first + got.num_right])


def test_what_is_there_comes_whole_in_any_pieces() -> None:
    for size in (1, 3, 64, 1000):
        peer, side = Peer(), Side()

        def cut(sent: bytes, size: int = size) -> list[bytes]:
            return [sent[at : at + size] for at in range(0, len(sent), size)]

        client = Client(JoinedLink(peer.shown, KEY, to_peer=cut, from_peer=cut), KEY, OWN, side.slots)
        assert client.probe(CALLED, b"") == NAMES
        got = client.get(wanted())
        assert (got.num_extents, got.num_right) == (NAMES, NAMES)
        check(got, side, peer, wanted())
        assert not side.bytes[: SLOTS - NAMES].any(), "slots of nobody were written to"


@thorough(300)
@given(st.binary(max_size=200), st.booleans())
def test_whatever_strangers_say_ends_or_waits(said: bytes, has_begun: bool) -> None:
    peer = Peer()
    link = JoinedLink(peer.shown, KEY)
    if has_begun:
        run(call(KEY, OWN), link)
    link.send([said])
    link.session.check_invariants()
    most = MOST_FRAME_BYTES if has_begun else HANDSHAKE_BYTES
    assert link._wants is None or len(link._wants) <= most
    if not has_begun:
        assert link.session.stage is Stage.SHAKES_HANDS and peer.shown.count.questions == 0


def small_bytes(most: int) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=most)


QUESTIONS = st.one_of(
    st.builds(Probe, small_bytes(70), small_bytes(16), st.booleans()),
    st.builds(
        Get,
        st.sampled_from([CALLED[:2].tobytes(), CALLED.tobytes(), bytes(64), b"x"]),
        small_bytes(2),
        st.lists(st.integers(1, MOST_SLOTS), max_size=3),
        st.lists(st.integers(0, 1 << 20), max_size=3),
        st.booleans(),
    ),
)


@thorough(300)
@given(st.lists(QUESTIONS, max_size=4))
def test_whatever_is_asked_is_answered_in_bounds_or_ends(asked: list[Probe | Get]) -> None:
    peer = Peer()
    link = JoinedLink(peer.shown, KEY)
    run(call(KEY, OWN), link)
    for question in asked:
        link.send([framed(question)])
        assert sum(map(len, link._says)) <= MOST_FRAME_BYTES + SLOTS * SLOT
    assert peer.shown.count.slots <= len(asked) * SLOTS


@thorough(400)
@given(st.data())
def test_whatever_happens_on_the_way_what_is_taken_for_right_is_right(data: st.DataObject) -> None:
    """Bits flip, pieces get lost, come twice or in another order, and the connection is cut."""
    peer, side = Peer(), Side()
    faults = data.draw(st.dictionaries(st.integers(0, 12), st.integers(0, 5), max_size=3))
    seen = 0

    def disturb(sent: bytes) -> list[bytes]:
        nonlocal seen
        seen += 1
        match faults.get(seen):
            case 0:
                at = data.draw(st.integers(0, 8 * len(sent) - 1))
                flipped = bytearray(sent)
                flipped[at // 8] ^= 1 << at % 8
                return [bytes(flipped)]
            case 1:
                return [sent[: data.draw(st.integers(0, len(sent)))]]
            case 2:
                return [sent, sent]
            case 3:
                at = data.draw(st.integers(0, len(sent)))
                return [sent[at:], sent[:at]]
            case 4:
                link.hang_up()
                return [sent[: data.draw(st.integers(0, len(sent)))]]
            case 5:
                return [data.draw(st.binary(max_size=100))]
        return [sent]

    link = JoinedLink(peer.shown, KEY, from_peer=disturb)
    before = side.bytes[: SLOTS - NAMES].copy()
    try:
        client = Client(link, KEY, OWN, side.slots)
        for _ in range(2):
            assert client.probe(CALLED, b"") in range(NAMES + 1)
            asked = wanted()
            check(client.get(asked), side, peer, asked)
    except OSError:
        pass
    assert np.array_equal(side.bytes[: SLOTS - NAMES], before), "slots of nobody were written to"


@thorough(300)
@given(st.data())
def test_slots_that_are_filled_anew_while_they_are_sent_are_no_others(data: st.DataObject) -> None:
    """At any moment, also between two pieces of one slot. Lives end as well."""
    peer, side = Peer(), Side()
    changes = data.draw(
        st.dictionaries(
            st.integers(0, 2 * NAMES + 4),
            st.one_of(st.integers(0, NAMES - 1), st.just("life"), st.just("again")),
            max_size=4,
        )
    )
    seen, refilled = 0, set[int]()

    def change(sent: bytes) -> list[bytes]:
        nonlocal seen
        what = changes.get(seen)
        seen += 1
        if what == "life":
            peer.shown.begin(Listening(PEER, b"epoch%03d" % seen, b""))
        elif what == "again":  # the same names, elsewhere: two rows have one name
            peer.fill(range(NAMES, SLOTS), peer.content[: SLOTS - NAMES])
            peer.keep(range(NAMES, SLOTS), CALLED[: SLOTS - NAMES])
        elif isinstance(what, int):
            peer.refill(what, seen)
            refilled.add(what)
        half = len(sent) // 2
        return [sent[:half], sent[half:]]

    pieces = peer.shown.pieces

    def one_by_one(rows: object) -> list[memoryview]:
        """So that something happens between any two slots."""
        return [part[at : at + SLOT] for part in pieces(rows) for at in range(0, len(part), SLOT)]  # type: ignore[arg-type]

    peer.shown.pieces = one_by_one  # type: ignore[assignment, method-assign]
    client = Client(JoinedLink(peer.shown, KEY, from_peer=change), KEY, OWN, side.slots)
    asked = wanted()
    got = client.get(asked)
    check(got, side, peer, asked)
    if not refilled and "life" not in changes.values():
        assert got.num_right == NAMES
    again = client.get(asked)
    check(again, side, peer, asked)
    assert again.num_right == again.num_extents, "nothing has changed meanwhile"


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"K" * 32])
def test_another_key_is_refused(key: bytes) -> None:
    peer, side = Peer(), Side()
    with pytest.raises(RefusedError):
        Client(JoinedLink(peer.shown, key), KEY, OWN, side.slots)
    with pytest.raises(RefusedError):
        Client(JoinedLink(peer.shown, KEY), key, OWN, side.slots)
    assert peer.shown.count.connections == 0


def test_without_a_key_both_have_none() -> None:
    peer, side = Peer(), Side()
    assert Client(JoinedLink(peer.shown, b""), b"", OWN, side.slots).probe(CALLED, b"") == NAMES


def lies(kind: str) -> Callable[[bytes], list[bytes]]:
    """What a peer with the key may say instead of the answer to a ``Get``."""
    rows = {
        "more extents": Rows(EPOCH, b"", NAMES + 1, bytes(8 * (NAMES + 1))),
        "sums of others": Rows(EPOCH, b"", 2, bytes(8)),
        "slots of nobody": Rows(EPOCH, b"", 1, bytes(8), b"\xff" * 8, bytes(8)),
        "a short epoch": sealed(
            framed(Rows(EPOCH, b"", 0, b""))[HEAD_BYTES:].replace(
                b"\xc4\x08" + EPOCH, b"\xc4\x07" + EPOCH[1:]
            )
        ),
        "nothing": sealed(b""),
        "too much": b"\xff\xff\xff\x7f" + bytes(HEAD_BYTES),
    }[kind]
    return lambda sent: [rows if isinstance(rows, bytes) else framed(rows)]


@pytest.mark.parametrize("kind", ["more extents", "sums of others", "a short epoch", "nothing", "too much"])
def test_a_peer_that_lies_is_left(kind: str) -> None:
    peer, side = Peer(), Side()
    link = JoinedLink(peer.shown, KEY)
    client = Client(link, KEY, OWN, side.slots)
    link._from_peer = lies(kind)
    with pytest.raises(OSError, match=r"."):
        client.get(wanted())
    assert not side.bytes.any()


def test_no_message_that_may_be_is_too_large_to_be_sent() -> None:
    """The largest of each kind fits into a frame."""
    suffix, epoch = bytes(16), bytes(EPOCH_BYTES)
    numbers = bytes(8 * MOST_SLOTS)
    for largest in (
        Probe(bytes(32 * MOST_NAMES), suffix, True),
        Get(bytes(32 * MOST_EXTENTS), suffix, [MOST_SLOTS] * MOST_EXTENTS, [MOST_SLOTS] * MOST_EXTENTS, True),
        Rows(epoch, suffix, MOST_EXTENTS, numbers, numbers, numbers),
    ):
        assert len(framed(largest)) <= MOST_FRAME_BYTES
    about_all = About({f"{at:040}": bytes(32) for at in range(32)}, *[1 << 20] * 4, 1 << 62, 1 << 20)
    assert len(framed(about_all)) <= HANDSHAKE_BYTES


def test_what_is_asked_about_at_once_fits_into_a_question() -> None:
    assert MOST_ASKED <= MOST_NAMES


def test_a_session_begins_with_nobody() -> None:
    session = Session(Peer().shown, KEY)
    session.check_invariants()
    session.num_questions = 1
    with pytest.raises(AssertionError, match="nobody"):
        session.check_invariants()


def test_text_that_is_none_is_no_message() -> None:
    """msgspec has an error of its own for that."""
    content = framed(Refused("why"))[HEAD_BYTES:].replace(b"why", b"\xa0hy")
    with pytest.raises(ProtocolError):
        decoded(content, decoder(Refused))


@pytest.mark.parametrize("at", range(len(framed(Get(bytes(32), b"", [1], [0], False))) * 8))
def test_a_question_that_has_changed_is_none(at: int) -> None:
    """Whatever bit has flipped: other counts or skips would bring slots whose seals are right."""
    sent = bytearray(framed(Get(bytes(32), b"", [1], [0], False)))
    sent[at // 8] ^= 1 << at % 8
    hearing = hear(decoder(Get))
    head = next(hearing)
    assert isinstance(head, memoryview)
    head[:] = sent[:HEAD_BYTES]
    with pytest.raises(ProtocolError):
        _finish(hearing, bytes(sent[HEAD_BYTES:]))


def _finish(hearing: Talk[Any], sent: bytes) -> None:
    content = next(hearing)
    assert isinstance(content, memoryview)
    content[:] = (sent + bytes(len(content)))[: len(content)]
    next(hearing)
