"""What every medium promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.testing.media.faulty import FaultyMedium
from offload.testing.media.memory import MemoryMedium
from offload.worker.media.base import Medium, MediumJob, Verb
from tests.offload.worker.media.bench import (
    EXTENT,
    GET,
    ODD_SLOT,
    PLACES,
    PUT,
    SLOTS,
    Pool,
    ends,
    get,
    ids,
    job_of,
    run,
    slab,
)
from tests.strategies import thorough

pytestmark = pytest.mark.timeout(120)

Made = tuple[Pool, Medium]


def in_memory(path: Path) -> Made:
    pool = Pool()
    return pool, MemoryMedium(pool.slots, extent_slots=EXTENT, num_places=PLACES)


def faulty_without_faults(path: Path) -> Made:
    pool, inner = in_memory(path)
    return pool, FaultyMedium(inner, pool.slots)


def faulty_slab(path: Path) -> Made:
    pool, inner = direct_slab(path)
    return pool, FaultyMedium(inner, pool.slots)


def direct_slab(path: Path) -> Made:
    pool = Pool()
    return pool, slab(path / "rank0", pool)


def slab_of_odd_slots(path: Path) -> Made:
    pool = Pool(ODD_SLOT)
    return pool, slab(path / "rank0", pool)


def buffered_slab(path: Path) -> Made:
    pool = Pool()
    return pool, slab(path / "rank0", pool, direct=False)


def buffered_slab_of_odd_slots(path: Path) -> Made:
    pool = Pool(ODD_SLOT)
    return pool, slab(path / "rank0", pool, direct=False)


MAKERS = [
    *(in_memory, faulty_without_faults, faulty_slab, direct_slab, slab_of_odd_slots, buffered_slab),
    buffered_slab_of_odd_slots,
]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    make: Callable[[Path], Made] = request.param
    pool, medium = make(tmp_path)
    yield pool, medium
    assert medium.close(30)


def test_what_was_put_is_what_is_got(made: Made) -> None:
    pool, medium = made
    before = pool.read([5, 1, 2, 9])
    seals = pool.seals([5, 1, 2, 9])
    put = run(medium, pool.put(1, [(3, 1, [5, 1, 2, 9])]))
    assert (put.num_good, put.error, put.seals) == (1, None, None)
    assert put.nbytes == 4 * pool.slots.slot_bytes
    pool.fill(range(SLOTS))
    others = pool.bytes.copy()
    end = run(medium, get(2, [(3, 1, [40, 41, 20, 7])]))
    assert (end.num_good, end.error, end.nbytes) == (1, None, put.nbytes)
    assert pool.read([40, 41, 20, 7]) == before
    assert np.array_equal(end.seals, seals)
    untouched = [slot for slot in range(SLOTS) if slot not in (40, 41, 20, 7)]
    assert np.array_equal(pool.bytes[untouched], others[untouched])


def test_extents_are_shorter_than_places(made: Made) -> None:
    pool, medium = made
    before = pool.read([1]), pool.read([3, 2])
    assert run(medium, pool.put(1, [(0, 1, [1]), (1, 1, [3, 2])])).num_good == 2
    pool.fill(range(SLOTS))
    end = run(medium, get(2, [(1, 1, [10, 11]), (0, 1, [12])]))
    assert end.num_good == 2
    assert (pool.read([12]), pool.read([10, 11])) == before


def test_a_job_of_no_extents_ends_as_well(made: Made) -> None:
    _, medium = made
    for verb in (PUT, GET):
        end = run(medium, MediumJob.of(1, verb, []))
        assert (end.num_good, end.error, end.nbytes) == (0, None, 0)


@pytest.mark.parametrize(
    "wanted", [(4, 1, [9]), (3, 2, [9]), (3, 1, [8, 9])], ids=["place", "generation", "length"]
)
def test_what_was_never_put_is_not_got(made: Made, wanted: tuple[int, int, list[int]]) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(3, 1, [0]), (5, 1, [1])]))
    end = run(medium, get(2, [(5, 1, [20]), wanted, (3, 1, [21])]))
    assert end.num_good == 1
    assert end.error is not None
    assert end.nbytes == pool.slots.slot_bytes
    assert pool.read([20]) == pool.read([1])
    assert np.array_equal(end.seals, pool.seals([1]))


def test_a_generation_of_another_epoch_is_another_one(made: Made) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(3, 1, [0])], epoch=1))
    assert run(medium, get(2, [(3, 1, [9])], epoch=2)).num_good == 0


def test_what_is_put_anew_is_what_is_got(made: Made) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(3, 1, [0])]))
    run(medium, pool.put(2, [(3, 2, [1, 2])]))
    assert run(medium, get(3, [(3, 1, [9])])).num_good == 0
    assert run(medium, get(4, [(3, 2, [9, 10])])).num_good == 1
    assert pool.read([9, 10]) == pool.read([1, 2])


def test_no_place_goes_back_to_an_older_generation(made: Made) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(3, 7, [0])]))
    for by in (6, 7):
        assert run(medium, pool.put(2, [(3, by, [1])])).num_good == 0
    assert run(medium, get(3, [(3, 7, [9])])).num_good == 1


def test_slots_that_have_changed_are_not_put(made: Made) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(2, 1, [7])]))
    job = pool.put(2, [(0, 2, [0]), (1, 2, [1, 2]), (2, 2, [3])])
    pool.bytes[2, -1] ^= 1
    end = run(medium, job)
    assert end.num_good == 1
    assert "checksum" in str(end.error)
    assert run(medium, get(3, [(1, 2, [9, 10])])).num_good == 0, "rot was passed down"
    assert run(medium, get(4, [(0, 2, [9])])).num_good == 1


def test_other_bytes_than_were_asked_for_are_not_got(made: Made) -> None:
    pool, medium = made
    run(medium, pool.put(1, [(0, 1, [0]), (1, 1, [1])]))
    wanted = [(0, 1, [9], pool.seals([0])), (1, 1, [10], pool.seals([2]))]
    assert run(medium, job_of(2, GET, wanted)).num_good == 1


@pytest.mark.parametrize(
    ("verb", "places", "slots", "shown"),
    [
        (GET, [PLACES], [0], "place"),
        (GET, [-1], [0], "place"),
        (PUT, [0], [SLOTS], "slots"),
        (GET, [0], [-1], "slots"),
        (GET, [0], list(range(EXTENT + 1)), "extent"),
        (GET, [0], [], "add up"),
        (PUT, [0, 0], [1, 2], "twice"),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    made: Made, verb: Verb, places: list[int], slots: list[int], shown: str
) -> None:
    pool, medium = made
    before = pool.bytes.copy()
    starts = ids(*range(len(places)), len(slots))
    seals = pool.seals([min(slot, SLOTS - 1) for slot in slots])
    bad = MediumJob(1, verb, ids(*places), ids(*(1 for _ in places)), starts, ids(*slots), seals)
    end = run(medium, bad)
    assert end.num_good == 0
    assert shown in str(end.error)
    assert np.array_equal(pool.bytes, before)


def test_nothing_is_put_without_seals(made: Made) -> None:
    _, medium = made
    assert "seals" in str(run(medium, job_of(1, PUT, [(0, 1, [0])])).error)


def test_many_jobs_end_once_each(made: Made) -> None:
    pool, medium = made
    for turn in range(5):
        jobs = [
            pool.put(100 * turn + index, [(index, 100 * turn + index, [4 * index, 4 * index + 2])])
            for index in range(PLACES)
        ]
        for job in jobs:
            medium.submit(job)
        assert [end.num_good for end in ends(medium, len(jobs))] == [1] * len(jobs)
        wanted = [(job.job_id % 100, job.job_id, [4 * (job.job_id % 100) + 1]) for job in jobs]
        for job_id, (place, by, slots) in enumerate(wanted):
            medium.submit(get(job_id, [(place, by, [slots[0], slots[0] + 2])]))
        assert [end.error for end in ends(medium, len(jobs))] == [None] * len(jobs)
        assert medium.poll() == []
        for index in range(PLACES):
            assert pool.read([4 * index, 4 * index + 2]) == pool.read([4 * index + 1, 4 * index + 3])
        pool.fill(range(SLOTS))


def test_closing_finishes_what_was_submitted(made: Made) -> None:
    pool, medium = made
    medium.submit(pool.put(1, [(place, 1, [place, place + 1]) for place in range(PLACES)]))
    assert medium.close(30)
    (end,) = ends(medium)
    assert end.num_good == PLACES


def test_closing_again_does_nothing_and_a_closed_one_takes_nothing(made: Made) -> None:
    pool, medium = made
    assert medium.close(30)
    assert medium.close(30)
    end = run(medium, pool.put(1, [(0, 1, [0])]))
    assert end.num_good == 0
    assert "closed" in str(end.error)


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Jobs to put: each at some places, with so many slots."""
    lengths = st.integers(1, EXTENT)
    places = st.lists(st.integers(0, PLACES - 1), min_size=1, max_size=5, unique=True)
    return [[(place, draw(lengths)) for place in draw(places)] for _ in range(draw(st.integers(1, 6)))]


@pytest.mark.parametrize("make", [in_memory, direct_slab, slab_of_odd_slots], ids=lambda make: make.__name__)
def test_what_lies_where_is_what_was_put_last(
    make: Callable[[Path], Made], tmp_path_factory: pytest.TempPathFactory
) -> None:
    @given(histories())
    @thorough(15)
    def check(history: list[list[tuple[int, int]]]) -> None:
        pool, medium = make(tmp_path_factory.mktemp("slab"))
        there: dict[int, tuple[int, list[int], bytes]] = {}
        for by, extents in enumerate(history, start=1):
            starts = np.cumsum([0, *(length for _, length in extents)]).tolist()
            job = [
                (place, by, list(range(start, start + length)))
                for (place, length), start in zip(extents, starts[:-1], strict=True)
            ]
            pool.fill(range(32))
            assert run(medium, pool.put(by, job)).num_good == len(job)
            there |= {place: (by, slots, pool.read(slots)) for place, by, slots in job}
        for place, (by, slots, content) in there.items():
            targets = [slot + 32 for slot in slots]
            assert run(medium, get(1000, [(place, by, targets)])).num_good == 1
            assert pool.read(targets) == content
        assert medium.close(30)

    check()
