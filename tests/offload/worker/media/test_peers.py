"""What a medium of peers does when peers restart, hang, lie and die, over real connections."""

import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from offload.fleet_config import Address
from offload.messages import POOL, PRIVATE, SCHEDULER, PeerLife, Route, Unused
from offload.naming import ROOT, rows
from offload.peer_messages import REMOVED
from offload.peering.frames import framed
from offload.testing.engines.server import held_port
from offload.worker.layout import BlockLayout, Region
from offload.worker.media import peers as peers_module
from offload.worker.media.base import MediumEnd, MediumJob, Verb
from offload.worker.media.lane import PeerLane, PoolParts, peer_lanes
from offload.worker.media.peers import PeerMedium, Whereabouts
from offload.worker.peers import fleet as fleet_module
from offload.worker.peers import near as near_module
from offload.worker.peers import peer as peer_module
from offload.worker.peers.addresses import Addresses
from offload.worker.peers.fleet import Fleet
from offload.worker.peers.link import SocketLink, dial
from offload.worker.peers.near import NearPool
from offload.worker.peers.peer import Caller, Peer
from offload.worker.peers.protocol import Get, Rows
from offload.worker.peers.session import Session
from offload.worker.replicas import Share
from offload.worker.seals import Seals
from tests.offload.worker.media.bench import Pool, ends, ids, wait_until
from tests.offload.worker.media.bench import run as run_job
from tests.offload.worker.peers.lone import lone
from tests.offload.worker.peers.pools import (
    EPOCH,
    HERE,
    KEY,
    PEER,
    PeerPool,
    about,
    contents,
    fleet_of,
    names,
    wait_for,
)

pytestmark = pytest.mark.timeout(120)

SLOT, SLOTS, COUNT = 8192, 64, 24
OWN = about(slot_bytes=SLOT, columns=1)
NEAR = about(slot_bytes=SLOT, columns=1, is_near=True)
CALLED, CONTENT = names(COUNT), contents(COUNT, SLOT)
LIFE = PeerLife(PEER.hex(), EPOCH.hex())


@pytest.fixture
def pool() -> Pool:
    return Pool(SLOT, SLOTS)


