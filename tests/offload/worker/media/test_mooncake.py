"""A medium over a real Mooncake Store: what becomes of jobs when a master, an owner or a value is bad."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offload.messages import PRIVATE
from offload.mooncake_config import MooncakeConfig
from offload.scheduler.weights import suffix_of
from offload.worker.media.base import MediumEnd
from offload.worker.media.mooncake_keeper import MOST_ENGINES, MooncakeKeeper
from offload.worker.media.mooncake_medium import MooncakeMedium, MooncakeOptions
from tests.mooncake import MooncakeServer
from tests.offload.worker.media.bench import (
    EXTENT,
    GET,
    PUT,
    WHOSE,
    Pool,
    ends,
    job,
    names_of,
    probe,
    run,
    wait_until,
)

pytestmark = pytest.mark.timeout(120)

SOON = 30.0
"""Seconds within which a job ends, on a machine that is busy."""

Media = Callable[..., MooncakeMedium]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake"), mib=64, lease_ms=200)
    yield server
    server.kill()


@pytest.fixture
def server(running: MooncakeServer) -> MooncakeServer:
    """All that these tests break is whole again."""
    running.mend()
    running.clear()
    return running


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def media(pool: Pool) -> Iterator[Media]:
    made: list[MooncakeMedium] = []

    def make(server: MooncakeServer, *, connect: Any = None, **options: Any) -> MooncakeMedium:
        medium = MooncakeMedium(
            server.config,
            pool.slots,
            whose=WHOSE,
            extent_slots=EXTENT,
            options=MooncakeOptions(**options),
            connect=server.kept if connect is None else connect,
        )
        made.append(medium)
        return medium

    yield make
    for medium in made:
        medium.check_invariants()
        medium.close(SOON)


def works(medium: MooncakeMedium, pool: Pool, suffix: bytes) -> bool:
    """Whether what is put is got back."""
    put = run(medium, job(pool, 1, PUT, [("A", [0, 1]), ("B", [2])], suffix=suffix))
    got = run(medium, job(pool, 2, GET, [("A", [10, 11]), ("B", [12])], suffix=suffix))
    return put.num_good == got.num_good == 2 and pool.read([10, 11, 12]) == pool.read([0, 1, 2])


def test_names_can_be_keyed(server: MooncakeServer, pool: Pool, media: Media) -> None:
    keyed, plain = media(server, name_key=b"a secret"), media(server)
    assert run(keyed, job(pool, 1, PUT, [("A", [0])])).num_good == 1
    [key] = server.all_keys()
    assert names_of("A").tobytes().hex() not in key and key.startswith("kvo1:")
    assert run(plain, job(pool, 2, GET, [("A", [1])])).is_absent
    assert run(media(server, name_key=b"another"), job(pool, 3, GET, [("A", [1])])).is_absent
    assert run(media(server, name_key=b"a secret"), job(pool, 4, GET, [("A", [1])])).num_good == 1


def test_what_others_keep_there_is_left_alone(server: MooncakeServer, pool: Pool, media: Media) -> None:
    content = np.arange(100, dtype=np.uint8)
    client = server.client
    client.register(content.ctypes.data, 100)
    assert client.put(["theirs"], [[content.ctypes.data]], [[100]]) == [0]
    medium = media(server)
    assert works(medium, pool, b"")
    assert medium.close(SOON)
    assert "theirs" in server.all_keys()


@pytest.mark.parametrize("at", [0, 8, 20, 50, 80, 90, -1, None], ids=str)
def test_a_wrong_value_is_found_and_deleted(
    at: int | None, server: MooncakeServer, pool: Pool, media: Media
) -> None:
    """One bit differs, or the last byte lacks."""
    medium = media(server)
    assert run(medium, job(pool, 1, PUT, [("A", [0, 1])])).num_good == 1
    [key] = server.all_keys()
    [length] = server.client.sizes([key])
    content = np.zeros(length, dtype=np.uint8)
    client = server.kept(server.config)
    client.register(content.ctypes.data, length)
    assert client.get([key], [[content.ctypes.data]], [[length]]) == [length]
    client.remove([key])
    if at is None:
        length -= 1
    else:
        content[at] ^= 1
    assert client.put([key], [[content.ctypes.data]], [[length]]) == [0]
    client.close()
    end = run(medium, job(pool, 2, GET, [("A", [10, 11])]))
    assert (end.num_good, end.is_absent) == (0, False)
    assert server.all_keys() == []


@pytest.mark.parametrize("others", [WHOSE.namespace[:-1] + "?", "another"])
def test_another_namespace_of_the_same_name_turns_it_off(
    others: str, server: MooncakeServer, pool: Pool, media: Media, caplog: pytest.LogCaptureFixture
) -> None:
    """Namespaces are compared in full."""
    first = media(server)
    [key] = server.really_all_keys()
    assert works(first, pool, b"") and works(media(server), pool, b"1")
    content = np.frombuffer(bytearray(others.encode()), dtype=np.uint8)
    client = server.kept(server.config)
    client.register(content.ctypes.data, content.nbytes)
    client.remove([key])
    assert client.put([key], [[content.ctypes.data]], [[content.nbytes]]) == [0]
    client.close()
    medium = media(server)
    assert medium.is_off
    end = run(medium, job(pool, 2, GET, [("A", [10, 11])]))
    assert end.num_good == 0 and key in str(end.error)
    assert sum("is off" in each.getMessage() for each in caplog.records) == 1


def test_a_bad_extent_of_a_batch_ends_it_there(server: MooncakeServer, pool: Pool, media: Media) -> None:
    medium = media(server)
    put = job(pool, 1, PUT, [(letter, [index]) for index, letter in enumerate("ABCDEFGHIJ")])
    assert run(medium, put).num_good == 10
    key = next(each for each in server.all_keys() if names_of("F").tobytes().hex() in each)
    server.client.remove([key])
    end = run(medium, job(pool, 2, GET, [(letter, [20 + at]) for at, letter in enumerate("ABCDEFGHIJ")]))
    assert (end.num_good, end.is_absent) == (5, True)
    assert pool.read(range(20, 25)) == pool.read(range(5))
    assert end.seals is not None and np.array_equal(end.seals, pool.seals(range(5)))


def test_a_full_store_evicts_or_refuses(server: MooncakeServer, pool: Pool, media: Media) -> None:
    medium = MooncakeMedium(
        server.config, pool.slots, whose=WHOSE, extent_slots=64, options=None, connect=server.kept
    )
    slots = list(range(64))
    names = np.random.default_rng(0).integers(0, 256, (200, 32), dtype=np.uint8)
    letter = job(pool, 1, PUT, [("A", slots)])
    for index in range(200):  # of half a MiB each: more than there is room for
        run(medium, replace(letter, job_id=index, names=names[index : index + 1]))
    num_there = 0
    before = pool.read(slots)
    for index in range(200):
        wanted = replace(job(pool, 1, GET, [("A", slots)]), names=names[index : index + 1])
        end = run(medium, wanted)
        assert end.num_good or end.is_absent, end
        assert not end.num_good or pool.read(slots) == before
        num_there += end.num_good
    assert 0 < num_there < 200
    assert medium.close(SOON)


def submitted(medium: MooncakeMedium, jobs: list[Any]) -> float:
    """Seconds that it took to submit these and to poll once."""
    began = time.monotonic()
    for each in jobs:
        medium.submit(each)
    medium.poll()
    return time.monotonic() - began


def test_a_master_that_is_killed_is_a_miss_and_then_back(
    server: MooncakeServer, pool: Pool, media: Media, caplog: pytest.LogCaptureFixture
) -> None:
    medium = media(server)
    assert works(medium, pool, b"")
    server.kill_master()
    began = time.monotonic()
    for number in range(20):
        end = run(medium, job(pool, number, GET, [("A", [10, 11])]))
        assert end.num_good == 0 and end.error is not None
        assert run(medium, probe(number, "AB")).error is not None
    assert time.monotonic() - began < SOON, "nobody waits for a master that is known to be gone"
    assert sum("is gone" in each.getMessage() for each in caplog.records) == 1
    assert not medium.is_off
    server.start_master()
    wait_until(lambda: works(medium, pool, str(time.monotonic()).encode()))
    assert sum("is back" in each.getMessage() for each in caplog.records) == 1


def test_a_master_that_hangs_ends_jobs_in_time(server: MooncakeServer, pool: Pool, media: Media) -> None:
    medium = media(server, hang_seconds=0.5)
    assert works(medium, pool, b"")
    server.pause()
    try:
        began = time.monotonic()
        jobs = [job(pool, number, GET, [("A", [10 + number])]) for number in range(6)]
        assert submitted(medium, [*jobs, probe(7, "A")]) < 1.0, "the engine's thread waits for nothing"
        found: list[MediumEnd] = []
        wait_until(lambda: len(found.__iadd__(medium.poll())) == 7)
        assert all(end.num_good == 0 and end.error for end in found)
        assert time.monotonic() - began < SOON
        medium.submit(job(pool, 9, PUT, [("C", [3])]))
        began = time.monotonic()
        medium.close(0.2)
        assert time.monotonic() - began < 5.0, "closing does not wait for a call"
    finally:
        server.go_on()
    [end] = ends(medium)
    assert end.num_good == 0


def test_an_owner_that_is_killed_is_a_miss(server: MooncakeServer, pool: Pool, media: Media) -> None:
    medium = media(server)
    assert works(medium, pool, b"")
    server.kill_owner()
    before = pool.read([10, 11])
    end = run(medium, job(pool, 3, GET, [("A", [10, 11])]))
    assert end.num_good == 0 or pool.read([10, 11]) == before
    wait_until(lambda: run(medium, job(pool, 4, GET, [("A", [20, 21])])).is_absent)
    assert run(medium, probe(5, "AB")).num_good == 0
    assert run(medium, job(pool, 6, PUT, [("D", [4])])).num_good == 0, "there is no room"
    server.start_owner()
    wait_until(lambda: works(medium, pool, str(time.monotonic()).encode()))


def test_a_master_that_comes_later_is_used(server: MooncakeServer, pool: Pool, media: Media) -> None:
    """It is tried by another process first, as connecting holds the interpreter."""
    server.kill_master()
    real = []

    def connect(config: MooncakeConfig) -> Any:
        real.append(config)
        if len(real) == 1:
            raise ConnectionRefusedError("gone")
        return server.kept(config)

    medium = media(server, connect=connect)
    assert len(real) == 1
    assert run(medium, job(pool, 1, GET, [("A", [0])])).num_good == 0
    server.start_master()
    wait_until(lambda: works(medium, pool, str(time.monotonic()).encode()))
    assert len(real) == 2


# What is left after a reset


def suffix(number: int) -> bytes:
    return PRIVATE + bytes([number]) * 15


def test_what_an_engine_leaves_after_a_reset_is_deleted_by_the_next_start(
    server: MooncakeServer, pool: Pool, media: Media
) -> None:
    """And what an engine that lives has is not, nor what has no suffix or a name."""
    left, other, named = suffix(0), suffix(1), suffix_of("one")
    for medium, private in ((media(server), left), (media(server), other)):
        extents = [(letter, [index]) for index, letter in enumerate("ABC")]
        for each in (private, b"", named):
            assert run(medium, job(pool, 1, PUT, extents, suffix=each)).num_good == 3
        if private == left:
            assert medium.close(SOON)
    assert len(extents_of(server)) == 12
    media(server)
    wait_until(lambda: len(extents_of(server)) == 9)
    wait_until(lambda: not any(left.hex() in key for key in server.really_all_keys()))
    assert sum(key.endswith(other.hex()) for key in extents_of(server)) == 3


def extents_of(server: MooncakeServer) -> list[str]:
    return [key for key in server.really_all_keys() if key.count(":") >= 3]


class Engine:
    """A keeper whose looks and time are a test's, with a private extent."""

    def __init__(self, server: MooncakeServer, now: list[float], number: int | None) -> None:
        self.client = server.kept(server.config)
        self.keeper = MooncakeKeeper(lambda: self.client, WHOSE, clock=lambda: now[0])
        self.client.register(self.keeper.scratch.ctypes.data, self.keeper.scratch.nbytes)
        if number is not None:
            self.key = f"{WHOSE.prefix.decode()}{'ab' * 32}:{suffix(number).hex()}"
            self.keeper.note(suffix(number))
            address = self.keeper.scratch[0].ctypes.data
            assert self.client.put([self.key], [[address]], [[1]]) == [0]

    def close(self) -> None:
        self.keeper.check_invariants()
        assert self.keeper.close(SOON)
        self.client.close()


