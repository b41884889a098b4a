"""What every medium promises; and what those promise that find extents by place, and those by name.

``KINDS`` says what there is, and what media of each kind can do.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.mooncake_config import MOONCAKE
from offload.worker.media.store_names import Whose
from tests.mooncake import MooncakeServer
from tests.offload.worker.media.bench import (
    EXTENT,
    GET,
    PLACES,
    PUT,
    SLOTS,
    WHOSE,
    ends,
    ids,
    names_of,
    probe,
    run,
)
from tests.offload.worker.media.kinds import KINDS, Bench, Can, Server, Servers
from tests.stores import StoreServer
from tests.strategies import thorough

pytestmark = pytest.mark.timeout(120)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def of_those(which: Callable[[Can], bool]) -> pytest.MarkDecorator:
    """A law of media that can do this."""
    found = [name for name, kind in KINDS.items() if which(kind.can)]
    return pytest.mark.parametrize("bench", found, indirect=True)


takes_extents = of_those(lambda can: can.puts)
finds_by_place = of_those(lambda can: not can.by_name)
finds_by_name = of_those(lambda can: can.by_name)
is_a_store = of_those(lambda can: can.by_name and can.puts)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
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
def bench(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[Bench]:
    bench = Bench(KINDS[request.param], tmp_path, servers)
    yield bench
    bench.close()


# Of all


def test_what_is_there_is_what_is_got(bench: Bench) -> None:
    pool = bench.pool
    before, seals = pool.read([5, 1, 2, 9]), pool.seals([5, 1, 2, 9])
    bench.store(("D", [5, 1, 2, 9]))
    pool.fill(range(SLOTS))
    others = pool.bytes.copy()
    end = bench.get(("D", [40, 41, 20, 7]))
    assert (end.num_good, end.error, end.nbytes) == (1, None, 4 * pool.slots.slot_bytes)
    assert pool.read([40, 41, 20, 7]) == before
    assert np.array_equal(end.seals, seals)
    untouched = [slot for slot in range(SLOTS) if slot not in (40, 41, 20, 7)]
    assert np.array_equal(pool.bytes[untouched], others[untouched])


def test_extents_are_of_any_length(bench: Bench) -> None:
    before = bench.pool.read([1]), bench.pool.read([3, 2])
    bench.store(("A", [1]), ("B", [3, 2]))
    bench.pool.fill(range(SLOTS))
    assert bench.get(("B", [10, 11]), ("A", [12])).num_good == 2
    assert (bench.pool.read([12]), bench.pool.read([10, 11])) == before


def test_a_part_of_an_extent(bench: Bench) -> None:
    bench.store(("A", [0, 1, 2, 3]))
    for skip, count in ((1, 3), (3, 1), (0, 2), (1, 1)):
        bench.pool.fill(range(20, SLOTS))
        others = bench.pool.bytes.copy()
        end = bench.get(("A", list(range(20, 20 + count))), skips=ids(skip))
        assert end.error is None
        assert bench.pool.read(range(20, 20 + count)) == bench.pool.read(range(skip, skip + count))
        assert np.array_equal(end.seals, bench.pool.seals(range(skip, skip + count)))
        untouched = [slot for slot in range(SLOTS) if not 20 <= slot < 20 + count]
        assert np.array_equal(bench.pool.bytes[untouched], others[untouched])


def test_a_job_of_no_extents_ends_as_well(bench: Bench) -> None:
    for verb in (PUT, GET) if bench.can.puts else (GET,):
        end = bench.run(bench.job(verb))
        assert (end.num_good, end.error, end.nbytes) == (0, None, 0)


def test_what_is_not_there_is_not_got(bench: Bench) -> None:
    """Whoever finds by name knows that nothing is wrong. A place that has something else is wrong."""
    bench.store(("A", [0]))
    end = bench.get(("A", [20]), ("B", [21]), ("A", [22]))
    assert (end.num_good, end.is_absent) == (1, bench.can.by_name)
    assert end.error is not None
    assert end.nbytes == bench.pool.slots.slot_bytes
    assert bench.pool.read([20]) == bench.pool.read([0])
    assert np.array_equal(end.seals, bench.pool.seals([0]))


def test_more_slots_than_there_are_are_not_got(bench: Bench) -> None:
    bench.store(("A", [0]), ("B", [1]))
    for letter, slots, skip in (("A", [20, 21], 0), ("B", [20], 1)):
        end = bench.get((letter, slots), skips=ids(skip))
        assert (end.num_good, end.is_absent) == (0, not bench.can.knows_extents)


def test_other_bytes_than_were_asked_for_are_not_got(bench: Bench) -> None:
    bench.store(("A", [0]), ("B", [1]))
    wanted = bench.job(GET, ("A", [20]), ("B", [21]))
    end = bench.run(replace(wanted, seals=bench.pool.seals([0, 1])))
    assert (end.num_good, end.error) == (2, None)
    end = bench.run(replace(wanted, seals=bench.pool.seals([0, 2])))
    assert (end.num_good, end.is_absent) == (1, False)


def test_a_job_that_cannot_be_is_refused(bench: Bench) -> None:
    before = bench.pool.bytes.copy()
    bad = [
        (bench.job(GET, ("A", [SLOTS])), "slots from"),
        (bench.job(GET, ("A", [-1])), "slots from"),
        (bench.job(GET, ("A", [])), "add up"),
        (replace(bench.job(GET, ("A", [0])), starts=ids(0, 2)), "add up"),
        (bench.job(GET, ("A", [0]), skips=ids(-1)), "left out"),
        (bench.job(GET, ("A", [0]), epoch=0, by=0), "generation"),
    ]
    if bench.can.knows_extents:
        bad.append((bench.job(GET, ("A", list(range(EXTENT + 1)))), "an extent of"))
        bad.append((bench.job(GET, ("A", [0]), skips=ids(EXTENT)), "an extent of"))
    if bench.can.by_name:
        bad.append((replace(bench.job(GET, ("A", [0])), names=None), "names"))
        bad.append((replace(bench.job(GET, ("A", [0])), names=names_of("AB")), "names"))
    else:
        bad += [
            (replace(bench.job(verb, ("A", [0])), places=ids(place)), "places")
            for verb in (PUT, GET)
            for place in (-1, PLACES)
        ]
        bad.append((bench.job(PUT, ("A", [1]), ("A", [2])), "twice"))
        bad.append((probe(1, "A"), "by name"))
    if bench.can.puts:
        bad.append((replace(bench.job(PUT, ("A", [0])), slots=ids(SLOTS)), "slots from"))
        bad.append((replace(bench.job(PUT, ("A", [0])), seals=None), "seals"))
        bad.append((bench.job(PUT, ("A", [0]), skips=ids(1)), "left out"))
    else:
        bad.append((bench.job(PUT, ("A", [0])), "not written to"))
    for job, shown in bad:
        end = run(bench.medium, job)
        assert (end.num_good, end.nbytes, end.is_absent) == (0, 0, False), shown
        assert shown in str(end.error)
    assert np.array_equal(bench.pool.bytes, before)


def test_many_jobs_end_once_each(bench: Bench) -> None:
    medium, pool = bench.medium, bench.pool
    letters = LETTERS[:PLACES]
    for turn in range(4 if bench.can.puts else 1):
        about = {"by": turn + 1, "suffix": bytes([turn + 1]) if bench.can.puts else b""}
        extents = [(letter, [4 * at, 4 * at + 2]) for at, letter in enumerate(letters)]
        if bench.can.puts:
            for extent in extents:
                medium.submit(bench.job(PUT, extent, **about))
            assert [end.num_good for end in ends(medium, PLACES)] == [1] * PLACES
        else:
            bench.store(*extents)
        bench.ask_first(medium)
        for letter, (first, second) in extents:
            medium.submit(bench.job(GET, (letter, [first + 1, second + 1]), **about))
        assert [end.error for end in ends(medium, PLACES)] == [None] * PLACES
        assert medium.poll() == []
        for _, (first, second) in extents:
            assert pool.read([first, second]) == pool.read([first + 1, second + 1])
        pool.fill(range(SLOTS))


def test_closing_finishes_what_was_submitted(bench: Bench) -> None:
    extents = [(letter, [at, at + 1]) for at, letter in enumerate(LETTERS[:PLACES])]
    if bench.can.puts:
        bench.medium.submit(bench.job(PUT, *extents))
    else:
        bench.store(*extents)
        bench.ask_first(bench.medium)
        bench.medium.submit(bench.job(GET, *extents))
    assert bench.medium.close(30)
    (end,) = ends(bench.medium)
    assert end.num_good == PLACES


def test_closing_again_does_nothing_and_a_closed_one_takes_nothing(bench: Bench) -> None:
    assert bench.medium.close(30)
    assert bench.medium.close(30)
    end = run(bench.medium, bench.job(PUT if bench.can.puts else GET, ("A", [0])))
    assert end.num_good == 0
    assert "closed" in str(end.error)


def test_it_is_not_off(bench: Bench) -> None:
    assert not bench.medium.is_off
    assert bench.medium.poll() == []


# Of those that take extents


@takes_extents
def test_an_end_says_how_many_bytes_were_put(bench: Bench) -> None:
    end = bench.put(("A", [1, 2]), ("C", [3]))
    assert (end.num_good, end.error, end.seals) == (2, None, None)
    assert end.nbytes == 3 * bench.pool.slots.slot_bytes


@takes_extents
def test_slots_that_have_changed_are_not_put(bench: Bench) -> None:
    changed = bench.job(PUT, ("A", [0]), ("B", [1, 2]), ("C", [3]))
    bench.pool.bytes[2, -1] ^= 1
    end = run(bench.medium, changed)
    assert (end.num_good, end.is_absent) == (1, False)
    assert "extent 1: " in str(end.error)
    assert bench.get(("B", [20, 21])).num_good == 0, "rot was passed down"
    assert bench.get(("A", [20])).num_good == 1


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """Jobs to put: some extents each, with so many slots."""
    lengths = st.integers(1, EXTENT)
    letters = st.lists(st.sampled_from(LETTERS[:PLACES]), min_size=1, max_size=5, unique=True)
    return [[(letter, draw(lengths)) for letter in draw(letters)] for _ in range(draw(st.integers(1, 6)))]


@pytest.mark.parametrize("name", ["memory", "slab", "slab of odd slots", "store in memory", "redis unix"])
def test_a_place_has_what_was_put_last_and_a_name_what_was_put_first(
    name: str, tmp_path_factory: pytest.TempPathFactory, servers: Servers
) -> None:
    @given(histories())
    @thorough(15)
    def check(history: list[list[tuple[str, int]]]) -> None:
        bench = Bench(KINDS[name], tmp_path_factory.mktemp("media"), servers)
        there: dict[str, tuple[int, list[int], bytes]] = {}
        for by, extents in enumerate(history, start=1):
            starts = np.cumsum([0, *(length for _, length in extents)]).tolist()
            job = [
                (letter, list(range(start, start + length)))
                for (letter, length), start in zip(extents, starts[:-1], strict=True)
            ]
            bench.pool.fill(range(32))
            assert bench.put(*job, by=by).num_good == len(job)
            put = {letter: (by, slots, bench.pool.read(slots)) for letter, slots in job}
            there = put | there if bench.can.by_name else there | put
        for letter, (by, slots, content) in there.items():
            targets = [slot + 32 for slot in slots]
            assert bench.get((letter, targets), by=by).num_good == 1
            assert bench.pool.read(targets) == content
        bench.close()

    check()


# Of those that find extents by place


@finds_by_place
def test_another_generation_is_not_got(bench: Bench) -> None:
    bench.store(("D", [0]), by=1, epoch=1)
    assert bench.get(("D", [9]), by=2).num_good == bench.get(("D", [9]), epoch=2).num_good == 0
    assert bench.get(("D", [9])).num_good == 1


@finds_by_place
def test_what_is_put_anew_is_what_is_got(bench: Bench) -> None:
    bench.store(("D", [0]), by=1)
    bench.store(("D", [1, 2]), by=2)
    assert bench.get(("D", [9]), by=1).num_good == 0
    assert bench.get(("D", [9, 10]), by=2).num_good == 1
    assert bench.pool.read([9, 10]) == bench.pool.read([1, 2])


@finds_by_place
def test_no_place_goes_back_to_an_older_generation(bench: Bench) -> None:
    bench.store(("D", [0]), by=7)
    for by in (6, 7):
        assert bench.put(("D", [1]), by=by).num_good == 0
    assert bench.get(("D", [9]), by=7).num_good == 1


# Of those that find extents by name


@finds_by_name
def test_another_medium_finds_it(bench: Bench) -> None:
    bench.store(("A", [0, 1]), ("B", [2]))
    other = bench.another()
    assert bench.get(("B", [10]), ("A", [11, 12]), medium=other).num_good == 2
    assert bench.pool.read([10, 11, 12]) == bench.pool.read([2, 0, 1])
    assert bench.probe("AB", medium=other).num_good == 2


@finds_by_name
@pytest.mark.parametrize("whose", [Whose(WHOSE.namespace, "1 of 2"), Whose("another model", WHOSE.rank)])
def test_another_namespace_or_rank_finds_nothing(bench: Bench, whose: Whose) -> None:
    bench.store(("A", [0]))
    other = bench.another(whose)
    assert bench.probe("A", medium=other).num_good == 0
    assert bench.get(("A", [20]), medium=other).is_absent
    if bench.can.puts:
        assert bench.put(("A", [1]), medium=other).num_good == 1
    assert bench.get(("A", [20])).num_good == 1
    assert bench.pool.read([20]) == bench.pool.read([0])


@finds_by_name
def test_with_a_suffix_it_is_another_extent(bench: Bench) -> None:
    bench.store(("A", [0]))
    assert bench.probe("A", suffix=b"one").num_good == 0
    assert bench.get(("A", [20]), suffix=b"one").is_absent
    if bench.can.puts:
        bench.store(("B", [1]), suffix=b"one")
        assert bench.probe("B").num_good == bench.probe("B", suffix=b"two").num_good == 0
        assert bench.get(("B", [20])).is_absent and bench.get(("B", [20]), suffix=b"two").is_absent
        assert bench.probe("B", suffix=b"one").num_good == 1
        assert bench.get(("B", [20]), suffix=b"one").num_good == 1


@finds_by_name
@pytest.mark.parametrize("num_there", [0, 1, 2, 15, 16, 17, 25, 26])
def test_leading_names_are_counted(bench: Bench, num_there: int) -> None:
    bench.store(*((letter, [index]) for index, letter in enumerate(LETTERS[:num_there])))
    end = bench.probe(LETTERS)
    assert (end.num_good, end.error, end.nbytes) == (num_there, None, 0)


@finds_by_name
@pytest.mark.parametrize("there", ["", "A", "C", "AC", "Z", "BDY"])
def test_the_last_name_that_is_there_is_found(bench: Bench, there: str) -> None:
    bench.store(*((letter, [index]) for index, letter in enumerate(there)))
    end = bench.probe(LETTERS, is_last_wanted=True)
    assert (end.num_good, end.error) == (LETTERS.index(there[-1]) + 1 if there else 0, None)


@finds_by_name
def test_the_last_of_many_names(bench: Bench) -> None:
    names = np.random.default_rng(0).integers(0, 256, (1000, 32), dtype=np.uint8)
    bench.store_job(replace(bench.job(PUT, ("A", [0])), names=names[400:401]))
    asked = replace(probe(bench.next, "A" * 1000, is_last_wanted=True), names=names)
    assert bench.run(asked).num_good == 401


@is_a_store
def test_what_is_there_stays_as_it_is(bench: Bench) -> None:
    """The same name has the same bytes. Whoever comes second moves none."""
    bench.store(("A", [0]))
    assert bench.put(("A", [1]), ("B", [2]), medium=bench.another()).num_good == 2
    assert bench.get(("A", [20]), ("B", [21])).num_good == 2
    assert bench.pool.read([20, 21]) == bench.pool.read([0, 2])


@is_a_store
def test_what_is_wrong_is_dropped_by_whoever_meets_it(bench: Bench) -> None:
    """So nobody reads it again, and the right one can be put in its place."""
    bench.store(("A", [0]), ("B", [1]))
    other_bytes = replace(bench.job(GET, ("A", [20])), seals=bench.pool.seals([2]))
    for wanted in (other_bytes, bench.job(GET, ("A", [20, 21]))):
        assert not bench.run(wanted).is_absent
        assert bench.probe("A", medium=bench.another()).num_good == 0
        assert bench.get(("A", [20])).is_absent
        bench.store(("A", [2]))
        assert bench.get(("A", [20]), ("B", [21])).num_good == 2
        assert bench.pool.read([20, 21]) == bench.pool.read([2, 1])
