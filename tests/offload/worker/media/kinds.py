"""Kinds of media, over what is real, and what each of them can do: for laws that hold for all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offload.fleet_config import TlsFiles
from offload.messages import EPOCH_SHIFT, Kept
from offload.mooncake_config import MOONCAKE
from offload.naming import BAG, WIDTH_SHIFT, bag_names
from offload.peering.tls import client_context, server_context
from offload.store_config import StoreAddress
from offload.testing.copiers.paced import Link, Pace, RealClock
from offload.testing.media.faulty import FaultyMedium
from offload.testing.media.memory import MemoryMedium
from offload.testing.media.paced import PacedMedium
from offload.testing.media.store import MemoryStore, StoreMedium
from offload.worker.media.base import Medium, MediumEnd, MediumJob, Verb
from offload.worker.media.mooncake_medium import MooncakeMedium, MooncakeOptions
from offload.worker.media.peers import PeerMedium
from offload.worker.media.resp_medium import RespMedium, RespOptions
from offload.worker.media.siblings import SiblingMedium
from offload.worker.media.store_names import Whose
from offload.worker.peers.landing import Landing
from offload.worker.pool.region import RegionPlan, RegionShape
from offload.worker.pool.siblings import Home, Siblings
from offload.worker.pool.table import SlotTable
from tests.mooncake import MooncakeServer
from tests.nixl import need_nixl
from tests.offload.worker.media.bench import (
    EXTENT,
    GET,
    ODD_SLOT,
    PLACES,
    PUT,
    SLOT,
    SLOTS,
    WHOSE,
    Pool,
    job,
    probe,
    run,
    slab,
)
from tests.offload.worker.peers.pools import PeerPool, about, fleet_of, make_certificates, wait_for
from tests.stores import SERVERS, StoreServer


class Can(NamedTuple):
    """What media of a kind can do. A law of what one cannot do leaves it out, or says what holds instead.

    Attributes:
        puts: takes extents in; else others put them there.
        by_name: finds extents by name, for all who have the same namespace, and answers questions; else by
            place and generation, and a place is written again and again.
        knows_extents: as such, with their lengths; else a name stands for slots, as many as there are.
        is_asked_first: gives back what was there when it was last asked a question.
    """

    puts: bool = True
    by_name: bool = True
    knows_extents: bool = True
    is_asked_first: bool = False


BY_PLACE = Can(by_name=False)
BY_NAME = Can()
OF_OTHERS = Can(puts=False, knows_extents=False, is_asked_first=True)
OF_PEERS = Can(puts=False, knows_extents=False)


@dataclass
class Ground:
    """What media of one kind are over.

    Attributes:
        medium: makes one that fills slots of a pool. Over a slab there is but one.
        slot_bytes: of a slot.
        store: puts extents there, where media do not.
        close: an end of it, when all media are closed.
    """

    medium: Callable[[Pool, Whose], Medium]
    slot_bytes: int = SLOT
    store: Callable[[Pool, MediumJob], None] | None = None
    close: Callable[[], None] = lambda: None


Server = StoreServer | MooncakeServer
Servers = Callable[[str], Server]


class Kind(NamedTuple):
    """One of them.

    Attributes:
        can: what its media can do.
        begin: makes what they are over, of a directory and of servers by kind. Nothing is there.
    """

    can: Can
    begin: Callable[[Path, Servers], Ground]


def _memory(path: Path, servers: Servers) -> Ground:
    return Ground(lambda pool, _: MemoryMedium(pool.slots, extent_slots=EXTENT, num_places=PLACES))


def _slab(slot_bytes: int = SLOT, **options: Any) -> Callable[[Path, Servers], Ground]:
    return lambda path, _: Ground(lambda pool, _: slab(path / "rank0", pool, **options), slot_bytes)


def _faulty(begin: Callable[[Path, Servers], Ground]) -> Callable[[Path, Servers], Ground]:
    """Over others, and without faults."""

    def begin_faulty(path: Path, servers: Servers) -> Ground:
        make = begin(path, servers).medium
        return Ground(lambda pool, whose: FaultyMedium(make(pool, whose), pool.slots))

    return begin_faulty


def _store(path: Path, servers: Servers) -> Ground:
    store, ranks = MemoryStore(), list[Whose]()

    def make(pool: Pool, whose: Whose) -> Medium:
        if whose not in ranks:
            ranks.append(whose)
        return StoreMedium(store, pool.slots, extent_slots=EXTENT, rank=ranks.index(whose))

    return Ground(make)


def _far(path: Path, servers: Servers) -> Ground:
    """A store behind a link."""
    make, link = _store(path, servers).medium, Link(RealClock(), lambda: Pace(1e9, 1e-3))
    return Ground(lambda pool, whose: PacedMedium(make(pool, whose), link, SLOT))


def _resp(kind: str, way: str) -> Callable[[Path, Servers], Ground]:
    def begin(path: Path, servers: Servers) -> Ground:
        server = servers(kind)
        assert isinstance(server, StoreServer)
        server.call(b"FLUSHALL")
        address = StoreAddress.of(server.tcp_url if way == "tcp" else server.url)
        options = RespOptions(name_key=b"secret") if way == "keyed" else RespOptions()
        return Ground(
            lambda pool, whose: RespMedium(
                address, pool.slots, whose=whose, extent_slots=EXTENT, options=options
            )
        )

    return begin


def _mooncake(path: Path, servers: Servers) -> Ground:
    server = servers(MOONCAKE)
    assert isinstance(server, MooncakeServer)
    server.clear()
    return Ground(
        lambda pool, whose: MooncakeMedium(
            server.config,
            pool.slots,
            whose=whose,
            extent_slots=EXTENT,
            options=MooncakeOptions(most_extents=3),
            connect=server.kept,
        )
    )


class SiblingRegion:
    """A region of an engine beside this one. Its slots have no positions: an extent is a bag of them."""

    def __init__(self, root: Path) -> None:
        self._plan = RegionPlan(root, WHOSE.namespace, 0, 1)
        self._shape = RegionShape(SLOTS, SLOT)
        self._region = self._plan.open(self._shape, 1)
        self._region.begin(1, self._identity(WHOSE), self._shape)
        self._memory = self._region.segment.map(0, self._shape.slots_bytes)
        self._rows = self._region.segment.map(self._shape.slots_bytes, self._shape.table_bytes)
        self._table = SlotTable(self._rows, SLOTS, self._identity(WHOSE))
        self._num_used = 0

    def medium(self, pool: Pool, whose: Whose) -> Medium:
        home = Home(self._plan.root / "own", self._identity(whose), SLOT)
        return SiblingMedium(Siblings(home, 0, clock=lambda: 0.0), pool.slots)

    def store(self, pool: Pool, job: MediumJob) -> None:
        assert job.names is not None
        for index, name in enumerate(bag_names(job.names)):
            slots = job.extent(index).slots
            there = np.arange(self._num_used, self._num_used + len(slots))
            self._num_used += len(slots)
            start = int(there[0]) * SLOT
            self._memory[start : start + len(slots) * SLOT] = pool.read(slots.tolist())
            generations = np.full(len(slots), 1 << EPOCH_SHIFT | job.job_id, dtype=np.int64)
            self._table.seals.fills[there] = generations
            self._table.seals.sums[there] = pool.seals(slots.tolist())
            names = np.repeat(name[None], len(slots), axis=0)
            marks = np.arange(len(slots)) | BAG | name.size << WIDTH_SHIFT
            self._table.keep(Kept(there, generations, names, np.zeros_like(names), marks))

    def close(self) -> None:
        self._region.close()

    def _identity(self, whose: Whose) -> str:
        return f"{whose.namespace}\n{whose.rank}"


class PeerRegion:
    """Pools of peers: one for each rank, which those of other ranks and namespaces are refused by."""

    def __init__(self, *, is_near: bool = False, has_nixl: bool = False, tls: TlsFiles | None = None) -> None:
        self._near, self._nixl, self._tls = is_near, has_nixl, tls
        context = None if tls is None else server_context(tls)
        self._peer = PeerPool(
            SLOTS, SLOT, namespace=WHOSE.namespace, is_near=is_near, has_nixl=has_nixl, context=context
        )

    def medium(self, pool: Pool, whose: Whose) -> Medium:
        own = about(whose.namespace, int(whose.rank[0]), slot_bytes=SLOT, is_near=self._near)
        context = None if self._tls is None else client_context(self._tls)
        address = self._peer.address
        address = address._replace(port=address.port - own.rank)  # of rank 0: what answers is the one peer
        landing = Landing(SLOT) if self._nixl else None
        fleet = fleet_of([address], pool.slots, own, context=context, landing=landing)
        wait_for(fleet, "connected" if whose == WHOSE else "refused")
        [status] = fleet.statuses()
        over = "memory" if self._near else "nixl" if self._nixl else "tls" if self._tls else "tcp"
        assert status.transport == (over if whose == WHOSE else "")
        return PeerMedium(fleet, pool.slots)

    def store(self, pool: Pool, job: MediumJob) -> None:
        assert job.names is not None
        for index, name in enumerate(bag_names(job.names)):
            slots = job.extent(index).slots.tolist()
            there = np.arange(self._peer.num_used, self._peer.num_used + len(slots))
            self._peer.num_used += len(slots)
            self._peer.fill(there, pool.bytes[slots], job.job_id)
            names = np.repeat(name[None], len(slots), axis=0)
            marks = np.arange(len(slots)) | BAG | name.size << WIDTH_SHIFT
            self._peer.keep(there, names, marks, job.job_id)

    def close(self) -> None:
        self._peer.server.check_invariants()
        self._peer.close()


def _peers(
    *, is_near: bool = False, has_nixl: bool = False, has_tls: bool = False
) -> Callable[[Path, Servers], Ground]:
    def begin(path: Path, servers: Servers) -> Ground:
        if has_nixl:
            need_nixl()
        tls = make_certificates(path / "tls")["peer"] if has_tls else None
        region = PeerRegion(is_near=is_near, has_nixl=has_nixl, tls=tls)
        return Ground(region.medium, store=region.store, close=region.close)

    return begin


def _siblings(path: Path, servers: Servers) -> Ground:
    region = SiblingRegion(path)
    return Ground(region.medium, store=region.store, close=region.close)


KINDS = {
    "memory": Kind(BY_PLACE, _memory),
    "faulty memory": Kind(BY_PLACE, _faulty(_memory)),
    "slab": Kind(BY_PLACE, _slab()),
    "slab of odd slots": Kind(BY_PLACE, _slab(ODD_SLOT)),
    "buffered slab": Kind(BY_PLACE, _slab(direct=False)),
    "buffered slab of odd slots": Kind(BY_PLACE, _slab(ODD_SLOT, direct=False)),
    "faulty slab": Kind(BY_PLACE, _faulty(_slab())),
    "store in memory": Kind(BY_NAME, _store),
    "faulty store": Kind(BY_NAME, _faulty(_store)),
    "far store": Kind(BY_NAME, _far),
    **{
        f"{kind} {way}": Kind(BY_NAME, _resp(kind, way))
        for kind in SERVERS
        for way in ("unix", "tcp", "keyed")
    },
    MOONCAKE: Kind(BY_NAME, _mooncake),
    "siblings": Kind(OF_OTHERS, _siblings),
    "peers over TCP": Kind(OF_PEERS, _peers()),
    "peers over TLS": Kind(OF_PEERS, _peers(has_tls=True)),
    "peers by NIXL": Kind(OF_PEERS, _peers(has_nixl=True)),
    "peers on one machine": Kind(OF_PEERS, _peers(is_near=True)),
}


class Bench:
    """A pool, a medium of one kind, and others over the same ground."""

    def __init__(self, kind: Kind, path: Path, servers: Servers) -> None:
        self.can = kind.can
        self._ground = kind.begin(path, servers)
        self.pool = Pool(self._ground.slot_bytes)
        self.media: list[Medium] = []
        self.medium = self.another()
        self._job_id = 0

    def another(self, whose: Whose = WHOSE) -> Medium:
        medium = self._ground.medium(self.pool, whose)
        self.media.append(medium)
        return medium

    def store(self, *extents: tuple[str, list[int]], **more: Any) -> None:
        """See that these are there."""
        self.store_job(self.job(PUT, *extents, **more))

    def store_job(self, job: MediumJob) -> None:
        """The same, of what a job is to put."""
        if self._ground.store is not None:
            self._ground.store(self.pool, job)
        else:
            assert run(self.medium, job).error is None

    def put(self, *extents: tuple[str, list[int]], medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(self.job(PUT, *extents, **more), medium)

    def get(self, *extents: tuple[str, list[int]], medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(self.job(GET, *extents, **more), medium)

    def probe(self, letters: str, medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(probe(self.next, letters, **more), medium)

    def run(self, job: MediumJob, medium: Medium | None = None) -> MediumEnd:
        medium = self.medium if medium is None else medium
        if job.verb is GET:
            self.ask_first(medium)
        return run(medium, job)

    def ask_first(self, medium: Medium) -> None:
        """A question, where a medium gives nothing back that it was not asked for."""
        if self.can.is_asked_first:
            run(medium, probe(self.next, "A"))

    def job(self, verb: Verb, *extents: tuple[str, list[int]], **more: Any) -> MediumJob:
        return job(self.pool, self.next, verb, extents, **more)

    @property
    def next(self) -> int:
        self._job_id += 1
        return self._job_id

    def close(self) -> None:
        for medium in self.media:
            assert medium.close(30)
        self._ground.close()
