"""Pools of peers, and fleets that find them, for tests: real servers on loopback."""

import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offload.fleet_config import Address, TlsFiles
from offload.messages import Ids, Kept, Listening, Names
from offload.worker.media.base import PoolSlots
from offload.worker.peers.addresses import Addresses
from offload.worker.peers.fleet import Fleet
from offload.worker.peers.handshake import describe_machine, describe_namespace
from offload.worker.peers.landing import Landing
from offload.worker.peers.link import dial
from offload.worker.peers.nixl import Exposed
from offload.worker.peers.peer import Caller
from offload.worker.peers.protocol import About, Memory
from offload.worker.peers.server import PeerServer, listen
from offload.worker.peers.shown import Shown
from offload.worker.pool.region import RegionShape
from offload.worker.pool.segment import Segment, machine
from offload.worker.seals import SealTables, checksums_of
from tests.offload.worker.media.bench import wait_until

KEY = b"k" * 32
PEER, EPOCH = b"prefill0", b"epoch000"
HERE = Address("127.0.0.1", 0)


def about(
    namespace: str = "{}",
    rank: int = 0,
    *,
    slot_bytes: int,
    columns: int = 0,
    is_near: bool = False,
    **more: Any,
) -> About:
    """Of a rank; ``is_near``: peers on this machine may map its pool, or it may map theirs."""
    where = describe_machine(machine()) if is_near else b""
    return About(describe_namespace(namespace), rank, 1, 0, 1, slot_bytes, columns, where, **more)


class PeerPool:
    """A pool with seals, whose slots are served."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        namespace: str = "{}",
        rank: int = 0,
        columns: int = 0,
        is_near: bool = False,
        has_nixl: bool = False,
        key: bytes = KEY,
        context: ssl.SSLContext | None = None,
        peer: bytes = PEER,
        epoch: bytes | None = EPOCH,
        port: int = 0,
        **server: Any,
    ) -> None:
        self.shape = RegionShape(num_slots, slot_bytes)
        nbytes = self.shape.slots_bytes + SealTables.num_bytes(num_slots)
        self.segment = Segment.create(nbytes)
        self._slots = self.segment.map(0, self.shape.slots_bytes)
        tables = self.segment.map(self.shape.slots_bytes, SealTables.num_bytes(num_slots))
        self.tables = SealTables.over(tables, num_slots)
        self.tables.clear()
        content = np.frombuffer(self._slots, dtype=np.uint8, count=num_slots * slot_bytes)
        self.bytes = content.reshape(num_slots, slot_bytes)
        self.slots = PoolSlots(self.bytes.ctypes.data, num_slots, slot_bytes)
        own = about(namespace, rank, slot_bytes=slot_bytes, columns=columns, is_near=is_near, peer=peer)
        name = self.segment.here
        memory = Memory(name.pid, name.fd, name.label, name.nbytes, num_slots) if is_near else None
        self.peer = peer
        self.shown = Shown(own, self.slots, self.tables, memory)
        self._exposed = Exposed(self.slots) if has_nixl else None
        if self._exposed is not None:
            self.shown.reachable = self._exposed.reachable
        if epoch is not None:
            self.begin(epoch)
        self.server = PeerServer(listen(HERE._replace(port=port), 0), self.shown, key, context, **server)
        self.num_used = 0

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.server.port)

    def begin(self, epoch: bytes = EPOCH, suffix: bytes = b"") -> None:
        """Another life."""
        self.shown.begin(Listening(self.peer, epoch, suffix))

    def fill(self, slots: Ids, content: np.ndarray, generation: int) -> None:
        """A store has come to these slots, and nobody was told what it is."""
        self.tables.fills[slots] = -1
        self.bytes[slots] = content
        self.tables.sums[slots] = checksums_of(self.slots.addresses(slots)[:, None], [self.slots.slot_bytes])
        self.tables.fills[slots] = generation

    def keep(
        self, slots: Ids, names: Names, marks: Ids, generation: int, parents: Names | None = None
    ) -> None:
        """Slots hold that."""
        before = np.zeros_like(names) if parents is None else parents
        self.shown.keep(Kept(slots, np.full(len(slots), generation), names, before, marks))

    def store(self, names: Names, content: np.ndarray, generation: int = 1) -> Ids:
        """Positions of one slot each, one behind the other, in the next free slots. Which these are."""
        slots = np.arange(self.num_used, self.num_used + len(names))
        self.num_used += len(names)
        self.fill(slots, content, generation)
        parents = np.concatenate([np.zeros_like(names[:1]), names[:-1]])
        self.keep(slots, names, np.zeros(len(slots), dtype=np.int64), generation, parents)
        return slots

    def close(self) -> None:
        assert self.server.close(30)
        if self._exposed is not None:
            self._exposed.close()
        self.segment.close()


def fleet_of(
    addresses: Sequence[Address],
    pool: PoolSlots,
    own: About,
    *,
    key: bytes = KEY,
    context: ssl.SSLContext | None = None,
    landing: Landing | None = None,
    **more: Any,
) -> Fleet:
    """Of peers at these addresses, all of this machine."""

    def call(host: str, port: int) -> Any:
        return dial(host, port, context, io_seconds=5.0)

    caller = Caller(call, key, own, pool, context is not None, landing)
    return Fleet(Addresses([each.shown for each in addresses], own.rank), caller, **more)


def wait_for(fleet: Fleet, *states: str) -> None:
    """Until its peers have these states, in order of their addresses."""
    wait_until(lambda: [each.state for each in sorted(fleet.statuses())] == list(states))


def names(count: int, seed: int = 0) -> Names:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def contents(count: int, slot_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, slot_bytes), dtype=np.uint8)


def make_certificates(path: Path, who: Sequence[str] = ("peer",)) -> dict[str, TlsFiles]:
    """An authority, and a certificate that it has signed for each of these."""
    path.mkdir(parents=True, exist_ok=True)
    ca, ca_key = path / "ca.pem", path / "ca.key"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        "req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=fleet"
    )  # fmt: skip
    found = {}
    for name in who:
        cert, key, request = path / f"{name}.pem", path / f"{name}.key", path / f"{name}.csr"
        _openssl("req", *curve, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert,
            "-days", "2",
        )  # fmt: skip
        found[name] = TlsFiles(cert_file=str(cert), key_file=str(key), ca_file=str(ca))
    return found


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