class Made:
    """Peers and media, closed at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._to_close: list[Any] = []

    def peer(self, count: int = COUNT, peer: bytes = PEER, **more: Any) -> PeerPool:
        """One that has so many leading positions of the chain."""
        made = PeerPool(SLOTS, SLOT, columns=1, peer=peer, **more)
        if count:
            made.store(CALLED[:count], CONTENT[:count])
        self._to_close.append(made.close)
        return made

    def medium(self, *addresses: Address, own: Any = OWN, up: bool = True) -> PeerMedium:
        fleet = fleet_of(addresses, self.pool.slots, own)
        medium = PeerMedium(fleet, self.pool.slots)
        self._to_close.append(lambda: medium.close(30))
        if up:
            wait_for(fleet, *["connected"] * len(addresses))
        return medium

    def close(self) -> None:
        for close in self._to_close[::-1]:
            close()


@pytest.fixture
def made(pool: Pool) -> Iterator[Made]:
    made = Made(pool)
    yield made
    made.close()


def get(job_id: int, first: int = 0, count: int = COUNT, **more: Any) -> MediumJob:
    """Positions of the chain, one extent each, into slots from 30 on."""
    zeros = np.zeros(count, dtype=np.int64)
    return MediumJob(
        job_id,
        Verb.GET,
        zeros,
        zeros + 1,
        np.arange(count + 1),
        np.arange(30, 30 + count),
        names=CALLED[first : first + count],
        **more,
    )


def probe(job_id: int, called: Any = CALLED, **more: Any) -> MediumJob:
    zeros = np.zeros(len(called), dtype=np.int64)
    starts = np.zeros(len(called) + 1, dtype=np.int64)
    return MediumJob(job_id, Verb.PROBE, zeros, zeros + 1, starts, ids(), names=called, **more)


def check(pool: Pool, end: MediumEnd, num_good: int = COUNT, first: int = 0) -> None:
    assert end.num_good == num_good, end
    assert np.array_equal(pool.bytes[30 : 30 + num_good], CONTENT[first : first + num_good])


# Whom to ask


def test_the_answer_is_that_of_who_has_most_and_slots_come_from_there(made: Made) -> None:
    short, long = made.peer(5, b"shorter0"), made.peer(20, b"longer00")
    medium = made.medium(short.address, long.address)
    assert run_job(medium, probe(1)).num_good == 20
    end = run_job(medium, get(2, count=20))
    check(made.pool, end, 20)
    assert (short.shown.count.slots, long.shown.count.slots) == (0, 20)
    statuses = {status.peer: status for status in medium.statuses()}
    assert statuses[b"longer00".hex()].nbytes == 20 * SLOT
    assert (statuses[b"shorter0".hex()].probes, statuses[b"shorter0".hex()].gets) == (1, 0)


def test_what_one_lacks_comes_from_another(made: Made) -> None:
    first, second = made.peer(0, b"first000"), made.peer(0, b"second00")
    first.store(CALLED[:10], CONTENT[:10])
    second.store(CALLED[10:], CONTENT[10:])
    medium = made.medium(first.address, second.address)
    check(made.pool, run_job(medium, get(1)))


def test_a_job_may_name_one_peer(made: Made) -> None:
    short, long = made.peer(5, b"shorter0"), made.peer(20, b"longer00")
    medium = made.medium(short.address, long.address)
    life = PeerLife(b"shorter0".hex())
    assert run_job(medium, probe(1, life=life)).num_good == 5
    end = run_job(medium, get(2, life=life))
    check(made.pool, end, 5)
    assert end.is_absent
    [other] = [status for status in medium.statuses() if status.peer == b"longer00".hex()]
    assert other.probes == other.gets == 0
    assert run_job(medium, probe(3, life=life._replace(epoch=EPOCH.hex()))).num_good == 5


@pytest.mark.parametrize("make", [probe, get])
def test_why_a_peer_that_is_named_is_not_asked(made: Made, make: Any) -> None:
    peer, gone = made.peer(), made.peer(peer=b"gone0000")
    medium = made.medium(peer.address, gone.address)
    gone.server.close(30)
    wait_until(lambda: {each.peer: each.state for each in medium.statuses()}[gone.peer.hex()] == "gone")
    for life, reason in (
        (PeerLife("0" * 16), Unused.UNKNOWN_PEER),
        (PeerLife(PEER.hex(), "0" * 16), Unused.OLD_EPOCH),
        (PeerLife(b"gone0000".hex(), EPOCH.hex()), Unused.UNREACHABLE),
    ):
        end = run_job(medium, make(1, life=life))
        assert (end.num_good, end.is_absent, end.reason) == (0, True, reason)
    assert run_job(medium, make(1, life=LIFE)).num_good == COUNT


def test_private_suffixes_are_nobodys_and_nobody_is_asked(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    before = peer.shown.count.questions
    suffix = PRIVATE + b"x" * 15
    assert run_job(medium, probe(1, suffix=suffix)).num_good == 0
    end = run_job(medium, get(2, suffix=suffix))
    assert (end.num_good, end.is_absent) == (0, True)
    assert peer.shown.count.questions - before <= 1, "but whether it is there"


def test_whether_anybody_is_there_is_asked_by_the_name_of_nothing(made: Made) -> None:
    medium = made.medium(up=True)
    assert run_job(medium, probe(1, rows([ROOT]))).num_good == 0
    peer = made.peer()
    medium = made.medium(peer.address)
    assert run_job(medium, probe(1, rows([ROOT]))).num_good == 1
    assert run_job(medium, probe(2, rows([ROOT]), suffix=b"v")).num_good == 0


def test_a_release_reaches_the_peer_that_is_named(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    assert run_job(medium, probe(1, CALLED[:2], life=LIFE, is_release=True)).error is None
    assert peer.shown.take_released() == [CALLED[0].tobytes(), CALLED[1].tobytes()]


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this process stands still, nobody is given up."""
    monkeypatch.setattr(peers_module, "_ASK_SECONDS", 60.0)
    monkeypatch.setattr(fleet_module, "_LONG_SECONDS", 60.0)


