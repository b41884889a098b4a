"""Real servers on loopback: who is let in, what is answered, and what harms nobody else."""

import gc
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.fleet_config import Address, TlsFiles
from offload.messages import PRIVATE, PeerLife
from offload.peering.frames import (
    HEAD_BYTES,
    VERSION,
    Begin,
    Challenge,
    Proof,
    ProtocolError,
    Refused,
    decoder,
    framed,
    sealed,
)
from offload.peering.talk import RefusedError, hear, say
from offload.peering.tls import client_context, server_context
from offload.testing.engines.server import held_port
from offload.worker.peers.client import Client, Wanted
from offload.worker.peers.handshake import call
from offload.worker.peers.link import SocketLink, dial, fill, run
from offload.worker.peers.protocol import MOST_NAMES, Get, Over, Probe, Rows, check_get
from offload.worker.peers.server import SECONDS, listen
from offload.worker.peers.session import Stage
from tests.offload.worker.media.bench import Pool, wait_until
from tests.offload.worker.peers.pools import (
    EPOCH,
    KEY,
    PEER,
    PeerPool,
    about,
    contents,
    make_certificates,
    names,
)

pytestmark = pytest.mark.timeout(60)

SLOT, SLOTS = 8192, 64
OWN = about(slot_bytes=SLOT, columns=1)


@pytest.fixture
def peer() -> Iterator[PeerPool]:
    peer = PeerPool(SLOTS, SLOT, columns=1)
    yield peer
    peer.server.check_invariants()
    peer.close()


@pytest.fixture
def pool() -> Pool:
    return Pool(SLOT, SLOTS)


def client_of(peer: PeerPool, pool: Pool, own: Any = OWN, key: bytes = KEY, context: Any = None) -> Client:
    return Client(dial("127.0.0.1", peer.server.port, context), key, own, pool.slots)


def wanted(called: np.ndarray, slots: list[int], suffix: bytes = b"") -> Wanted:
    """Positions of one slot each."""
    return Wanted(called, [1] * len(called), [0] * len(called), np.array(slots), suffix)


# Who is let in


def test_whoever_has_the_key_is_let_in_and_learns_the_life(peer: PeerPool, pool: Pool) -> None:
    client = client_of(peer, pool)
    assert client.life == PeerLife(PEER.hex(), EPOCH.hex())
    assert (client.suffix, client.memory) == (b"", None)
    wait_until(lambda: [each.stage for each in peer.server.standings()] == ["idle"])
    client.close()
    wait_until(lambda: not peer.server.standings())


@pytest.mark.parametrize("key", [b"", b"another key of the fleet........"])
def test_whoever_has_another_key_is_told_so(peer: PeerPool, pool: Pool, key: bytes) -> None:
    with pytest.raises(RefusedError, match="fleet's key is another one"):
        client_of(peer, pool, key=key)
    assert peer.shown.count.connections == 0


