"""A store over RESP: who may ask, what becomes of it when the server misbehaves, and how long things live."""

import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from offload.errors import ConfigError
from offload.messages import PRIVATE
from offload.scheduler.weights import suffix_of
from offload.store_config import StoreAddress
from offload.testing.engines.server import held_port
from offload.worker.media.resp import Connection, LostError, StoreError
from offload.worker.media.resp_medium import RespMedium, RespOptions
from offload.worker.media.store_value import value_bytes
from tests.offload.worker.media.bench import (
    EXTENT,
    GET,
    PUT,
    SLOT,
    WHOSE,
    Pool,
    ends,
    job,
    names_of,
    probe,
    run,
    wait_until,
)
from tests.stores import SERVERS, StoreServer

pytestmark = pytest.mark.timeout(120)

Media = Callable[..., RespMedium]


@pytest.fixture(params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(kind, tmp_path)
    yield server
    server.kill()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def media(pool: Pool) -> Iterator[Media]:
    made: list[RespMedium] = []

    def make(url: str, clock: Callable[[], float] | None = None, **options: Any) -> RespMedium:
        arguments = {} if clock is None else {"clock": clock}
        options = {"io_seconds": 0.5, "connect_seconds": 0.5} | options
        medium = RespMedium(
            StoreAddress.of(url),
            pool.slots,
            whose=WHOSE,
            extent_slots=EXTENT,
            options=RespOptions(**options),
            **arguments,
        )
        made.append(medium)
        return medium

    yield make
    for medium in made:
        medium.check_invariants()
        assert medium.close(30)


def works(medium: RespMedium, pool: Pool, suffix: bytes = b"") -> bool:
    """Whether what is put is found, and got."""
    put = run(medium, job(pool, 1, PUT, [("A", [0])], suffix=suffix))
    found = run(medium, probe(2, "A", suffix=suffix))
    got = run(medium, job(pool, 3, GET, [("A", [9])], suffix=suffix))
    return put.num_good == found.num_good == got.num_good == 1 and pool.read([9]) == pool.read([0])


# Whose it is


def test_a_namespace_of_the_same_short_name_turns_it_off(
    server: StoreServer, pool: Pool, media: Media, caplog: pytest.LogCaptureFixture
) -> None:
    """Its full text lies in the store, and is compared before anything is read or written."""
    about = b"kvo1:namespace-" + WHOSE.prefix.split(b":")[1]
    assert works(media(server.url), pool)
    assert server.call(b"GET", about) == WHOSE.namespace.encode()
    before = server.all_keys()
    server.call(b"SET", about, b"another")
    medium = media(server.url)
    for job_id, sent in ((1, job(pool, 1, PUT, [("B", [1])])), (2, job(pool, 2, GET, [("A", [9])]))):
        end = run(medium, sent)
        assert (end.job_id, end.num_good, end.is_absent) == (job_id, 0, False)
        assert "names another namespace" in str(end.error)
    assert run(medium, probe(3, "A")).num_good == 0
    assert medium.is_off and server.all_keys() == before
    assert caplog.text.count("The engine goes on without it") == 1


def test_what_an_engine_leaves_after_a_reset_is_deleted_by_the_next_start(
    server: StoreServer, pool: Pool, media: Media
) -> None:
    """And what an engine that lives has is not, nor what has no suffix or a name."""
    private, other, named = PRIVATE + bytes(15), PRIVATE + bytes([1]) * 15, suffix_of("one")
    for medium, suffix in ((media(server.url), private), (media(server.url), other)):
        extents = [(letter, [index]) for index, letter in enumerate("ABC")]
        assert run(medium, job(pool, 1, PUT, extents, suffix=suffix)).num_good == 3
        for kept in (b"", named):
            assert run(medium, job(pool, 2, PUT, extents, suffix=kept)).num_good == 3
        if suffix == private:
            assert medium.close(30)
            wait_until(lambda: server.call(b"EXISTS", b"kvo1:alive-" + private.hex().encode()) == 0)
    assert len(server.all_keys()) == 12
    media(server.url)
    wait_until(lambda: len(server.all_keys()) == 9)
    listed = b"kvo1:private-" + WHOSE.digest.hex().encode()
    wait_until(lambda: server.call(b"SMEMBERS", listed) == [other.hex().encode()])
    assert not any(private.hex().encode() in key for key in server.all_keys(with_lists=True))


# Who may ask


def test_a_password(kind: str, tmp_path: Path, pool: Pool, media: Media) -> None:
    server = StoreServer(kind, tmp_path, password="s3cret/@:")
    assert works(media(server.url), pool)
    for wrong in (f"unix://:other@{tmp_path}/socket", f"unix://{tmp_path}/socket"):
        end = run(media(wrong), job(pool, 1, PUT, [("A", [0])]))
        assert end.num_good == 0 and not end.is_absent
        assert "WRONGPASS" in str(end.error) or "NOAUTH" in str(end.error)
        assert "other" not in str(end.error)
    server.kill()


def test_a_user_that_may_do_what_is_needed_and_no_more(server: StoreServer, pool: Pool, media: Media) -> None:
    """The access control list that the docs give."""
    rules = b"on >word ~kvo1:* -@all +get +getex +set +exists +pexpire +del "
    rules += b"+sadd +srem +spop +smembers +ping +select"
    server.call(b"ACL", b"SETUSER", b"engine", *rules.split())
    url = f"unix://engine:word@{server._socket_path}"
    assert works(media(url), pool)
    connection = Connection(StoreAddress.of(url))
    for refused in ((b"FLUSHALL",), (b"KEYS", b"*"), (b"GET", b"others")):
        with pytest.raises(StoreError, match="NOPERM"):
            connection.call(*refused)
    connection.close()


def test_answers_to_a_refused_question_are_not_taken_for_others(
    server: StoreServer, pool: Pool, media: Media
) -> None:
    """A user that may not ask is given the right: nothing of before is left on the connection."""
    rules = b"on >word ~kvo1:* -@all +get +getex +set +pexpire +del +ping +select"
    server.call(b"ACL", b"SETUSER", b"engine", *rules.split())
    medium = media(f"unix://engine:word@{server._socket_path}")
    run(medium, job(pool, 1, PUT, [(letter, [0]) for letter in "ABC"]))
    asked = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert "NOPERM" in str(run(medium, probe(2, asked)).error)
    server.call(b"ACL", b"SETUSER", b"engine", b"+exists")
    for job_id in (3, 4):
        end = run(medium, probe(job_id, asked))
        assert (end.num_good, end.error) == (3, None)


def certificates(path: Path) -> None:
    """A certificate for localhost that vouches for itself."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    )
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command.split(), *names], cwd=path, check=True, capture_output=True)


def test_tls(tmp_path: Path, pool: Pool, media: Media) -> None:
    """Debian's server has it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificates(tmp_path)
    with held_port() as held:
        port = held.getsockname()[1]
        files = ["--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")]
        server = StoreServer(
            "redis", tmp_path, "--port", "0", "--tls-port", str(port), *files, "--tls-auth-clients", "no"
        )
        url = f"rediss://localhost:{port}/1"
        assert works(media(url, ca_file=str(tmp_path / "cert.pem")), pool)
        end = run(media(url), probe(1, "A"))
        assert "certificate" in str(end.error).lower()
        end = run(media(f"redis://localhost:{port}"), probe(1, "A"))
        assert end.error is not None
        server.kill()


