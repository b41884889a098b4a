"""Pools of peers that are read by NIXL, over UCX, in real processes: what comes, fails, lies and is late."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from offload.errors import ConfigError
from offload.peering.frames import framed
from offload.worker.media import peers as peers_module
from offload.worker.media.peers import PeerMedium
from offload.worker.peers import landing as landing_module
from offload.worker.peers.client import Client
from offload.worker.peers.landing import Landing, NixlPool
from offload.worker.peers.link import dial
from offload.worker.peers.nixl import Agent, NixlError, State, check_nixl
from offload.worker.peers.protocol import Get, Reachable, Rows
from offload.worker.peers.session import Session
from offload.worker.peers.shortcuts import LONGEST_NIXL_PAUSE, NIXL_PAUSE
from tests.nixl import need_nixl
from tests.offload.worker.media.bench import Pool, ends, wait_until
from tests.offload.worker.media.bench import run as run_job
from tests.offload.worker.media.test_peers import (
    CALLED,
    CONTENT,
    COUNT,
    NEAR,
    OWN,
    SLOT,
    SLOTS,
    check,
    get,
)
from tests.offload.worker.peers.lone import LonePeer, lone
from tests.offload.worker.peers.pools import KEY, PEER, PeerPool, contents, fleet_of, wait_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP of UCX a transfer from a process that is stopped waits. Each fetch has many parts."""
    need_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(landing_module, "_PART_BYTES", 3 * SLOT)