def test_a_server_without_the_key_is_not_believed(pool: Pool) -> None:
    """It may know what to say, but not what proves it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            accepted, _ = listening.accept()
            link = SocketLink(accepted)
            run(hear(decoder(Begin)), link)
            run(say(Challenge(VERSION, bytes(32))), link)
            run(hear(decoder(Proof)), link)
            run(say(Proof(bytes(32))), link)
            link.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RefusedError, match="fleet's key is another one"):
            Client(dial("127.0.0.1", listening.getsockname()[1]), KEY, OWN, pool.slots)
        thread.join()


def test_a_handshake_that_was_overheard_lets_nobody_in(peer: PeerPool) -> None:
    """Its answer is for another nonce."""
    heard: list[bytes] = []

    class Noted:
        def __init__(self) -> None:
            self.link = dial("127.0.0.1", peer.server.port)

        def send(self, buffers: Any) -> None:
            heard.extend(bytes(each) for each in buffers)
            self.link.send(buffers)

        def recv_into(self, view: memoryview) -> int:
            return self.link.recv_into(view)

        def close(self) -> None:
            self.link.close()

    first = Noted()
    run(call(KEY, OWN), first)
    begin, proof, own = heard
    again = dial("127.0.0.1", peer.server.port)
    again.send([begin])
    run(hear(decoder(Challenge)), again)
    again.send([proof])
    refused = run(hear(decoder(Proof, Refused)), again)
    assert isinstance(refused, Refused)
    again.send([own])
    with pytest.raises(ConnectionError):
        fill(again, memoryview(bytearray(1)))
    first.close()
    again.close()
    assert peer.shown.count.connections == 1


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (about('{"weights": 2, "dtype": "f"}', slot_bytes=SLOT, columns=1), "KV of other dtype, weights"),
        (about("no object", slot_bytes=SLOT, columns=1), "KV of other namespace"),
        (about(rank=1, slot_bytes=SLOT, columns=1), "rank 0 of 1, where 1 of 1"),
        (about(slot_bytes=2 * SLOT, columns=1), "slots of 8,192 bytes, 1 a position, where they have 16,384"),
        (about(slot_bytes=SLOT, columns=2), "1 a position, where they have 8,192, 2 a position"),
    ],
)
def test_whoever_has_kv_of_no_use_is_told_why(peer: PeerPool, pool: Pool, other: Any, shown: str) -> None:
    with pytest.raises(RefusedError, match=shown):
        client_of(peer, pool, other)


def test_an_engine_that_has_made_no_step_has_nothing(pool: Pool) -> None:
    peer = PeerPool(SLOTS, SLOT, columns=1, epoch=None)
    client = client_of(peer, pool)
    assert client.life.epoch == "0" * 16
    assert client.probe(names(3), b"") == 0
    peer.begin()
    client.ping()
    assert client.life.epoch == EPOCH.hex()
    client.close()
    peer.close()


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    fleet = make_certificates(tmp_path_factory.mktemp("fleet"), ["server", "client"])
    stranger = make_certificates(tmp_path_factory.mktemp("strangers"), ["stranger"])["stranger"]
    return {**fleet, "stranger": stranger}


def test_over_tls_both_sides_have_a_certificate_of_the_fleet(
    pool: Pool, certificates: dict[str, TlsFiles]
) -> None:
    peer = PeerPool(SLOTS, SLOT, columns=1, context=server_context(certificates["server"]))
    called, content = names(3), contents(3, SLOT)
    peer.store(called, content)
    client = client_of(peer, pool, context=client_context(certificates["client"]))
    got = client.get(wanted(called, [5, 9, 10]))
    assert (got.num_extents, got.num_right) == (3, 3)
    assert np.array_equal(pool.bytes[[5, 9, 10]], content)
    client.close()
    for context in (client_context(certificates["stranger"]), None):
        with pytest.raises(OSError, match=r"certificate|alert|closed|reset|EOF"):
            client_of(peer, pool, context=context)
    client_of(peer, pool, context=client_context(certificates["client"])).close()
    peer.close()


def test_a_client_wants_a_server_of_the_fleet(pool: Pool, certificates: dict[str, TlsFiles]) -> None:
    peer = PeerPool(SLOTS, SLOT, columns=1, context=server_context(certificates["stranger"]))
    with pytest.raises(OSError, match="certificate verify failed"):
        client_of(peer, pool, context=client_context(certificates["client"]))
    peer.close()


def test_files_of_no_use_are_refused(tmp_path: Path, certificates: dict[str, TlsFiles]) -> None:
    (tmp_path / "empty").write_text("")
    good = certificates["server"]
    for name in ("cert_file", "key_file", "ca_file"):
        for path in (str(tmp_path / "empty"), str(tmp_path / "none")):
            files = {"cert_file": good.cert_file, "key_file": good.key_file, "ca_file": good.ca_file}
            with pytest.raises(ConfigError, match="fleet_tls"):
                server_context(TlsFiles(**{**files, name: path}))


# What is answered


def test_names_that_are_there_are_found_in_this_life_alone(peer: PeerPool, pool: Pool) -> None:
    called = names(5)
    peer.store(called[:3], contents(3, SLOT))
    client = client_of(peer, pool)
    assert client.probe(called, b"") == 3
    assert client.probe(called[1:], b"") == 2
    assert client.probe(called[3:], b"") == 0
    assert client.probe(called, b"", is_last_wanted=True) == 3
    assert client.probe(called, b"other") == 0
    peer.begin(b"epoch002", b"named")
    assert client.probe(called, b"") == client.probe(called, b"named") == 0
    assert (client.life.epoch, client.suffix) == (b"epoch002".hex(), b"named")
    peer.store(called[:2], contents(2, SLOT), 2)
    assert (client.probe(called, b"named"), client.probe(called, b"")) == (2, 0)
    peer.begin(b"epoch003", PRIVATE + b"secret")
    peer.store(called[:2], contents(2, SLOT), 3)
    assert client.probe(called, PRIVATE + b"secret") == 0, "nobody has a private suffix"
    client.close()


def test_a_release_that_names_no_life_is_of_this_one(peer: PeerPool, pool: Pool) -> None:
    client = client_of(peer, pool)
    client.release(b"a" * 32, "")
    assert peer.shown.take_released() == [b"a" * 32]
    client.close()


def test_a_release_is_of_this_life(peer: PeerPool, pool: Pool) -> None:
    client = client_of(peer, pool)
    client.release(b"a" * 32, EPOCH.hex())
    client.release(b"b" * 32, b"another0".hex())
    client.release(b"c" * 32, EPOCH.hex())
    assert peer.shown.take_released() == [b"a" * 32, b"c" * 32]
    assert peer.shown.take_released() == []
    client.close()


def test_slots_that_are_filled_anew_while_they_are_sent_are_gone(peer: PeerPool, pool: Pool) -> None:
    """The head has been sent, and so have many bytes, when another store comes to one of the slots."""
    called, content = names(40), contents(40, SLOT)
    peer.store(called, content)
    link = dial("127.0.0.1", peer.server.port)
    run(call(KEY, OWN), link)
    link.send([framed(Get(called.tobytes() * 20, b"", [1] * 800, [0] * 800, False))])
    rows = run(hear(decoder(Rows)), link)
    assert rows.num_extents == 800
    room = memoryview(bytearray(800 * SLOT))
    fill(link, room[:SLOT])  # the rest, 6 MiB, does not fit between the two
    peer.tables.fills[17] = -1
    fill(link, room[SLOT:])
    assert run(hear(decoder(Over)), link).num_extents == 17
    assert peer.shown.count.gone == 783
    link.close()


def test_a_life_that_ends_while_slots_are_sent_takes_all_of_them(peer: PeerPool, pool: Pool) -> None:
    called = names(40)
    peer.store(called, contents(40, SLOT))
    link = dial("127.0.0.1", peer.server.port)
    run(call(KEY, OWN), link)
    link.send([framed(Get(called.tobytes() * 20, b"", [1] * 800, [0] * 800, False))])
    rows = run(hear(decoder(Rows)), link)
    peer.begin(b"epoch002")
    fill(link, memoryview(bytearray(len(rows.sums) // 8 * SLOT)))
    assert run(hear(decoder(Over)), link).num_extents == 0
    link.close()


# What harms nobody


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n",
        sealed(b""),
        b"\xff\xff\xff\xff" + bytes(100),
        sealed(b"hello"),
        framed(Probe(b"", b"", False)),
        framed(Begin(7, bytes(32))),
        framed(Begin(VERSION, bytes(32))) + framed(Begin(VERSION, bytes(32))),
    ],
    ids=["http", "empty", "huge", "text", "question", "version", "twice"],
)
def test_strangers_are_cut_off(peer: PeerPool, pool: Pool, sent: bytes) -> None:
    client = client_of(peer, pool)
    stranger = socket.create_connection(("127.0.0.1", peer.server.port))
    stranger.settimeout(30)
    stranger.sendall(sent)
    with suppress(ConnectionResetError):  # where bytes of its have not been read
        while stranger.recv(4096):
            pass
    stranger.close()
    client.ping()
    client.close()


@pytest.mark.parametrize(
    "question",
    [
        Get(bytes(32), b"", [1, 1], [0, 0], False),
        Get(bytes(64), b"", [16_000, 16_000], [0, 0], False),
        Get(bytes(64), b"", [1, 1], [0, 20_000], False),
        Probe(bytes(33), b"", False),
        Rows(EPOCH, b"", 0, b"", b"", b""),
    ],
)
def test_questions_that_do_not_add_up_end_the_connection(peer: PeerPool, pool: Pool, question: Any) -> None:
    other = client_of(peer, pool)
    link = dial("127.0.0.1", peer.server.port)
    run(call(KEY, OWN), link)
    link.send([framed(question)])
    with pytest.raises(ConnectionError):
        fill(link, memoryview(bytearray(HEAD_BYTES)))
    link.close()
    other.ping()
    other.close()


def test_no_question_is_larger_than_may_be(pool: Pool, peer: PeerPool) -> None:
    client = client_of(peer, pool)
    assert client.probe(names(MOST_NAMES), b"") == 0
    with pytest.raises(ConnectionError):
        client.probe(names(MOST_NAMES + 1), b"")
    client.close()


def test_no_more_are_let_in_than_may_be(pool: Pool) -> None:
    peer = PeerPool(SLOTS, SLOT, columns=1, most_connections=3, most_strangers=2)
    strangers = [socket.create_connection(("127.0.0.1", peer.server.port)) for _ in range(2)]
    wait_until(lambda: len(peer.server.standings()) == 2)
    with pytest.raises(ConnectionError):
        client_of(peer, pool)
    strangers.pop().close()
    wait_until(lambda: len(peer.server.standings()) == 1)
    clients = [client_of(peer, pool) for _ in range(2)]
    with pytest.raises(ConnectionError):
        client_of(peer, pool)
    peer.server.check_invariants()
    for each in (*clients, *strangers):
        each.close()
    peer.close()


@pytest.mark.parametrize("stage", list(Stage))
def test_whoever_is_silent_for_too_long_is_cut_off(pool: Pool, stage: Stage) -> None:
    """At any stage: one that says nothing, one that asks nothing, one that takes nothing."""
    now = 0.0
    peer = PeerPool(SLOTS, SLOT, columns=1, clock=lambda: now)
    called = names(40)
    peer.store(called, contents(40, SLOT))
    link = dial("127.0.0.1", peer.server.port)
    if stage is not Stage.SHAKES_HANDS:
        run(call(KEY, OWN), link)
    if stage is Stage.ANSWERS:
        link.send([framed(Get(called.tobytes() * 20, b"", [1] * 800, [0] * 800, False))])
    wait_until(lambda: [each.stage for each in peer.server.standings()] == [stage.value])
    now = SECONDS[stage] - 0.1
    peer.server.check_invariants()

    def is_cut_off() -> bool:
        nonlocal now
        now += 1.0
        return not peer.server.standings()

    wait_until(is_cut_off)
    link.close()
    peer.close()


def test_a_fault_in_an_answer_ends_one_connection(
    peer: PeerPool, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = client_of(peer, pool), client_of(peer, pool)
    has, faults = peer.shown.holdings.has, [RuntimeError("a fault"), MemoryError()]

    def has_or_not(called: np.ndarray) -> Any:
        if faults:
            raise faults.pop()
        return has(called)

    monkeypatch.setattr(peer.shown.holdings, "has", has_or_not)
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionError):
        first.probe(names(1), b"")
    assert "MemoryError" in caplog.text
    with pytest.raises(ConnectionError):
        second.probe(names(1), b"")
    first.close()
    second.close()
    third = client_of(peer, pool)
    assert third.probe(names(1), b"") == 0
    third.close()


def test_a_fault_beside_all_answers_cuts_all_off_and_goes_on(
    peer: PeerPool, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, faults = client_of(peer, pool), [OSError("no memory for a select")]
    sweep = peer.server._sweep

    def sweep_or_not(now: float) -> None:
        if faults:
            raise faults.pop()
        sweep(now)

    monkeypatch.setattr(peer.server, "_sweep", sweep_or_not)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: not faults and not peer.server.standings())
    assert "no memory for a select" in caplog.text
    with pytest.raises(ConnectionError):
        client.ping()
    client.close()
    client_of(peer, pool).close()


# The port


def test_a_port_that_is_taken_is_refused(peer: PeerPool) -> None:
    with pytest.raises(ConfigError, match=r"rank 3 cannot listen at 127\.0\.0\.1:\d+"):
        listen(Address("127.0.0.1", peer.server.port - 3), 3)
    with pytest.raises(ConfigError, match="cannot listen at"):
        listen(Address("192.0.2.1", 7100), 0)


def test_a_port_is_free_again_at_once(pool: Pool) -> None:
    """Though a connection has been cut off by the server."""
    with held_port() as held:
        port = held.getsockname()[1]
        first = PeerPool(SLOTS, SLOT, columns=1, port=port)
        client = client_of(first, pool)
        first.close()
        second = PeerPool(SLOTS, SLOT, columns=1, port=port)
        with pytest.raises(ConnectionError):
            client.ping()
        client.close()
        client_of(second, pool).close()
        second.close()


def test_closing_it_leaves_nothing_behind(pool: Pool) -> None:
    def left() -> Counter[object]:
        """Threads and open files, each by itself: those of tests before may end meanwhile."""
        gc.collect()
        files: list[object] = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                files.append(each.readlink())
        return Counter([*threading.enumerate(), *files])

    before = left()
    peer = PeerPool(SLOTS, SLOT, columns=1)
    clients = [client_of(peer, pool) for _ in range(3)]
    stranger = socket.create_connection(("127.0.0.1", peer.server.port))
    assert left() - before
    port = peer.address.port
    peer.close()
    assert peer.server.close(1), "again"
    for each in (*clients, stranger):
        each.close()
    del peer, clients
    assert left() - before == Counter()
    with pytest.raises(ConnectionRefusedError):
        dial("127.0.0.1", port)


def test_a_question_of_one_long_extent_beside_many_is_refused() -> None:
    """They would be looked up side by side, as deep as the longest."""
    names = bytes(32 * 1024)
    assert check_get(Get(names, b"", [16] * 1024, [0] * 1024, False)) == 1024
    with pytest.raises(ProtocolError, match="beside 1023 others"):
        check_get(Get(names, b"", [15_000, *[1] * 1023], [0] * 1024, False))
