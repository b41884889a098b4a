"""Whether a store can be had: asked before an engine starts, and by ``kv-offload check``."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.cli import main
from offload.errors import TierError
from offload.store_config import StoreConfig
from offload.worker.media.resp_check import StoreGoneError, probe_store
from tests.stores import SERVERS, StoreServer


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(request.param, tmp_path, "--maxmemory-policy", "allkeys-lru")
    yield server
    server.kill()


def test_a_store_that_works(server: StoreServer) -> None:
    found = probe_store(StoreConfig(url=server.url))
    assert found.policy == "allkeys-lru"
    assert found.seconds > 0
    assert server.all_keys() == [], "nothing is left"


def test_the_command_tells_of_it(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"cpu_gib": 1, "tiers": [{"kind": server.kind, "url": server.url}]}
    assert main(["check", "--config", json.dumps(settings)]) == 0
    printed = capsys.readouterr().out
    assert f"store    {server.kind} at {server.url}: answers in " in printed
    assert "allkeys-lru" in printed and "volatile-ttl" in printed
    server.kill()
    assert main(["check", "--config", json.dumps(settings)]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_store_that_is_gone(server: StoreServer) -> None:
    server.kill()
    with pytest.raises(StoreGoneError, match="Start it, or correct url"):
        probe_store(StoreConfig(url=server.url))


def test_a_store_that_refuses(server: StoreServer) -> None:
    server.call(b"CONFIG", b"SET", b"requirepass", b"word")
    for url in (server.url, server.url.replace("unix://", "unix://:wrong@")):
        with pytest.raises(TierError, match=r"refuses us: .*url") as refused:
            probe_store(StoreConfig(url=url))
        assert not isinstance(refused.value, StoreGoneError)
    probe_store(StoreConfig(url=server.url.replace("unix://", "unix://:word@")))


def test_a_user_who_may_do_what_the_docs_say(server: StoreServer) -> None:
    rules = "on >word ~kvo1:* -@all +get +getex +set +exists +pexpire +del "
    rules += "+sadd +srem +spop +smembers +ping +select"
    assert f"`{rules.split(' ', 2)[2]}`" in Path("docs/using.md").read_text().replace("\n", " ")
    server.call(b"ACL", b"SETUSER", b"engine", *rules.encode().split())
    found = probe_store(StoreConfig(url=server.url.replace("unix://", "unix://engine:word@")))
    assert found.policy == "", "it may not ask for that"
