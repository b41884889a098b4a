"""What every medium promises that finds extents by name: in memory, faulty, and over real servers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.messages import Ids, Names
from offload.mooncake_config import MOONCAKE
from offload.store_config import StoreAddress
from offload.testing.media.faulty import FaultyMedium
from offload.testing.media.store import MemoryStore, StoreMedium
from offload.worker.media.base import Medium, MediumEnd, MediumJob, Verb
from offload.worker.media.mooncake_medium import MooncakeMedium, MooncakeOptions
from offload.worker.media.resp_medium import RespMedium, RespOptions
from offload.worker.media.store_names import Whose
from tests.mooncake import MooncakeServer
from tests.offload.worker.media.bench import EXTENT, GET, PUT, SLOTS, Pool, ends, ids, run, wait_until
from tests.stores import SERVERS, StoreServer

pytestmark = pytest.mark.timeout(120)

PROBE = Verb.PROBE
WHOSE = Whose("model and layout", "0 of 1")

Server = StoreServer | MooncakeServer

Extents = list[tuple[str, list[int]]]
"""Each with a letter for its name, and slots."""


def names_of(letters: str) -> Names:
    return np.frombuffer(b"".join(each.encode() * 32 for each in letters), dtype=np.uint8).reshape(-1, 32)


def job(
    pool: Pool, job_id: int, verb: Verb, extents: Extents, skips: Ids | None = None, **more: Any
) -> MediumJob:
    slots = [slot for _, each in extents for slot in each]
    sizes = [len(each) for _, each in extents]
    return MediumJob(
        job_id,
        verb,
        np.arange(len(extents)),
        np.ones(len(extents), dtype=np.int64),
        np.cumsum([0, *sizes], dtype=np.int64),
        ids(*slots),
        pool.seals(slots) if verb is PUT else None,
        skips,
        names_of("".join(name for name, _ in extents)),
        depths=np.arange(len(extents)),
        **more,
    )


def probe(job_id: int, letters: str, **more: Any) -> MediumJob:
    zeros = np.zeros(len(letters), dtype=np.int64)
    starts, none = np.zeros(len(letters) + 1, dtype=np.int64), ids()
    return MediumJob(job_id, PROBE, zeros, zeros + 1, starts, none, names=names_of(letters), **more)


class Bench:
    """A pool, a medium over a store, and others over the same store."""

    def __init__(self, make: Callable[[Pool, Whose], Medium]) -> None:
        self.pool = Pool()
        self._make = make
        self.media: list[Medium] = []
        self.medium = self.another()
        self._job_id = 0

    def another(self, whose: Whose = WHOSE) -> Medium:
        medium = self._make(self.pool, whose)
        self.media.append(medium)
        return medium

    def put(self, *extents: tuple[str, list[int]], medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(job(self.pool, self.next, PUT, list(extents), **more), medium)

    def get(self, *extents: tuple[str, list[int]], medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(job(self.pool, self.next, GET, list(extents), **more), medium)

    def probe(self, letters: str, medium: Medium | None = None, **more: Any) -> MediumEnd:
        return self.run(probe(self.next, letters, **more), medium)

    def run(self, job: MediumJob, medium: Medium | None) -> MediumEnd:
        return run(self.medium if medium is None else medium, job)

    @property
    def next(self) -> int:
        self._job_id += 1
        return self._job_id


def in_memory(path: Path) -> Callable[[Pool, Whose], Medium]:
    store = MemoryStore()
    ranks = list[Whose]()

    def make(pool: Pool, whose: Whose) -> Medium:
        if whose not in ranks:
            ranks.append(whose)
        return StoreMedium(store, pool.slots, extent_slots=EXTENT, rank=ranks.index(whose))

    return make


def faulty_without_faults(path: Path) -> Callable[[Pool, Whose], Medium]:
    make = in_memory(path)
    return lambda pool, whose: FaultyMedium(make(pool, whose), pool.slots)


def over_resp(address: str, **options: Any) -> Callable[[Pool, Whose], Medium]:
    def make(pool: Pool, whose: Whose) -> Medium:
        return RespMedium(
            StoreAddress.of(address),
            pool.slots,
            whose=whose,
            extent_slots=EXTENT,
            options=RespOptions(**options),
        )

    return make


def over_mooncake(server: MooncakeServer) -> Callable[[Pool, Whose], Medium]:
    options = MooncakeOptions(most_extents=3)

    def make(pool: Pool, whose: Whose) -> Medium:
        return MooncakeMedium(
            server.config,
            pool.slots,
            whose=whose,
            extent_slots=EXTENT,
            options=options,
            connect=server.kept,
        )

    return make


RESP_KINDS = [f"{kind} {way}" for kind in SERVERS for way in ("unix", "tcp", "keyed")]
KINDS = ["memory", "faulty", *RESP_KINDS, MOONCAKE]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """One server of each kind for all of these tests."""
    running: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in running:
            path = tmp_path_factory.mktemp(kind)
            running[kind] = MooncakeServer(path) if kind == MOONCAKE else StoreServer(kind, path)
        return running[kind]

    yield get
    for server in running.values():
        server.kill()


@pytest.fixture(params=KINDS)
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]
) -> Iterator[Bench]:
    kind, _, way = request.param.partition(" ")
    if kind == MOONCAKE:
        mooncake = servers(kind)
        assert isinstance(mooncake, MooncakeServer)
        mooncake.clear()
        make = over_mooncake(mooncake)
    elif kind in SERVERS:
        server = servers(kind)
        assert isinstance(server, StoreServer)
        server.call(b"FLUSHALL")
        options = {"name_key": b"secret"} if way == "keyed" else {}
        make = over_resp(server.tcp_url if way == "tcp" else server.url, **options)
    else:
        make = {"memory": in_memory, "faulty": faulty_without_faults}[kind](tmp_path)
    bench = Bench(make)
    yield bench
    for medium in bench.media:
        assert medium.close(30)


def test_what_was_put_is_what_is_got(bench: Bench) -> None:
    before, seals = bench.pool.read([5, 1, 2, 9]), bench.pool.seals([5, 1, 2, 9])
    put = bench.put(("A", [5, 1, 2, 9]))
    assert (put.num_good, put.error, put.seals) == (1, None, None)
    bench.pool.fill(range(SLOTS))
    others = bench.pool.bytes.copy()
    end = bench.get(("A", [40, 41, 20, 7]))
    assert (end.num_good, end.error, end.nbytes) == (1, None, 4 * bench.pool.slots.slot_bytes)
    assert bench.pool.read([40, 41, 20, 7]) == before
    assert np.array_equal(end.seals, seals)
    untouched = [slot for slot in range(SLOTS) if slot not in (40, 41, 20, 7)]
    assert np.array_equal(bench.pool.bytes[untouched], others[untouched])


def test_another_medium_finds_it(bench: Bench) -> None:
    bench.put(("A", [0, 1]), ("B", [2]))
    other = bench.another()
    assert bench.get(("B", [10]), ("A", [11, 12]), medium=other).num_good == 2
    assert bench.pool.read([10, 11, 12]) == bench.pool.read([2, 0, 1])
    assert bench.probe("AB", medium=other).num_good == 2


@pytest.mark.parametrize(("skip", "count"), [(1, 3), (3, 1), (0, 2), (1, 1)])
def test_a_part_of_an_extent(bench: Bench, skip: int, count: int) -> None:
    bench.put(("A", [0, 1, 2, 3]))
    others = bench.pool.bytes.copy()
    end = bench.get(("A", list(range(20, 20 + count))), skips=ids(skip))
    assert end.error is None
    assert bench.pool.read(range(20, 20 + count)) == bench.pool.read(range(skip, skip + count))
    assert np.array_equal(end.seals, bench.pool.seals(range(skip, skip + count)))
    untouched = [slot for slot in range(SLOTS) if not 20 <= slot < 20 + count]
    assert np.array_equal(bench.pool.bytes[untouched], others[untouched])


def test_what_is_not_there_is_absent(bench: Bench) -> None:
    bench.put(("A", [0]))
    end = bench.get(("A", [20]), ("B", [21]), ("A", [22]))
    assert (end.num_good, end.is_absent) == (1, True)
    assert end.error is not None
    assert bench.pool.read([20]) == bench.pool.read([0])


def test_more_slots_than_there_are_is_no_miss(bench: Bench) -> None:
    bench.put(("A", [0]))
    end = bench.get(("A", [20, 21]))
    assert (end.num_good, end.is_absent) == (0, False)


def test_what_is_there_stays_as_it_is(bench: Bench) -> None:
    """The same name has the same bytes. Who comes second moves none."""
    bench.put(("A", [0]))
    bench.another()
    assert bench.put(("A", [1]), ("B", [2]), medium=bench.media[1]).num_good == 2
    assert bench.get(("A", [20]), ("B", [21])).num_good == 2
    assert bench.pool.read([20, 21]) == bench.pool.read([0, 2])


def test_another_suffix_is_another_extent(bench: Bench) -> None:
    bench.put(("A", [0]), suffix=b"one")
    assert bench.get(("A", [20])).is_absent
    assert bench.get(("A", [20]), suffix=b"two").is_absent
    assert bench.probe("A").num_good == 0
    assert bench.probe("A", suffix=b"one").num_good == 1
    assert bench.get(("A", [20]), suffix=b"one").num_good == 1


@pytest.mark.parametrize("whose", [Whose(WHOSE.namespace, "1 of 2"), Whose("another model", WHOSE.rank)])
def test_another_namespace_or_rank_finds_nothing(bench: Bench, whose: Whose) -> None:
    bench.put(("A", [0]))
    other = bench.another(whose)
    assert bench.probe("A", medium=other).num_good == 0
    assert bench.get(("A", [20]), medium=other).is_absent
    assert bench.put(("A", [1]), medium=other).num_good == 1
    assert bench.get(("A", [20])).num_good == 1
    assert bench.pool.read([20]) == bench.pool.read([0])


@pytest.mark.parametrize("num_there", [0, 1, 2, 15, 16, 17, 25, 26])
def test_leading_names_are_counted(bench: Bench, num_there: int) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if num_there:
        bench.put(*((letter, [index]) for index, letter in enumerate(letters[:num_there])))
    end = bench.probe(letters)
    assert (end.num_good, end.error, end.nbytes) == (num_there, None, 0)


@pytest.mark.parametrize("there", ["", "A", "C", "AC", "Z", "BDY"])
def test_the_last_name_that_is_there_is_found(bench: Bench, there: str) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if there:
        bench.put(*((letter, [index]) for index, letter in enumerate(there)))
    end = bench.probe(letters, is_last_wanted=True)
    assert (end.num_good, end.error) == (letters.index(there[-1]) + 1 if there else 0, None)


def test_the_last_of_many_names(bench: Bench) -> None:
    names = np.random.default_rng(0).integers(0, 256, (1000, 32), dtype=np.uint8)
    put = replace(job(bench.pool, 1, PUT, [("A", [0])]), names=names[400:401])
    assert run(bench.medium, put).num_good == 1
    asked = replace(probe(2, "A" * 1000, is_last_wanted=True), names=names)
    assert run(bench.medium, asked).num_good == 401


def test_slots_that_have_changed_are_not_put(bench: Bench) -> None:
    changed = job(bench.pool, 1, PUT, [("A", [0]), ("B", [1, 2]), ("C", [3])])
    bench.pool.bytes[2, -1] ^= 1
    end = run(bench.medium, changed)
    assert end.num_good == 1
    assert end.error is not None and not end.is_absent
    assert bench.get(("B", [20, 21])).is_absent, "rot was passed down"


def test_other_bytes_than_were_asked_for_are_not_got(bench: Bench) -> None:
    bench.put(("A", [0]))
    wanted = replace(job(bench.pool, 9, GET, [("A", [20])]), seals=bench.pool.seals([1]))
    end = run(bench.medium, wanted)
    assert (end.num_good, end.is_absent) == (0, False)


def test_jobs_that_cannot_be_are_refused(bench: Bench) -> None:
    before = bench.pool.bytes.copy()
    bad = [
        replace(job(bench.pool, 1, GET, [("A", [0])]), names=None),
        replace(job(bench.pool, 2, GET, [("A", [0])]), names=names_of("AB")),
        job(bench.pool, 3, GET, [("A", [SLOTS])]),
        job(bench.pool, 4, GET, [("A", list(range(EXTENT + 1)))]),
        replace(job(bench.pool, 5, PUT, [("A", [0])]), seals=None),
    ]
    for each in bad:
        end = run(bench.medium, each)
        assert end.num_good == 0 and end.error is not None and not end.is_absent
    assert np.array_equal(bench.pool.bytes, before)


def test_a_job_of_no_extents_ends_as_well(bench: Bench) -> None:
    for verb in (PUT, GET):
        end = run(bench.medium, job(bench.pool, 1, verb, []))
        assert (end.num_good, end.error, end.nbytes) == (0, None, 0)


def test_many_jobs_end_once_each(bench: Bench) -> None:
    letters = "ABCDEFGHIJKL"
    for turn in range(3):
        suffix = bytes([turn + 1])
        for index, letter in enumerate(letters):
            extents = [(letter, [4 * index, 4 * index + 2])]
            bench.medium.submit(job(bench.pool, index, PUT, extents, suffix=suffix))
        assert [end.num_good for end in ends(bench.medium, len(letters))] == [1] * len(letters)
        for index, letter in enumerate(letters):
            extents = [(letter, [4 * index + 1, 4 * index + 3])]
            bench.medium.submit(job(bench.pool, index, GET, extents, suffix=suffix))
        assert [end.error for end in ends(bench.medium, len(letters))] == [None] * len(letters)
        for index in range(len(letters)):
            at = 4 * index
            assert bench.pool.read([at, at + 2]) == bench.pool.read([at + 1, at + 3])
        bench.pool.fill(range(SLOTS))
    assert bench.medium.poll() == []


def test_closing_finishes_what_was_submitted(bench: Bench) -> None:
    bench.medium.submit(job(bench.pool, 1, PUT, [(letter, [0, 1]) for letter in "ABCDEFGH"]))
    assert bench.medium.close(30)
    (end,) = ends(bench.medium)
    assert end.num_good == 8
    assert bench.medium.close(30)
    late = run(bench.medium, job(bench.pool, 2, PUT, [("A", [0])]))
    assert late.num_good == 0 and "closed" in str(late.error)


def test_it_is_not_off(bench: Bench) -> None:
    assert not bench.medium.is_off
    wait_until(lambda: bench.medium.poll() == [])
