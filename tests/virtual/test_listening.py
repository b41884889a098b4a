"""What an engine that listens has stored is fetched from it, over real connections, and nothing else is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.fleet_config import Address
from offload.naming import bag_names, rows
from offload.testing import seams
from offload.testing.engines.server import held_port, held_ports
from offload.testing.virtual import MODELS, VirtualEngine
from offload.testing.virtual import engine as module
from offload.testing.virtual.settings import make_vllm_config
from offload.vllm.hand_offs import listener_of
from offload.worker.peers.client import Client, Wanted
from offload.worker.peers.link import dial
from offload.worker.peers.near import NearPool
from offload.worker.seals import checksums_of
from tests.offload.worker.media.bench import Pool, wait_until
from tests.virtual.driver import come_to_rest, make_engine, serve, tokens

pytestmark = pytest.mark.timeout(120)

BLOCK, WHOLE = 4, 20
PROMPT = tokens(WHOLE * BLOCK + 2)
KEY = b"the fleet's key, of 32 bytes....."


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., VirtualEngine]]:
    """Makes engines that listen."""
    made: list[VirtualEngine] = []
    held = ExitStack()
    (tmp_path / "key").write_bytes(KEY)

    def make(port: int | None = None, num_ranks: int = 1, **settings: Any) -> VirtualEngine:
        if port is None:
            ports = [held.enter_context(each).getsockname()[1] for each in held_ports(num_ranks)]
            port = ports[0]
        fleet = {"listen": f"127.0.0.1:{port}", "fleet_key_file": str(tmp_path / "key")}

        def with_fleet(virtual: Any, *others: Any) -> Any:
            vllm_config = make_vllm_config(virtual, *others)
            vllm_config.kv_transfer_config.kv_connector_extra_config |= fleet
            return vllm_config

        with monkeypatch.context() as patched:
            patched.setattr(module, "make_vllm_config", with_fleet)
            patched.setattr(seams, "_no_listener", listener_of)
            made.append(make_engine(cpu_slots=96, gpu_blocks=140, num_ranks=num_ranks, **settings))
        return made[-1]

    with held:
        yield make
        for engine in made:
            engine.close()


class Fetching:
    """One who asks a rank, with the same namespace and a pool of its own."""

    def __init__(self, engine: VirtualEngine, rank: int = 0) -> None:
        listener = engine.ranks[rank].side._listener
        assert listener is not None and listener.shown is not None
        self.shown = listener.shown
        self.pool = Pool(self.shown.slot_bytes)
        address: Address = listener._plan.address
        link = dial(address.host, address.port + rank)
        self.client = Client(link, KEY, self.shown.about, self.pool.slots)

    def get(self, names: Any, count: int = 1, near: NearPool | None = None, skip: int = 0) -> int:
        """Leading extents that came, each of so many slots."""
        slots = np.arange(len(names) * count)
        wanted = Wanted(names, [count] * len(names), [skip] * len(names), slots, self.client.suffix)
        got = self.client.get(wanted, near)
        assert got.num_right == got.num_extents, "wrong bytes"
        return got.num_extents


def names_of(engine: VirtualEngine, prompt: list[int] = PROMPT) -> Any:
    """Prefix hashes of its blocks, as the engine computes them."""
    request = engine.add(prompt, 1)
    engine.drain(500)
    return rows([bytes(each) for each in request.block_hashes])


def test_what_is_stored_is_there_for_peers(listening: Callable[..., VirtualEngine]) -> None:
    engine = listening()
    names = names_of(engine)
    assert len(names) == WHOLE
    come_to_rest(engine)
    peer = Fetching(engine)
    wait_until(lambda: peer.client.probe(names, b"") == WHOLE)
    assert peer.get(names) == WHOLE
    by_hash = engine.side.allocator
    assert by_hash.num_resident == WHOLE
    content = peer.pool.bytes[:WHOLE].copy()
    side = engine.ranks[0].side
    assert side._memory is not None
    sums = checksums_of(peer.pool.slots.addresses(np.arange(WHOLE))[:, None], [peer.pool.slots.slot_bytes])
    seals = side._engine._seals  # type: ignore[union-attr]
    assert set(sums.tolist()) <= set(seals.sums(np.arange(96)).tolist())
    memory = peer.client.memory
    assert memory is not None, "it is on this machine"
    near = NearPool(memory, peer.shown.slot_bytes)
    peer.pool.fill(range(WHOLE))
    assert peer.get(names, near=near) == WHOLE
    assert np.array_equal(peer.pool.bytes[:WHOLE], content)
    peer.pool.fill(range(WHOLE))
    assert peer.get(names[-1:], WHOLE) == 1, "an extent of many positions"
    assert np.array_equal(peer.pool.bytes[:WHOLE], content)
    peer.client.close()


def test_after_a_reset_nothing_of_before_is_there(listening: Callable[..., VirtualEngine]) -> None:
    engine = listening()
    names = names_of(engine)
    come_to_rest(engine)
    peer = Fetching(engine)
    wait_until(lambda: peer.client.probe(names, b"") == WHOLE)
    life = peer.client.life
    engine.reset()
    serve(engine, PROMPT)
    come_to_rest(engine)
    wait_until(lambda: peer.client.probe(names, b"") == 0)
    wait_until(lambda: (peer.client.ping(), peer.client.life)[1] != life)
    assert peer.client.suffix != b""
    assert peer.client.probe(names, peer.client.suffix) == 0, "private"
    assert peer.get(names) == 0
    peer.client.close()


@pytest.mark.parametrize(
    "settings", [{"num_ranks": 2}, {"num_ranks": 2, "replicas": 2}, {"dcp": 2, "num_ranks": 2}]
)
def test_each_rank_listens_behind_the_one_before(
    listening: Callable[..., VirtualEngine], settings: dict[str, Any]
) -> None:
    engine = listening(**settings)
    names = names_of(engine)
    come_to_rest(engine)
    for rank in range(2):
        peer = Fetching(engine, rank)
        wait_until(lambda: peer.client.probe(names, b"") == len(names))  # noqa: B023
        assert peer.get(names) == len(names)
        peer.client.close()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_models_of_all_kinds_have_something_for_peers(
    listening: Callable[..., VirtualEngine], model: str
) -> None:
    engine = listening(groups=MODELS[model])
    names = names_of(engine)
    come_to_rest(engine)
    peer = Fetching(engine)
    columns = peer.shown.about.columns
    called = names if columns else bag_names(names)
    wait_until(lambda: peer.client.probe(called, b"", is_last_wanted=True) > 0)
    there = called[[peer.client.probe(name[None], b"") == 1 for name in called]]
    assert len(there) and peer.get(there, max(columns, 1)) == len(there)
    if columns:
        assert peer.get(there[-1:], len(there) * columns) == 1, "an extent of many positions"
    peer.client.close()


def test_a_release_is_reported_to_the_scheduler(listening: Callable[..., VirtualEngine]) -> None:
    engine = listening(num_ranks=2)
    serve(engine, PROMPT)
    for rank in range(2):
        peer = Fetching(engine, rank)
        peer.client.release(bytes([rank]) * 32, peer.client.life.epoch)
        peer.client.close()
    reports = [rank.side.take_report() for rank in engine.ranks]
    assert [report and report.released for report in reports] == [[bytes(32)], None]


def test_a_port_that_is_taken_is_refused_at_start(listening: Callable[..., VirtualEngine]) -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        listening(port)
        with pytest.raises(ConfigError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            listening(port)


def test_closing_an_engine_closes_its_port(listening: Callable[..., VirtualEngine]) -> None:
    engine = listening()
    serve(engine, PROMPT)
    peer = Fetching(engine)
    engine.close()
    with pytest.raises(ConnectionError):
        peer.client.ping()
    peer.client.close()
    memory = peer.client.memory
    assert memory is not None
    with pytest.raises(OSError, match=r"No such file|not kv-offload"):
        NearPool(memory, peer.shown.slot_bytes)
