"""Real servers on loopback that are asked how much of a prompt they have."""

import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from offload.messages import PRIVATE, Names
from offload.naming import BAG
from offload.peering.frames import HEAD_BYTES, ProtocolError, decoder, framed, sealed
from offload.peering.locating import MOST_TOKENS, Asks, Locate, Located, ask, ask_in, question_of
from offload.peering.talk import RefusedError, Talk, hear, say
from offload.peering.tls import client_context, server_context
from offload.worker.peers import locator as located_by
from offload.worker.peers.link import SocketLink, dial, run
from offload.worker.peers.locator import Locator
from offload.worker.peers.protocol import Ping
from tests.offload.worker.media.bench import wait_until
from tests.offload.worker.peers.pools import KEY, PeerPool, contents, make_certificates

pytestmark = pytest.mark.timeout(60)

SLOT, SLOTS, TOKENS = 4096, 256, 16
PROMPT = np.random.default_rng(3).integers(0, 1 << 17, 200 * TOKENS + 5).tolist()


class TextHashes:
    """Chained hashes that say what they are of, and count what is hashed."""

    position_tokens = TOKENS

    def __init__(self) -> None:
        self.num_hashed: list[int] = []

    def __call__(
        self, token_ids: Sequence[int], stop: int, hashes: list[bytes], salt: str, adapter: tuple[str, ...]
    ) -> None:
        first = len(hashes) * TOKENS
        self.num_hashed.append(stop - first)
        hashes += [hashed(token_ids[: at + TOKENS], salt, adapter) for at in range(first, stop, TOKENS)]


def hashed(ids: Sequence[int], salt: str = "", adapter: tuple[str, ...] = ()) -> bytes:
    return hashlib.sha256(repr((list(ids), salt, adapter)).encode()).digest()


def chain(count: int, salt: str = "", adapter: tuple[str, ...] = ()) -> Names:
    made = [hashed(PROMPT[: (at + 1) * TOKENS], salt, adapter) for at in range(count)]
    return np.frombuffer(b"".join(made), dtype=np.uint8).reshape(-1, 32)


@pytest.fixture
def peer() -> Iterator[PeerPool]:
    peer = listening()
    yield peer
    peer.server.check_invariants()
    assert peer.shown.locator is not None
    peer.shown.locator.check_invariants()
    assert not peer.shown.locator.num_running
    peer.close()


def listening(**more: object) -> PeerPool:
    peer = PeerPool(SLOTS, SLOT, columns=1, **more)  # type: ignore[arg-type]
    peer.shown.locator = Locator(TextHashes(), 1, False)
    return peer


def hashes_of(peer: PeerPool) -> TextHashes:
    assert peer.shown.locator is not None
    hashes = peer.shown.locator._hash
    assert isinstance(hashes, TextHashes)
    return hashes


def store(peer: PeerPool, names: Names) -> None:
    peer.store(names, contents(len(names), SLOT))


def let_in(peer: PeerPool, key: bytes = KEY, context: object = None) -> SocketLink:
    link = dial("127.0.0.1", peer.server.port, context)  # type: ignore[arg-type]
    try:
        assert run(ask_in(key), link).position_tokens == TOKENS
    except BaseException:
        link.close()
        raise
    return link


@pytest.fixture
def link(peer: PeerPool) -> Iterator[SocketLink]:
    link = let_in(peer)
    yield link
    link.close()


def located(link: SocketLink, *about: object) -> int:
    found = run(ask(question_of(*about)), link)  # type: ignore[arg-type]
    assert not found.is_busy
    return found.num_tokens


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200])
def test_leading_tokens_that_the_pool_has_are_told(peer: PeerPool, link: SocketLink, count: int) -> None:
    store(peer, chain(count))
    assert located(link, PROMPT) == count * TOKENS
    assert located(link, PROMPT[: 10 * TOKENS]) == min(count, 10) * TOKENS
    assert located(link, PROMPT[: TOKENS - 1]) == located(link, []) == 0
    assert located(link, [PROMPT[0] + 1, *PROMPT[1:]]) == 0