class Fixture:
    """A pool, a medium whose bytes come by NIXL, and a clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.pool = Pool(SLOT, SLOTS)
        self.landing = Landing(SLOT)
        self.now = 0.0
        self._to_close: list[Callable[[], object]] = []

    def peer(self, *, has_nixl: bool = True, **more: Any) -> PeerPool:
        made = PeerPool(SLOTS, SLOT, columns=1, has_nixl=has_nixl, **more)
        made.store(CALLED, CONTENT)
        self._to_close.append(made.close)
        return made

    def medium(self, address: Any, transport: str = "nixl", own: Any = OWN) -> PeerMedium:
        fleet = fleet_of([address], self.pool.slots, own, landing=self.landing, clock=lambda: self.now)
        medium = PeerMedium(fleet, self.pool.slots)
        self._to_close.append(lambda: medium.close(30))
        wait_for(fleet, "connected")
        assert medium.statuses()[0].transport == transport
        return medium

    def close(self) -> None:
        self.landing.check_invariants()
        for close in self._to_close[::-1]:
            close()
        self.landing.close()
        self.landing.check_invariants()


@pytest.fixture
def made() -> Iterator[Fixture]:
    made = Fixture()
    yield made
    made.close()


# What comes


def test_slots_come_from_another_process(made: Fixture) -> None:
    with lone(COUNT, SLOT, 0, "--nixl") as peer:
        medium = made.medium(peer.address)
        end = run_job(medium, get(1))
        assert (end.num_good, end.error) == (COUNT, None)
        assert np.array_equal(made.pool.bytes[30 : 30 + COUNT], contents(COUNT, SLOT, 0))
        [status] = medium.statuses()
        assert (status.transport, status.nbytes, status.errors) == ("nixl", COUNT * SLOT, 0)


def test_nothing_of_it_is_sent_over_the_connection(made: Fixture) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    before = made.pool.bytes.copy()
    check(made.pool, run_job(medium, get(1)))
    assert (peer.shown.count.slots, peer.shown.count.bytes_sent) == (COUNT, 0)
    untouched = [slot for slot in range(SLOTS) if not 30 <= slot < 30 + COUNT]
    assert np.array_equal(made.pool.bytes[untouched], before[untouched])


def test_slots_larger_than_a_part(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_module, "_PART_BYTES", SLOT - 1)
    made.landing.close()
    made.landing = Landing(SLOT)
    check(made.pool, run_job(made.medium(made.peer().address), get(1)))


def test_memory_of_the_same_machine_comes_first(made: Fixture) -> None:
    medium = made.medium(made.peer(is_near=True).address, "memory", NEAR)
    check(made.pool, run_job(medium, get(1)))


def test_a_peer_without_it_sends_over_tcp(made: Fixture, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        medium = made.medium(made.peer(has_nixl=False).address, "tcp")
    assert "it has none" in caplog.text
    check(made.pool, run_job(medium, get(1)))


# What is wrong


def test_slots_that_are_filled_anew_while_they_are_read_are_not_taken(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    after_copies(monkeypatch, lambda: peer.tables.fills.__setitem__(7, 99))
    end = run_job(medium, get(1))
    check(made.pool, end, 7)
    assert end.is_absent


def test_slots_of_another_life_are_not_taken(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    after_copies(monkeypatch, lambda: peer.begin(b"epoch002"))
    end = run_job(medium, get(1))
    assert (end.num_good, end.is_absent) == (0, True)


def after_copies(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    copy = NixlPool.copy

    def copy_and_do(self: NixlPool, *about: Any) -> Iterator[slice]:
        yield from copy(self, *about)
        do()

    monkeypatch.setattr(NixlPool, "copy", copy_and_do)


def test_wrong_bytes_are_an_error(made: Fixture) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    peer.bytes[5, 77] ^= 1
    check(made.pool, run_job(medium, get(1, count=5)), 5)
    end = run_job(medium, get(2, 5, 1))
    assert (end.num_good, end.is_absent) == (0, False)
    assert "wrong bytes" in str(end.error)


@pytest.mark.parametrize("lie", ["metadata", "name", "slots", "end"])
def test_who_lies_about_an_agent_is_not_read_by_it(
    made: Fixture, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = made.peer()
    true = peer.shown.reachable
    told = {
        "metadata": replace(true, metadata=bytes(range(256))),
        "name": replace(true, agent="another"),
        "slots": replace(true, num_slots=0),
        "end": replace(true, address=1 << 62, num_slots=1 << 60),
    }[lie]
    peer.shown.reachable = told
    if lie in ("slots", "end"):
        fleet = fleet_of([peer.address], made.pool.slots, OWN, landing=made.landing)
        wait_for(fleet, "gone")
        assert "slots at" in fleet.statuses()[0].reason
        assert fleet.close(30)
        return
    medium = made.medium(peer.address, "tcp")
    check(made.pool, run_job(medium, get(1)))
    assert caplog.text.count("is not read by NIXL") == 1


def test_addresses_that_are_not_registered_are_not_read(made: Fixture) -> None:
    """What is asked for lies before the pool: the library refuses, and slots come over TCP."""
    peer = made.peer()
    peer.shown.reachable = replace(peer.shown.reachable, address=peer.shown.reachable.address - (1 << 30))
    medium = made.medium(peer.address)
    check(made.pool, run_job(medium, get(1)))
    assert medium.statuses()[0].transport == "tcp"


@pytest.mark.parametrize("slots", [[-1], [SLOTS], [1 << 40]])
def test_slots_that_are_nowhere_are_not_read(
    made: Fixture, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = made.medium(made.peer().address)

    def lie(self: Session, asked: Get, life: Any) -> Any:
        where = np.array(slots, dtype=np.int64).tobytes()
        yield [framed(Rows(life.epoch, b"", 1, bytes(8), where, np.ones(1, dtype=np.int64).tobytes()))]

    def begin(*about: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(Session, "_get", lie)
    monkeypatch.setattr(Landing, "begin", begin)
    before = made.pool.bytes.copy()
    assert run_job(medium, get(1, count=1)).num_good == 0
    assert np.array_equal(made.pool.bytes, before)


def test_who_asks_about_slots_that_are_nowhere_is_told_that_they_are_not(made: Fixture) -> None:
    peer = made.peer()
    client = Client(dial("127.0.0.1", peer.server.port), KEY, OWN, made.pool.slots)
    far = NixlPool(made.landing, client.reach(), SLOT)
    rows = peer.shown.holdings.find(CALLED, [1] * COUNT, [0] * COUNT).rows
    targets, edges = np.arange(COUNT), np.arange(COUNT + 1)
    assert client._read(far, rows, targets, edges)[0] == COUNT
    far.check = lambda slots: None  # type: ignore[method-assign]
    for there in (-1, SLOTS, 1 << 40):
        wild = rows.slots.copy()
        wild[3] = there
        far.copy = lambda *about: iter(())  # type: ignore[method-assign, misc]
        assert client._read(far, rows._replace(slots=wild), targets, edges)[0] == 0
    far.forget()
    client.close()


def test_two_peers_of_one_name_are_not_confused(made: Fixture) -> None:
    peer = made.peer()
    told = peer.shown.reachable
    made.landing.meet(told)
    with pytest.raises(NixlError, match="one name"):
        made.landing.meet(Reachable(told.agent, b"other", told.address, SLOTS))
    made.landing.forget(told.agent)


# What fails, and what is late


def test_after_a_failure_slots_come_over_tcp_for_a_while(
    made: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers_module, "GET_THREADS", 1)  # a second one may fail at the same time, and counts
    peer = made.peer()
    medium = made.medium(peer.address)
    with monkeypatch.context() as patched:
        patched.setattr(Agent, "begin", lambda self, transfer: State.FAILED)
        check(made.pool, run_job(medium, get(1)))
    made.pool.bytes[:] = 0
    check(made.pool, run_job(medium, get(2)))
    [status] = medium.statuses()
    assert (status.state, status.transport, status.errors) == ("connected", "tcp", 1)
    assert caplog.text.count("NIXL has failed") == 1
    sent = peer.shown.count.bytes_sent
    made.now += NIXL_PAUSE
    wait_until(lambda: medium.statuses()[0].transport == "nixl")
    check(made.pool, run_job(medium, get(3)))
    assert peer.shown.count.bytes_sent == sent == 2 * COUNT * SLOT


def test_what_was_given_up_arrives_late_and_in_no_slot(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer stops, and the job ends without it. Its slots are another's when it goes on."""
    with lone(COUNT, SLOT, 0, "--nixl") as peer:
        medium = made.medium(peer.address)
        assert run_job(medium, get(1)).num_good == COUNT
        arrived = [part.memory for part in made.landing._free]
        for memory in arrived:
            memory[:] = bytes(len(memory))
        monkeypatch.setattr(landing_module, "PATIENCE_SECONDS", 0.3)
        with stopping(peer):
            end = run_job(medium, get(2, count=8))
        assert (end.num_good, end.is_absent) == (0, True)
        late = [each.part.memory for each in made.landing._late]
        assert late and not made.landing._lost
        made.landing.check_invariants()
        made.pool.bytes[:] = 7
        assert not any(memory[:].strip(b"\0") for memory in late)
        peer.go_on()
        wait_until(lambda: reaped(made.landing) == 0)
        assert all(memory[:].strip(b"\0") for memory in late), "it has arrived"
        assert (made.pool.bytes == 7).all()
        made.landing.check_invariants()


