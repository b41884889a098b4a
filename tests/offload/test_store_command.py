"""``kv-offload tier`` on a store: what is there, whether it is whole, and its end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.store_config import StoreAddress
from offload.worker.media.resp_medium import RespMedium
from offload.worker.media.store_names import Whose
from tests.offload.worker.media.bench import EXTENT, PUT, Pool, job, run
from tests.stores import SERVERS, StoreServer

ONE, OTHER = (Whose(model, f"{rank} of 2") for model, rank in (("model", 0), ("another", 0)))
SECOND_RANK = Whose(ONE.namespace, "1 of 2")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    """With six extents of two namespaces, one of them private, and with keys of others."""
    server = StoreServer(request.param, tmp_path)
    server.call(b"SET", b"others", b"1")
    server.call(b"SET", b"kvo1", b"1")
    pool = Pool()
    for whose, letters, suffix in (
        (ONE, "AB", b""),
        (ONE, "A", b"private"),
        (SECOND_RANK, "AB", b""),
        (OTHER, "A", b""),
    ):
        medium = RespMedium(StoreAddress.of(server.url), pool.slots, whose=whose, extent_slots=EXTENT)
        extents = [(letter, [0, 1]) for letter in letters]
        assert run(medium, job(pool, 1, PUT, extents, suffix=suffix)).num_good == len(letters)
        assert medium.close(30)
    yield server
    server.kill()


def names(server: StoreServer) -> tuple[str, str]:
    """Of both namespaces."""
    return tuple(each.prefix.split(b":")[1].decode() for each in (ONE, OTHER))  # type: ignore[return-value]


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["tier", *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_is_there(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "ls", server.url)
    by_name = {each["name"]: each for each in found["namespaces"]}
    one, other = names(server)
    counts = ("num_extents", "num_private", "num_ranks")
    assert [by_name[one][each] for each in counts] == [5, 1, 2]
    assert [by_name[other][each] for each in counts] == [1, 0, 1]
    assert by_name[one]["num_bytes"] == 5 * by_name[other]["num_bytes"]
    assert main(["tier", "ls", server.url]) == 0
    printed = capsys.readouterr().out
    assert one in printed and other in printed and "2 namespaces" in printed


def test_whether_it_is_whole(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = names(server)
    assert {each["num_broken"] for each in told(capsys, "check", server.url)["namespaces"]} == {0}
    key = next(key for key in server.all_keys() if other.encode() in key)
    value = server.call(b"GET", key)
    assert isinstance(value, bytes)
    server.call(b"SET", key, value[:-1] + bytes([value[-1] ^ 1]))
    found = told(capsys, "check", server.url, status=1)
    assert {each["name"]: (each["num_extents"], each["num_broken"]) for each in found["namespaces"]} == {
        one: (5, 0),
        other: (1, 1),
    }
    assert main(["tier", "check", server.url, one]) == 0
    assert "5 of 5 extents are whole" in capsys.readouterr().out


def test_one_namespace_is_deleted(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = names(server)
    found = told(capsys, "drop", server.url, one)
    assert found["num_deleted"] == 5
    assert [each["name"] for each in found["left"]] == [other]
    assert {b"others", b"kvo1"} < set(server.all_keys())
    assert main(["tier", "drop", server.url, one]) == 1
    assert f"'{one}' is no namespace there; there are: {other}" in capsys.readouterr().err


def test_all_are_deleted_and_nothing_else(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "drop", server.url)["num_deleted"] == 6
    assert server.all_keys(with_lists=True) == [b"kvo1", b"others"]


def test_what_nobody_else_finds_is_deleted(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "gc", server.url]) == 0
    assert "deleted  1 extents" in capsys.readouterr().out
    assert len(server.all_keys()) == 5 + 2
    assert main(["tier", "gc", server.url, "--gib", "0"]) == 1
    assert "--gib is of disks only" in capsys.readouterr().err


def test_a_store_that_cannot_be_had(
    server: StoreServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.call(b"CONFIG", b"SET", b"requirepass", b"hidden")
    assert main(["tier", "ls", server.url]) == 1
    assert "refuses us: NOAUTH" in capsys.readouterr().err
    (tmp_path / "password").write_text("hidden\n")
    assert main(["tier", "ls", server.url, "--password-file", str(tmp_path / "password")]) == 0
    server.kill()
    assert main(["tier", "ls", server.url]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["tier", "ls", "http://host"]) == 1
    assert "redis://host:6379/0" in capsys.readouterr().err