# When the server misbehaves


def test_a_server_that_is_killed_is_a_miss_and_then_back(
    server: StoreServer, pool: Pool, media: Media, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    medium = media(server.url)
    assert works(medium, pool)
    server.kill()
    for job_id in range(10):
        assert run(medium, job(pool, job_id, GET, [("A", [20])])).num_good == 0
        end = run(medium, probe(job_id, "A"))
        assert end.error is not None
    assert not medium.is_off
    server.start()
    wait_until(lambda: run(medium, probe(1, "A")).error is None)
    assert works(medium, pool, b"again")
    said = [record.message for record in caplog.records]
    assert [("gone" in each, "back" in each) for each in said] == [(True, False), (False, True)], said


def test_a_server_that_was_started_again_between_jobs_is_not_noticed(
    server: StoreServer, pool: Pool, media: Media
) -> None:
    medium = media(server.url)
    assert works(medium, pool)
    server.kill()
    server.start()
    assert works(medium, pool, b"again")


def test_a_server_that_hangs_ends_jobs_in_time(server: StoreServer, pool: Pool, media: Media) -> None:
    medium = media(server.url, io_seconds=0.2, hang_seconds=5.0)
    assert works(medium, pool)
    server.pause()
    for verb in (GET, PUT):
        end = run(medium, job(pool, 1, verb, [("B", [20])]))
        assert (end.num_good, end.is_absent) == (0, False)
    assert run(medium, probe(2, "A")).error is not None
    server.go_on()
    wait_until(lambda: run(medium, probe(1, "A")).error is None)
    assert run(medium, job(pool, 3, GET, [("A", [20])])).num_good == 1, (
        "answers that came too late are not taken"
    )
    assert pool.read([20]) == pool.read([0])


def test_a_server_killed_under_load(server: StoreServer, pool: Pool, media: Media) -> None:
    """Every job ends, and what is good is right."""
    medium = media(server.url)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    content = pool.read(range(EXTENT))
    killer = threading.Timer(0.05, server.kill)
    killer.start()
    jobs = [
        job(pool, number, verb, [(letter, list(range(EXTENT))) for letter in letters], suffix=bytes([number]))
        for number in range(40)
        for verb in (PUT,)
    ]
    for each in jobs:
        medium.submit(each)
    found = ends(medium, len(jobs))
    killer.join()
    assert all((end.error is None) == (end.num_good == len(letters)) for end in found)
    server.start()
    wait_until(lambda: run(medium, probe(100, "A")).error is None)
    assert run(medium, probe(101, "A", suffix=b"\0")).num_good == 0
    assert pool.read(range(EXTENT)) == content


def test_a_full_server_that_evicts(kind: str, tmp_path: Path, pool: Pool, media: Media) -> None:
    """What expires next goes first, which are the ends of chains."""
    limits = ["--maxmemory", "4mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"]
    server = StoreServer(kind, tmp_path, *limits)
    medium = media(server.url, ttl_seconds=100.0)
    names = np.random.default_rng(0).integers(0, 256, (200, 32), dtype=np.uint8)
    for index in range(200):
        put = job(pool, index, PUT, [("A", list(range(EXTENT)))])
        put = replace(put, depths=np.array([index]), names=names[index : index + 1])
        assert run(medium, put).num_good == 1
    asked = replace(probe(300, "A" * 200), names=names)
    num_leading = run(medium, asked).num_good
    num_kept = len(server.all_keys())
    assert 0 < num_kept < 200, "it has evicted"
    assert num_leading >= 0.5 * num_kept, f"{num_leading} of {num_kept} can be reached"
    server.kill()


def test_a_full_server_that_refuses(kind: str, tmp_path: Path, pool: Pool, media: Media) -> None:
    server = StoreServer(kind, tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    medium = media(server.url)
    found = [
        run(medium, job(pool, number, PUT, [("A", [0, 1, 2, 3])], suffix=bytes([number])))
        for number in range(150)
    ]
    refused = [end for end in found if end.num_good == 0]
    assert refused and all("OOM" in str(end.error) for end in refused)
    assert run(medium, job(pool, 200, GET, [("A", [9, 10, 11, 12])], suffix=b"\0")).num_good == 1
    server.kill()


# What lies there


def key_of(server: StoreServer) -> bytes:
    [key] = server.all_keys()
    return key


def of_codec(value: bytes, codec: int) -> bytes:
    """The same with another codec, and a header that is whole."""
    end = len(value) - 2 * SLOT - 8
    content = value[:8] + codec.to_bytes(4, "little") + value[12:end]
    return content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little") + value[end + 8 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: value[:-9],
        lambda value: value + b"more",
        lambda value: b"",
        lambda value: value[:50],
        lambda value: b"XXXX" + value[4:],
        lambda value: value[:4] + b"\7" + value[5:],
        lambda value: value[:6] + b"\xff" + value[7:],
        lambda value: of_codec(value, 1),
        lambda value: value[:20] + b"\xff" + value[21:],
        lambda value: value[:60] + bytes([value[60] ^ 1]) + value[61:],
        lambda value: value[:80] + bytes([value[80] ^ 1]) + value[81:],
        lambda value: bytes(3 * len(value)),
    ],
    ids=[
        "byte",
        "short",
        "long",
        "empty",
        "head",
        "magic",
        "version",
        "slots",
        "codec",
        "digest",
        "name",
        "seal",
        "zeros",
    ],
)
def test_a_wrong_value_is_found_and_deleted(
    server: StoreServer, pool: Pool, media: Media, spoil: Callable[[bytes], bytes]
) -> None:
    medium = media(server.url)
    run(medium, job(pool, 1, PUT, [("A", [0, 1])]))
    key = key_of(server)
    value = server.call(b"GET", key)
    assert isinstance(value, bytes) and len(value) == value_bytes(2, SLOT)
    server.call(b"SET", key, spoil(value))
    others = [slot for slot in range(len(pool.bytes)) if slot not in (20, 21)]
    before = pool.bytes[others].copy()
    end = run(medium, job(pool, 2, GET, [("A", [20, 21])]))
    assert (end.num_good, end.is_absent) == (0, False)
    assert np.array_equal(pool.bytes[others], before)
    assert server.all_keys() == []
    assert works(medium, pool), "the connection is as good as before"


