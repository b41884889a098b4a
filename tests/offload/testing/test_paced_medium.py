"""A medium behind a link tells of an end when the link would have carried it, and not before."""

from offload.messages import NAME_BYTES
from offload.testing.copiers.paced import Link, Pace, VirtualClock
from offload.testing.media.paced import PacedMedium
from offload.testing.media.store import MemoryStore, StoreMedium
from tests.offload.worker.media.bench import EXTENT, GET, PUT, Pool, job, probe


def test_each_verb_has_the_link_for_itself_one_job_after_the_other() -> None:
    clock, pool = VirtualClock(), Pool()
    link = Link(clock, lambda: Pace(10.0, seconds=2.0))
    medium = PacedMedium(StoreMedium(MemoryStore(), pool.slots, extent_slots=EXTENT), link, 5.0)
    medium.submit(job(pool, 1, PUT, [("A", [0, 1])]))  # 10 bytes of the link: 1 s
    medium.submit(job(pool, 2, PUT, [("B", [2, 3, 4, 5])]))  # 2 s more
    medium.submit(job(pool, 3, GET, [("A", [6, 7])]))
    medium.submit(probe(4, "AB"))
    told = []
    while len(told) < 4:
        told += [(end.job_id, clock.now, end.seconds) for end in medium.poll()]
        clock.now = round(clock.now + 0.1, 1)
    asked = 2 * NAME_BYTES / 10.0 + 2.0
    assert told[:3] == [(1, 3.0, 3.0), (3, 3.0, 3.0), (2, 5.0, 5.0)]
    assert told[3] == (4, asked, asked) and pool.read([0, 1]) == pool.read([6, 7])


def test_to_close_it_tells_of_all_that_is_under_way() -> None:
    clock, pool = VirtualClock(), Pool()
    inner = StoreMedium(MemoryStore(), pool.slots, extent_slots=EXTENT)
    medium = PacedMedium(inner, Link(clock, lambda: Pace(1.0)), 5.0)
    medium.submit(job(pool, 1, PUT, [("A", [0, 1])]))
    assert medium.poll() == [] and medium.close(0.0)
    [end] = medium.poll()
    assert end.num_good == 1 and end.error is None


def test_what_goes_no_further_takes_as_long_and_is_not_there() -> None:
    clock, pool, store = VirtualClock(), Pool(), MemoryStore()
    inner = StoreMedium(store, pool.slots, extent_slots=EXTENT)
    medium = PacedMedium(inner, Link(clock, lambda: Pace(10.0)), 5.0, keeps=False)
    medium.submit(job(pool, 1, PUT, [("A", [0, 1])]))
    assert medium.poll() == []
    clock.now = 1.0
    [end] = medium.poll()
    assert (end.num_good, end.error, end.seconds) == (1, None, 1.0) and not store.kept
    medium.submit(job(pool, 2, GET, [("A", [0, 1])]))
    clock.now = 2.0
    [end] = medium.poll()
    assert end.num_good == 0 and end.is_absent