@contextmanager
def stopping(peer: LonePeer) -> Iterator[None]:
    """Inside, the peer does nothing any more as soon as it has said where slots are."""
    finds = Client._run

    def stop_then(self: Client, talk: Any) -> Any:
        found = finds(self, talk)
        if isinstance(found, Rows):
            peer.stop()
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Client, "_run", stop_then)
        yield


def reaped(landing: Landing) -> int:
    with landing._lock:
        landing._reap()
        return len(landing._late)


def test_memory_of_what_was_given_up_is_nobodys(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other fetches go on meanwhile, in other memory."""
    other = made.peer(peer=b"other000")
    with lone(COUNT, SLOT, 0, "--nixl") as peer:
        slow, medium = made.medium(peer.address), made.medium(other.address)
        assert run_job(slow, get(1)).num_good == COUNT
        monkeypatch.setattr(landing_module, "PATIENCE_SECONDS", 0.3)
        with stopping(peer):
            assert run_job(slow, get(2, count=8)).num_good == 0
        late = {each.part.address for each in made.landing._late}
        monkeypatch.setattr(landing_module, "PATIENCE_SECONDS", 60.0)
        for job_id in range(3, 6):
            made.pool.bytes[:] = 0
            check(made.pool, run_job(medium, get(job_id)))
        assert {each.part.address for each in made.landing._late} == late
        assert late.isdisjoint(part.address for part in made.landing._free)
        assert other.shown.count.bytes_sent == 0


def test_a_peer_that_is_killed_in_mid_transfer_is_a_miss(made: Fixture) -> None:
    with lone(COUNT, SLOT, 0, "--nixl") as peer:
        medium = made.medium(peer.address)
        assert run_job(medium, get(1)).num_good == COUNT
        begun, begin = [], Landing.begin
        made.landing.begin = lambda *about: begun.append(begin(made.landing, *about)) or begun[-1]  # type: ignore
        with stopping(peer):
            made.pool.bytes[:] = 7
            medium.submit(get(2, count=8))
            wait_until(lambda: begun != [])
            assert medium.poll() == []
            peer.kill()
            (end,) = ends(medium)
        assert (end.num_good, end.is_absent) == (0, True)
        wait_for(medium.fleet, "gone")
        assert (made.pool.bytes[30:] == 7).all()


def test_closing_it_gives_up_what_is_under_way(made: Fixture) -> None:
    with lone(COUNT, SLOT, 0, "--nixl") as peer:
        medium = made.medium(peer.address)
        assert run_job(medium, get(1)).num_good == COUNT
        wait, waits = Landing.wait, []
        made.landing.wait = lambda *about: waits.append(1) or wait(made.landing, *about)  # type: ignore
        with stopping(peer):
            medium.submit(get(2, count=8))
            wait_until(lambda: waits != [])
            medium.close(0.1)
            (end,) = ends(medium)
        assert end.num_good == 0


def test_memory_that_is_lost_is_bounded(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_module, "_MOST_BYTES", 1)
    made.landing.close()
    made.landing = Landing(SLOT)
    medium = made.medium(made.peer().address)
    begin = Agent.begin
    monkeypatch.setattr(Agent, "begin", lambda self, transfer: State.FAILED)
    for job_id in range(20):
        made.now += LONGEST_NIXL_PAUSE
        check(made.pool, run_job(medium, get(job_id)))
        made.landing.check_invariants()
    assert len(made.landing._lost) == 8
    monkeypatch.setattr(Agent, "begin", begin)
    made.now += LONGEST_NIXL_PAUSE
    check(made.pool, run_job(medium, get(20)))


def test_memory_that_the_library_does_not_let_go_of_is_not_used_again(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(agent: Agent, handle: object) -> None:
        raise NixlError("no")

    medium = made.medium(made.peer().address)
    monkeypatch.setattr(Agent, "release", refuse)
    check(made.pool, run_job(medium, get(1)))
    made.landing.check_invariants()
    assert len(made.landing._lost) >= 1


def test_a_peer_of_which_nixl_fails_again_is_left_alone_for_longer(
    made: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    medium = made.medium(made.peer().address)
    begin = Agent.begin
    monkeypatch.setattr(Agent, "begin", lambda self, transfer: State.FAILED)
    for job_id in range(3):
        check(made.pool, run_job(medium, get(job_id)))
        made.now += NIXL_PAUSE
    assert caplog.text.count("as NIXL has failed") == 2, "it was still left alone the third time"
    monkeypatch.setattr(Agent, "begin", begin)
    made.now += NIXL_PAUSE
    check(made.pool, run_job(medium, get(3)))
    assert medium.statuses()[0].transport == "nixl"


# Whether it is there


def test_it_is_there() -> None:
    check_nixl()


def test_without_it_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'kv-offload\[rdma\]'"):
        check_nixl()


def test_without_it_nothing_else_fails(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a start that was let in."""

    def fail(self: Agent, *, serves: bool) -> None:
        raise NixlError("no such device")

    monkeypatch.setattr(Agent, "__init__", fail)
    assert landing_module.make_landing(SLOT) is None
    with pytest.raises(NixlError):
        made.peer(peer=PEER)