def test_a_gap_ends_what_is_told(peer: PeerPool, link: SocketLink) -> None:
    names = chain(200)
    store(peer, np.concatenate([names[:100], names[101:]]))
    assert located(link, PROMPT) == 100 * TOKENS


def test_salt_and_adapter_are_part_of_the_prompt(peer: PeerPool, link: SocketLink) -> None:
    store(peer, chain(30, "tenant", ("poems", "/p")))
    assert located(link, PROMPT, "tenant", ("poems", "/p")) == 30 * TOKENS
    for salt, adapter in (("", ("poems", "/p")), ("tenant", None), ("tenant", ("poems", "/q"))):
        assert located(link, PROMPT, salt, adapter) == 0


def test_hashing_ends_where_the_pool_ends_and_is_not_done_twice(peer: PeerPool, link: SocketLink) -> None:
    store(peer, chain(64))
    assert located(link, PROMPT) == 64 * TOKENS
    assert hashes_of(peer).num_hashed == [64 * TOKENS, 64 * TOKENS]
    assert located(link, PROMPT[: 64 * TOKENS]) == 64 * TOKENS
    assert located(link, PROMPT) == 64 * TOKENS
    assert len(hashes_of(peer).num_hashed) == 2
    store(peer, chain(70)[64:])  # what is kept are hashes, not answers
    assert located(link, PROMPT) == 70 * TOKENS
    assert hashes_of(peer).num_hashed == [64 * TOKENS, 64 * TOKENS]
    assert sum(hashes_of(peer).num_hashed) == 128 * TOKENS