def test_who_has_said_nothing_for_a_minute_is_over(server: MooncakeServer) -> None:
    now = [0.0]
    killed, alive, looks = (Engine(server, now, number) for number in (0, 1, None))
    for now[0] in (0.0, 30.0, 59.0):
        alive.keeper.look()
        looks.keeper.look()
        assert extents_of(server) == sorted([killed.key, alive.key])
    now[0] = 60.0
    alive.keeper.look()
    looks.keeper.look()
    assert extents_of(server) == [alive.key]
    assert not any(suffix(0).hex() in key for key in server.really_all_keys())
    now[0] = 1000.0  # both have been stopped for that long
    alive.keeper.look()
    looks.keeper.look()
    assert extents_of(server) == [alive.key]
    for engine in (killed, alive, looks):
        engine.close()


def test_no_more_engines_are_listed_than_there_is_room_for(server: MooncakeServer) -> None:
    """The others' extents stay until the store evicts them; when one is over, there is room."""
    now = [0.0]
    engines = [Engine(server, now, number) for number in range(MOST_ENGINES + 1)]
    looks = Engine(server, now, None)
    looks.keeper.look()
    now[0] = 61.0
    engines[-1].keeper.look()
    looks.keeper.look()
    assert extents_of(server) == [engines[-1].key]
    for _ in range(2):
        now[0] += 61.0
        engines[-1].keeper.look()
        looks.keeper.look()
        assert extents_of(server) == [engines[-1].key], "it lives, and is listed now"
    for now[0] in (1000.0, 1061.0):
        looks.keeper.look()
    assert extents_of(server) == []
    for engine in (*engines, looks):
        engine.close()


def test_a_list_that_is_none_of_ours_ends_nothing(server: MooncakeServer) -> None:
    """Whoever may write to the store may write there, too."""
    now = [0.0]
    engine, looks = Engine(server, now, 0), Engine(server, now, None)
    address = looks.keeper.scratch[0].ctypes.data
    listed = f"kvo1:private-{WHOSE.digest.hex()}"
    for index, size in ((3, 1), (4, 16)):
        looks.keeper.scratch[0] = 0xFF
        assert looks.client.put([f"{listed}-{index}"], [[address]], [[size]]) == [0]
    for now[0] in (0.0, 61.0):
        engine.keeper.look()
        looks.keeper.look()
    assert extents_of(server) == [engine.key]
    for each in (engine, looks):
        each.close()
