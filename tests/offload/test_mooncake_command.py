"""``kv-offload tier`` on a Mooncake Store: the end of what is there, and what cannot be done."""

import json
from collections.abc import Iterator

import pytest

from offload.cli import main
from offload.worker.media.mooncake_medium import MooncakeMedium
from offload.worker.media.store_names import Whose
from tests.mooncake import MooncakeServer
from tests.offload.worker.media.bench import EXTENT, PUT, Pool, job, run

pytestmark = pytest.mark.timeout(120)

ONE, OTHER = Whose("model", "0 of 1"), Whose("another", "0 of 1")
NAME = ONE.prefix.split(b":")[1].decode()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake"), mib=64)
    yield server
    server.kill()


@pytest.fixture
def server(running: MooncakeServer) -> MooncakeServer:
    """With five extents of two namespaces, one of them private, one of weights with a name."""
    running.clear()
    pool = Pool()
    for whose, letters, suffix in (
        (ONE, "AB", b""),
        (ONE, "A", b"private"),
        (ONE, "A", b"version"),
        (OTHER, "A", b""),
    ):
        medium = MooncakeMedium(
            running.config, pool.slots, whose=whose, extent_slots=EXTENT, connect=running.kept
        )
        extents = [(letter, [0, 1]) for letter in letters]
        assert run(medium, job(pool, 1, PUT, extents, suffix=suffix)).num_good == len(letters)
        assert medium.close(30)
    return running


def deleted(server: MooncakeServer, capsys: pytest.CaptureFixture[str], verb: str, *names: str) -> int:
    assert main(["tier", verb, f"mooncake://{server.address}", *names, "--json"]) == 0
    count: int = json.loads(capsys.readouterr().out)["num_deleted"]
    return count


def test_what_is_private_is_deleted(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert deleted(server, capsys, "gc") == 1
    assert sorted(key.count(":") for key in server.all_keys()) == [3, 3, 3, 4]


def test_a_namespace_is_deleted(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert deleted(server, capsys, "drop", NAME) == 4
    [left] = server.all_keys()
    assert left.startswith(OTHER.prefix.decode())


def test_all_is_deleted(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "drop", f"mooncake://{server.address}"]) == 0
    assert capsys.readouterr().out == "deleted  5 extents\n"
    assert server.really_all_keys() == []


@pytest.mark.parametrize("verb", ["ls", "check"])
def test_what_cannot_be_done_is_said(
    verb: str, server: MooncakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tier", verb, f"mooncake://{server.address}"]) == 1
    assert "curl -s http://127.0.0.1:9003/get_all_keys | grep ^kvo1:" in capsys.readouterr().err


def test_what_is_no_name_is_refused(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "drop", f"mooncake://{server.address}", ".*"]) == 1
    assert "'.*' is no namespace" in capsys.readouterr().err
    assert len(server.all_keys()) == 5


def test_a_store_that_is_gone_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "gc", "mooncake://127.0.0.1:1"]) == 1
    assert "mooncake at 127.0.0.1:1 does not answer" in capsys.readouterr().err
