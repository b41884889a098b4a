"""A Mooncake Store beside us: its master, and a process that brings memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from offload.mooncake_config import MooncakeConfig
from offload.testing.engines.server import held_ports
from offload.worker.media.mooncake import MooncakeClient

_WAIT_SECONDS = 30.0
_OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("ready", flush=True)
time.sleep(1e6)
"""


def binary_of_master() -> Path | None:
    """Where it is; None: Mooncake is not installed."""
    spec = find_spec("mooncake")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [Path(place) / "mooncake_master" for place in places]
    return next((path for path in found if path.exists()), None)


@contextmanager
def mooncake_store(binary: Path, folder: Path, num_bytes: int) -> Iterator[MooncakeConfig]:
    """Run a master, and a process with so much memory."""
    held = held_ports(2)
    ports = [each.getsockname()[1] for each in held]
    config = MooncakeConfig(master_server_address=f"127.0.0.1:{ports[0]}")
    arguments = ["--rpc_address=127.0.0.1", f"--rpc_port={ports[0]}", "--metrics_host=127.0.0.1"]
    arguments += [f"--metrics_port={ports[1]}", "--enable_metric_reporting=false"]
    processes = []
    with open(folder / "mooncake.log", "wb") as log:
        try:
            processes.append(subprocess.Popen([binary, *arguments], stdout=log, stderr=log, cwd=folder))
            until = time.monotonic() + _WAIT_SECONDS
            while True:
                try:
                    socket.create_connection(config.master, 1).close()
                    break
                except OSError:
                    assert time.monotonic() < until, "the master does not start"
                    time.sleep(0.02)
            owner = [sys.executable, "-c", _OWNER, config.master_server_address, str(num_bytes)]
            processes.append(subprocess.Popen(owner, stdout=subprocess.PIPE, stderr=log, cwd=folder))
            assert processes[1].stdout is not None
            assert processes[1].stdout.readline() == b"ready\n", "nobody brings memory"
            yield config
        finally:
            for process in processes:
                process.kill()
                process.communicate(timeout=_WAIT_SECONDS)
            for each in held:
                each.close()


def put_names(client: MooncakeClient, keys: list[str]) -> None:
    """Values of one byte under these."""
    content = np.zeros(1, dtype=np.uint8)
    client.register(content.ctypes.data, 1)
    for start in range(0, len(keys), 64):
        part = keys[start : start + 64]
        codes = client.put(part, [[content.ctypes.data]] * len(part), [[1]] * len(part))
        assert not any(codes), set(codes)