def test_what_is_of_another_type_is_no_miss(server: StoreServer, pool: Pool, media: Media) -> None:
    medium = media(server.url)
    run(medium, job(pool, 1, PUT, [("A", [0])]))
    key = key_of(server)
    server.call(b"DEL", key)
    server.call(b"LPUSH", key, b"x")
    end = run(medium, job(pool, 2, GET, [("A", [20])]))
    assert "WRONGTYPE" in str(end.error)


def test_names_can_be_keyed(server: StoreServer, pool: Pool, media: Media) -> None:
    """Who lists the store, and knows how names are made, does not find them."""
    for name_key in (None, b"one", b"two"):
        run(media(server.url, name_key=name_key), job(pool, 1, PUT, [("A", [0])]))
    keys = server.all_keys()
    assert len(keys) == 3
    plain = names_of("A").tobytes()
    assert [plain.hex().encode() in key for key in keys].count(True) == 1
    values = [server.call(b"GET", key) for key in keys]
    assert [plain in value for value in values if isinstance(value, bytes)].count(True) == 1


# How long


def lives(server: StoreServer) -> list[int]:
    found = [server.call(b"PTTL", key) for key in server.all_keys()]
    return sorted(int(each) for each in found)  # type: ignore[call-overload]


def test_what_is_deeper_expires_sooner(server: StoreServer, pool: Pool, media: Media) -> None:
    run(media(server.url, ttl_seconds=1000.0), job(pool, 1, PUT, [(letter, [0]) for letter in "ABCD"]))
    found = lives(server)
    assert 960_000 <= found[0] < found[1] < found[2] < found[3] <= 1_000_000