def test_what_is_kept_is_bounded(peer: PeerPool, link: SocketLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(located_by, "_MOST_SLICES", 3)
    for first in range(6):
        assert located(link, [first, *PROMPT[1:200]]) == 0
    assert len(hashes_of(peer).num_hashed) == 6
    located(link, [5, *PROMPT[1:200]])
    assert len(hashes_of(peer).num_hashed) == 6
    located(link, [0, *PROMPT[1:200]])
    assert len(hashes_of(peer).num_hashed) == 7


def test_where_bags_are_needed_only_what_ends_at_one_counts() -> None:
    peer = PeerPool(SLOTS, SLOT, columns=1)
    found = Locator(TextHashes(), 1, True)
    names = chain(40)
    store(peer, names)
    question = question_of(PROMPT)
    assert list(found.look_up(question, peer.shown.holdings))[-1] == 0
    slots = np.array([100])
    peer.fill(slots, contents(1, SLOT), 7)
    peer.keep(slots, names[24:25], np.array([BAG]), 7)
    assert list(found.look_up(question, peer.shown.holdings))[-1] == 25 * TOKENS
    peer.close()


def test_nothing_is_told_of_another_life(peer: PeerPool, link: SocketLink) -> None:
    store(peer, chain(10))
    peer.begin(b"epoch001", PRIVATE + bytes(15))
    assert located(link, PROMPT) == 0


def test_a_question_in_turns_lets_others_ask(peer: PeerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one prompt is hashed, another connection is let in and answered."""
    store(peer, chain(200))
    other = let_in(peer)
    hashes, met = hashes_of(peer), list[int]()
    go_on, asked = threading.Event(), threading.Event()
    plain = TextHashes.__call__

    def slow(self: TextHashes, ids: Sequence[int], stop: int, *rest: object) -> None:
        if len(ids) > TOKENS and len(self.num_hashed) == 1:
            asked.set()
            assert go_on.wait(30)
        met.append(len(ids))
        plain(self, ids, stop, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TextHashes, "__call__", slow)
    first = let_in(peer)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(located(first, PROMPT)))
    asking.start()
    assert asked.wait(30)
    other.send([framed(question_of(PROMPT[:TOKENS]))])
    go_on.set()
    assert run(_hear_located(), other).num_tokens == TOKENS
    asking.join(30)
    assert answers == [200 * TOKENS]
    assert met.index(TOKENS) < len(met) - 1, "it waited for the whole of the other prompt"
    assert hashes.num_hashed
    first.close()
    other.close()


def _hear_located() -> Talk[Located]:
    found: Located = yield from hear(decoder(Located))
    return found


def test_too_many_at_once_are_told_so(peer: PeerPool, link: SocketLink) -> None:
    assert peer.shown.locator is not None
    peer.shown.locator.num_running = located_by.MOST_AT_ONCE
    try:
        assert run(ask(question_of(PROMPT)), link) == Located(0, True)
    finally:
        peer.shown.locator.num_running = 0


@pytest.mark.parametrize(
    "sent",
    [
        framed(Ping()),
        framed(Asks()),
        framed(Locate(bytes(6))),
        framed(Locate(bytes(64), "", ("poems",))),
        sealed(framed(Locate(bytes(64)))[HEAD_BYTES:-1] + b"\xff"),
        b"\xff" * HEAD_BYTES,
        sealed(b"\xc1"),
        framed(Locate(bytes(4 * MOST_TOKENS + 4))),
        framed(Locate(b"", "s" * 2000)),
    ],
)
def test_a_wrong_question_ends_that_connection_alone(peer: PeerPool, link: SocketLink, sent: bytes) -> None:
    store(peer, chain(5))
    bad = let_in(peer)
    bad.send([sent])
    with pytest.raises(OSError, match=r"."):
        run(_hear_located(), bad)
    bad.close()
    assert located(link, PROMPT) == 5 * TOKENS


def test_whoever_goes_away_leaves_nothing(peer: PeerPool, link: SocketLink) -> None:
    store(peer, chain(200))
    for _ in range(5):
        gone = let_in(peer)
        gone.send([framed(question_of(PROMPT))])
        gone.close()
    assert located(link, PROMPT) == 200 * TOKENS
    wait_until(lambda: len(peer.server.standings()) == 1)


def test_a_wrong_key_and_another_rank_are_refused(peer: PeerPool) -> None:
    with pytest.raises(RefusedError, match="key"):
        let_in(peer, b"x" * 32)
    locator, peer.shown.locator = peer.shown.locator, None
    with pytest.raises(RefusedError, match="rank 0"):
        let_in(peer)
    peer.shown.locator = locator


def test_nobody_asks_before_it_has_shown_the_key(peer: PeerPool) -> None:
    link = dial("127.0.0.1", peer.server.port)
    run(say(Asks()), link)
    with pytest.raises(OSError, match=r"."):
        run(_hear_located(), link)
    link.close()


def test_over_tls(tmp_path: object) -> None:
    files = make_certificates(tmp_path, ("engine", "proxy"))  # type: ignore[arg-type]
    peer = listening(context=server_context(files["engine"]))
    store(peer, chain(9))
    link = let_in(peer, context=client_context(files["proxy"]))
    assert located(link, PROMPT) == 9 * TOKENS
    link.close()
    peer.close()


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"], [1.5], [None], [[1], [2]], [1 << 70]])
def test_what_no_engine_takes_is_not_asked(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        question_of(ids)  # type: ignore[arg-type]


def test_of_long_prompts_the_beginning_is_asked() -> None:
    assert len(question_of([1] * (MOST_TOKENS + 7)).tokens) == 4 * MOST_TOKENS
    assert len(framed(Locate(bytes(4 * MOST_TOKENS), "s" * 1024, ("n" * 1024, "p" * 1024)))) < 1 << 20
    with pytest.raises(ValueError, match="too long"):
        question_of([1], "s" * 1025)


def test_an_answer_of_more_than_was_asked_is_none() -> None:
    talk = ask(question_of([1, 2, 3]))
    next(talk)
    answer = framed(Located(4))
    view = next(talk)
    assert isinstance(view, memoryview)
    view[:] = answer[:HEAD_BYTES]
    view = next(talk)
    assert isinstance(view, memoryview)
    view[:] = answer[HEAD_BYTES:]
    with pytest.raises(ProtocolError, match="4 tokens of 3"):
        next(talk)
