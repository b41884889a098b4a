"""Whether a Mooncake Store can be had: asked before an engine starts, and by ``kv-offload check``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.cli import main
from offload.errors import TierError
from offload.mooncake_config import MooncakeConfig
from offload.store_probe import probe_store
from offload.worker.media import mooncake_check
from offload.worker.media.resp_check import StoreGoneError
from tests.mooncake import MooncakeServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake"), mib=64)
    yield server
    server.kill()


def test_a_store_that_works(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.mend()
    server.clear()
    assert probe_store(server.config).seconds > 0
    assert server.all_keys() == [], "nothing is left"
    assert main(["check", "--config", json.dumps({"cpu_gib": 1, "tiers": [server.settings]})]) == 0
    assert f"store    mooncake at {server.address}: answers in " in capsys.readouterr().out


def test_a_store_without_memory(server: MooncakeServer) -> None:
    server.kill()
    server.start_master()
    with pytest.raises(StoreGoneError, match="mooncake_client"):
        probe_store(server.config)


def test_a_master_that_hangs(server: MooncakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_check, "_WAIT_SECONDS", 1.0)
    server.pause()
    with pytest.raises(StoreGoneError, match="no answer within 1 s"):
        probe_store(server.config)
    server.go_on()


def test_a_store_that_is_gone(server: MooncakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.kill()
    with pytest.raises(StoreGoneError, match="Start it, or correct master_server_address"):
        probe_store(server.config)
    assert main(["check", "--config", json.dumps({"cpu_gib": 1, "tiers": [server.settings]})]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_check, "find_spec", lambda name: None)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TierError, match="pip install mooncake-transfer-engine") as refused:
        probe_store(MooncakeConfig(master_server_address="127.0.0.1:1"))
    assert not isinstance(refused.value, StoreGoneError)


def test_the_library_is_loaded_only_where_it_is_used() -> None:
    """It starts threads, and processes of an engine fork."""
    modules = "offload.store_probe, offload.worker.media.mooncake_medium"
    script = f"import sys, {modules}; sys.exit('mooncake' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment).returncode == 0


def test_nothing_of_the_library_is_logged(tmp_path: Path) -> None:
    script = """
import sys
from offload.mooncake_config import MooncakeConfig
from offload.worker.media.mooncake import MooncakeClient, explained
client = MooncakeClient(MooncakeConfig(master_server_address=sys.argv[1]))
assert client.get(["none"], [[1]], [[1]]) == [-704]
"""
    server = MooncakeServer(tmp_path, mib=16)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, server.address], env=environment, capture_output=True, timeout=60
    )
    server.kill()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