@pytest.mark.usefixtures("slow_machine")
def test_questions_that_come_at_once_are_all_answered_as_if_alone(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    for number in range(50):
        medium.submit(probe(number, life=LIFE if number % 2 else None))
    assert {end.num_good for end in ends(medium, 50)} == {COUNT}


@pytest.mark.usefixtures("slow_machine")
def test_releases_that_come_at_once_all_reach_the_peer(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    for number in range(50):
        medium.submit(probe(number, CALLED[:1], life=LIFE, is_release=True))
    assert all(end.error is None for end in ends(medium, 50))
    assert peer.shown.take_released() == [CALLED[0].tobytes()] * 50


def test_a_fault_of_ours_with_a_peer_ends_no_thread(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)

    def fail(peer: Peer) -> int:
        raise RuntimeError("a fault")

    assert medium.fleet.ask(medium.fleet.peers, fail, 0.01) == []
    assert run_job(medium, probe(1)).num_good == COUNT


def test_an_engine_does_not_fetch_from_itself(made: Made) -> None:
    peer = made.peer()
    own = about(slot_bytes=SLOT, columns=1, peer=PEER)
    medium = made.medium(peer.address, own=own, up=False)
    wait_for(medium.fleet, "this engine")
    assert run_job(medium, probe(1)).num_good == 0


# Peers that come and go


def test_a_peer_that_starts_again_is_found_again_in_another_life(made: Made) -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        first = made.peer(port=port)
        medium = made.medium(first.address)
        first.server.close(30)
        end = run_job(medium, get(1))
        assert (end.num_good, end.is_absent) == (0, True)
        wait_for(medium.fleet, "gone")
        made.peer(epoch=b"epoch002", port=port)
        wait_for(medium.fleet, "connected")
        assert run_job(medium, get(2, life=LIFE)).reason == Unused.OLD_EPOCH
        check(made.pool, run_job(medium, get(3, life=LIFE._replace(epoch=b"epoch002".hex()))))


def test_a_reset_is_noticed_without_a_question(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    peer.begin(b"epoch002", b"named")
    wait_until(lambda: medium.fleet.up(b"named") != [])
    assert medium.fleet.up(b"") == []


def test_peers_in_a_file_are_met_when_it_changes(made: Made, tmp_path: Path) -> None:
    first, second = made.peer(5, b"first000"), made.peer(20, b"second00")
    file = tmp_path / "peers"
    caller = Caller(lambda host, port: dial(host, port), KEY, OWN, made.pool.slots)
    medium = PeerMedium(Fleet(Addresses([f"@{file}"], 0), caller), made.pool.slots)
    assert run_job(medium, probe(1)).num_good == 0
    file.write_text(f"# ours\n{first.address.shown}\n")
    wait_for(medium.fleet, "connected")
    assert run_job(medium, probe(2)).num_good == 5
    file.write_text(f"{second.address.shown}")
    wait_until(lambda: [each.peer for each in medium.statuses()] == [b"second00".hex()])
    assert run_job(medium, probe(3)).num_good == 20
    wait_until(lambda: first.server.standings() == [])
    assert medium.close(30)


def test_a_peer_that_is_none_any_more_is_told_of_once(made: Made, tmp_path: Path) -> None:
    first, second = made.peer(5, b"first000"), made.peer(20, b"second00")
    file = tmp_path / "peers"
    file.write_text(first.address.shown)
    caller = Caller(lambda host, port: dial(host, port), KEY, OWN, made.pool.slots)
    medium = PeerMedium(Fleet(Addresses([f"@{file}"], 0), caller), made.pool.slots)
    wait_for(medium.fleet, "connected")
    memory = made.pool.slots
    layout = BlockLayout([Region(memory.address, memory.slot_bytes, memory.slot_bytes)], memory.address)
    parts = PoolParts(memory, Seals(layout, memory.num_slots, for_others=True), Share())
    fetch, probe = Route("fetch", "peers", POOL), Route("probe", "peers", SCHEDULER)
    [_, lane] = peer_lanes(fetch, probe, medium, parts, 0, clock=lambda: 0.0)
    assert isinstance(lane, PeerLane)
    assert [(each.peer, each.state) for each in lane.take_facts()] == [(b"first000".hex(), "connected")]
    file.write_text(second.address.shown)
    wait_until(lambda: [each.peer for each in medium.statuses()] == [b"second00".hex()])
    lane._told_at = -1.0
    told = {each.peer: each.state for each in lane.take_facts()}
    assert told == {b"first000".hex(): REMOVED, b"second00".hex(): "connected"}
    lane._told_at = -1.0
    assert not [each for each in lane.take_facts() if each.state == REMOVED]
    assert medium.close(30)


def test_a_silent_peer_does_not_keep_an_answer_of_others(made: Made) -> None:
    """It takes connections, and says nothing: also in the middle, which is a process that is stopped."""
    peer = made.peer(20)
    with lone(COUNT, SLOT, 0) as silent, socket.create_server(("127.0.0.1", 0)) as mute:
        medium = made.medium(peer.address, silent.address)
        silent.stop()
        mute_medium = made.medium(peer.address, Address("127.0.0.1", mute.getsockname()[1]), up=False)
        wait_until(lambda: len(mute_medium.fleet.up(b"")) == 1)
        for each in (medium, mute_medium):
            assert run_job(each, probe(1)).num_good == 20
            assert run_job(each, probe(2)).num_good == 20


# Bytes that are wrong, late, or on their way when it ends


def test_wrong_bytes_are_an_error_and_another_peer_is_tried(made: Made) -> None:
    bad, good = made.peer(peer=b"bad00000"), made.peer(10, b"good0000")
    medium = made.medium(bad.address, good.address)
    bad.bytes[3, 77] ^= 1
    bad.bytes[12, 0] ^= 1
    check(made.pool, run_job(medium, get(1, count=12)), 12)
    end = run_job(medium, get(2, 12, 1))
    assert (end.num_good, end.is_absent) == (0, False)
    assert "wrong bytes" in str(end.error)


def test_whoever_sends_wrong_bytes_again_and_again_is_not_asked_for_a_while(made: Made) -> None:
    peer = made.peer()
    medium = made.medium(peer.address)
    peer.bytes[0, 0] ^= 1
    for job_id in range(peer_module.MOST_WRONG):
        assert not run_job(medium, get(job_id)).is_absent
    [status] = medium.statuses()
    assert status.errors >= peer_module.MOST_WRONG
    wait_until(lambda: medium.statuses()[0].state == "connected")


class Stalling:
    """A peer that lets in whoever comes, and sends a part of what it is asked for."""

    def __init__(self, shown: Any, num_bytes: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listening.getsockname()[1])
        self._shown, self._num_bytes = shown, num_bytes
        self.stalled, self.goes_on = threading.Event(), threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        link = SocketLink(accepted, 60.0)
        talk, wants = Session(self._shown, KEY).talk(), None
        try:
            while True:
                wants = next(talk)
                if isinstance(wants, memoryview):
                    while len(wants):
                        count = link.recv_into(wants)
                        if not count:
                            return
                        wants = wants[count:]
                    continue
                sent = b"".join(bytes(each) for each in wants)
                if len(sent) > 2 * SLOT:
                    link.send([sent[: self._num_bytes]])
                    self.stalled.set()
                    assert self.goes_on.wait(60)
                    sent = sent[self._num_bytes :]
                link.send([sent])
        except OSError:
            return
        finally:
            link.close()
            self.ended.set()

    def close(self) -> None:
        self.goes_on.set()
        self._listening.close()


def test_slots_are_the_jobs_until_nothing_can_be_written_to_them(made: Made) -> None:
    """A peer stops in mid-send. Nobody is told that the job is over before the connection is shut and the
    thread that receives has returned. What is sent after that goes nowhere."""
    peer = made.peer()
    stalling = Stalling(peer.shown, 5 * SLOT + 100)
    medium = made.medium(stalling.address)
    medium.submit(get(1))
    assert stalling.stalled.wait(60)
    wait_until(lambda: np.array_equal(made.pool.bytes[33], CONTENT[3]))
    assert medium.poll() == []
    assert medium.close(0.01) or medium.close(30)
    (end,) = ends(medium)
    assert end.num_good < COUNT and end.error is not None
    made.pool.bytes[:] = 7
    stalling.goes_on.set()
    assert stalling.ended.wait(60)
    assert (made.pool.bytes == 7).all()
    stalling.close()


def test_a_peer_that_stops_in_mid_send_is_given_up(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was whole by then is not lost, as another peer has the rest."""
    peer, other = made.peer(), made.peer(peer=b"other000")
    stalling = Stalling(peer.shown, 5 * SLOT + 100)
    caller = Caller(lambda host, port: dial(host, port, io_seconds=0.2), KEY, OWN, made.pool.slots)
    addresses = Addresses([stalling.address.shown, other.address.shown], 0)
    medium = PeerMedium(Fleet(addresses, caller), made.pool.slots)
    wait_until(lambda: len(medium.fleet.up(b"")) == 2)
    check(made.pool, run_job(medium, get(1)))
    assert medium.close(30)
    stalling.close()


@pytest.mark.parametrize("stall", [0, 1, 5])
def test_a_peer_that_is_killed_in_mid_send_is_a_miss(made: Made, stall: int) -> None:
    with lone(COUNT, SLOT, 0, "--stall", str(stall)) as peer:
        medium = made.medium(peer.address)
        medium.submit(get(1, count=8))  # in one question
        if stall:
            content = contents(COUNT, SLOT, 0)
            wait_until(lambda: np.array_equal(made.pool.bytes[30], content[0]))
        assert medium.poll() == []
        peer.kill()
        (end,) = ends(medium)
        assert (end.num_good, end.is_absent) == (0, True)
        wait_for(medium.fleet, "gone")


def test_memory_of_a_peer_on_this_machine_outlives_it_and_is_let_go(made: Made) -> None:
    """A pool that is mapped stays whole when its owner is killed, and is not mapped for long after that."""
    content, before = contents(COUNT, SLOT, 0), mapped_segments()
    with lone(COUNT, SLOT, 0, "--near") as peer:
        medium = made.medium(peer.address, own=NEAR)
        assert medium.statuses()[0].transport == "memory"
        end = run_job(medium, get(1))
        assert end.num_good == COUNT
        assert np.array_equal(made.pool.bytes[30 : 30 + COUNT], content)
        assert mapped_segments() > before
        peer.stop()
        medium.submit(get(2))
        peer.kill()
        (end,) = ends(medium)
        assert (end.num_good, end.is_absent) == (0, True)
        wait_for(medium.fleet, "gone")
        assert mapped_segments() == before


def mapped_segments() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kv-offload")


@pytest.mark.parametrize("piece_bytes", [3000, SLOT, 3 * SLOT - 1])
def test_slots_are_copied_in_pieces_of_any_size(
    made: Made, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_module, "PIECE_BYTES", piece_bytes)
    peer = made.peer(is_near=True)
    medium = made.medium(peer.address, own=NEAR)
    check(made.pool, run_job(medium, get(1)))
    peer.tables.sums[7] += 1
    end = run_job(medium, get(2))
    assert end.num_good == 7, "what is summed is what has come"


def test_slots_that_are_filled_anew_while_they_are_copied_are_not_taken(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine nobody is asked after a copy, but the generations are compared again."""
    peer = made.peer(is_near=True)
    medium = made.medium(peer.address, own=NEAR)
    copy = NearPool.copy

    def copy_late(self: NearPool, sources: Any, pool: Any, targets: Any) -> Any:
        sums = copy(self, sources, pool, targets)
        peer.tables.fills[7] = -1
        return sums

    monkeypatch.setattr(NearPool, "copy", copy_late)
    end = run_job(medium, get(1))
    check(made.pool, end, 7)
    assert end.is_absent


def test_slots_that_are_filled_anew_before_they_are_copied_cost_none_before_them(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = made.peer(is_near=True)
    medium = made.medium(peer.address, own=NEAR)
    num_current = NearPool.num_current

    def looked_late(self: NearPool, rows: Any) -> int:
        peer.tables.fills[7] = -1
        return num_current(self, rows)

    monkeypatch.setattr(NearPool, "num_current", looked_late)
    check(made.pool, run_job(medium, get(1)), 7)


@pytest.mark.parametrize("slots", [[-1], [SLOTS], [1 << 40]])
def test_slots_that_are_nowhere_are_not_read(made: Made, slots: list[int], pool: Pool) -> None:
    peer = made.peer(is_near=True)
    medium = made.medium(peer.address, own=NEAR)
    framed_as = Session._get

    def lie(self: Session, asked: Get, life: Any) -> Any:
        if not asked.is_near:
            yield from framed_as(self, asked, life)
            return
        where = np.array(slots, dtype=np.int64).tobytes()
        yield [framed(Rows(life.epoch, b"", 1, bytes(8), where, np.ones(1, dtype=np.int64).tobytes()))]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "_get", lie)
        before = pool.bytes.copy()
        end = run_job(medium, get(1, count=1))
        assert end.num_good == 0
        assert np.array_equal(pool.bytes, before)


# What is left


def test_closing_it_leaves_nothing_behind(pool: Pool) -> None:
    def left() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), mapped_segments()

    before = left()
    made = Made(pool)
    near, far, held = made.peer(is_near=True, peer=b"near0000"), made.peer(5), held_port()
    nobody = Address("127.0.0.1", held.getsockname()[1])
    medium = made.medium(near.address, far.address, nobody, own=NEAR, up=False)
    while len(medium.fleet.up(b"")) < 2:
        medium.poll()
    assert run_job(medium, probe(1)).num_good == COUNT
    check(pool, run_job(medium, get(2)))
    assert run_job(medium, get(3, life=LIFE)).num_good == 5
    medium.check_invariants()
    made.close()
    held.close()
    del medium
    del made, near, far
    assert left() == before


def test_names_that_are_remembered_are_bounded(pool: Pool) -> None:
    whereabouts = Whereabouts(most=100)
    peers = [Peer(HERE, Caller(dial, KEY, OWN, pool.slots)) for _ in range(2)]
    for turn in range(50):
        called = names(40, turn)
        whereabouts.note(called, peers[turn % 2])
        whereabouts.check_invariants()
        assert all(whereabouts.of(name.tobytes()) is peers[turn % 2] for name in called)
    assert whereabouts.of(names(40, 0)[0].tobytes()) is None


def test_only_what_a_rank_has_is_asked_of_its_counterpart(made: Made) -> None:
    """A pool that ranks share: see ``Share``. Other parts are other bytes."""
    peer = made.peer()
    own = about(slot_bytes=SLOT, columns=1)
    medium = made.medium(peer.address, own=replace(own, num_parts=2), up=False)
    wait_for(medium.fleet, "refused")
    assert "part 0 of 1" in medium.statuses()[0].reason
    assert Share(0, 2) != Share()