@pytest.mark.parametrize("verb", [PUT, GET])
def test_a_use_prolongs_it_once_a_minute_at_most(
    server: StoreServer, pool: Pool, media: Media, verb: Any
) -> None:
    now = 0.0
    medium = media(server.url, lambda: now, ttl_seconds=1000.0)
    run(medium, job(pool, 1, PUT, [("A", [0])]))
    [key] = server.all_keys()
    server.call(b"PEXPIRE", key, b"5000")
    assert run(medium, job(pool, 2, verb, [("A", [0])])).num_good == 1
    assert lives(server)[0] <= 5000, "it has just been put"
    now = 61.0
    assert run(medium, job(pool, 3, verb, [("A", [0])])).num_good == 1
    assert lives(server)[0] > 900_000


def test_what_is_there_is_not_sent(server: StoreServer, pool: Pool, media: Media) -> None:
    run(media(server.url), job(pool, 1, PUT, [("A", [0])]))
    before = server.stat("total_net_input_bytes")
    run(media(server.url), job(pool, 1, PUT, [("A", [0])]))
    assert server.stat("total_net_input_bytes") - before < SLOT // 2


# Addresses


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", StoreAddress("host")),
        ("valkey://host:7000/3", StoreAddress("host", 7000, database=3)),
        ("redis://:p%40ss@host", StoreAddress("host", password="p@ss")),
        ("rediss://user:word@[::1]:7/0", StoreAddress("::1", 7, is_tls=True, user="user", password="word")),
        ("unix:///run/redis/socket", StoreAddress(path="/run/redis/socket")),
    ],
)
def test_addresses(url: str, expected: StoreAddress) -> None:
    assert StoreAddress.of(url) == expected
    assert "word" not in str(expected) and "p@ss" not in str(expected)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "http://host",
        "redis://",
        "redis://h/x",
        "redis://h:port",
        "unix://relative",
        "redis://h?x=1",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://host"):
        StoreAddress.of(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        StoreAddress.of("http://user:hidden@host")
    assert "hidden" not in str(refused.value)


# A server that says nonsense


@pytest.mark.parametrize(
    "said",
    [b"hello\r\n", b":x\r\n", b"$99999999999\r\n", b"$3\r\nabcdef", b"", b"*2\r\n$1\r\n", b"x" * 200_000],
)
def test_nonsense_is_a_failed_end(said: bytes, tmp_path: Path, pool: Pool, media: Media) -> None:
    path = tmp_path / "socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # the other end may be gone
                connection.recv(1 << 16)
                connection.sendall(said)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    medium = media(f"unix://{path}", io_seconds=0.2)
    for each in (probe(1, "A"), job(pool, 2, GET, [("A", [20])]), job(pool, 3, PUT, [("A", [0])])):
        end = run(medium, each)
        assert end.num_good == 0 and end.error is not None and not end.is_absent
    listening.close()


def test_a_value_of_another_length_loses_the_connection() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection.__new__(Connection)
    connection._socket, connection._is_tls = ours, False
    connection._buffer = bytearray(1 << 16)
    connection._view = memoryview(connection._buffer)
    connection._start = connection._stop = 0
    theirs.sendall(b"$3\r\nabcd\r\n")
    with pytest.raises(LostError):
        connection.reply()
    for each in (ours, theirs):
        each.close()
