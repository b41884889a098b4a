"""A real Mooncake Store for tests: its master, and a process that brings memory."""

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from offload.mooncake_config import MOONCAKE, MooncakeConfig
from offload.testing.engines.server import held_port
from offload.worker.media.mooncake import MooncakeClient

WAIT_SECONDS = 60.0

_OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("ready" if not code else code, flush=True)
time.sleep(1e6)
"""


def binary_of_master() -> str:
    """Where it is. Skips the test where it is not installed."""
    spec = find_spec("mooncake")
    for place in [] if spec is None else list(spec.submodule_search_locations or []):
        if (Path(place) / "mooncake_master").exists():
            return str(Path(place) / "mooncake_master")
    pytest.skip("Mooncake is not installed (pip install mooncake-transfer-engine-non-cuda)")


class KeptClient(MooncakeClient):
    """Another client's connection, which it leaves open: to make one, and to close it, takes a second."""

    def __init__(self, client: MooncakeClient, registered: Counter[int]) -> None:
        """``registered``: how often each address is, by all who have that connection."""
        self._store, self._replicate = client._store, client._replicate
        self._all, self._own = registered, list[int]()

    def register(self, address: int, num_bytes: int) -> None:
        if not self._all[address]:
            super().register(address, num_bytes)
        self._all[address] += 1
        self._own.append(address)

    def unregister(self, address: int) -> None:
        self._own.remove(address)
        self._all[address] -= 1
        if not self._all[address]:
            assert self._store.unregister_buffer(address) == 0

    def close(self) -> None:
        for address in self._own.copy():
            self.unregister(address)


class MooncakeServer:
    """A master, and somebody who brings memory to it. A client of this process looks into it."""

    kind = MOONCAKE

    def __init__(self, path: Path, *, mib: int = 256, lease_ms: int = 60_000) -> None:
        """``lease_ms``: after a read, until the value may go. A read that takes longer fails."""
        path.mkdir(parents=True, exist_ok=True)
        self._binary = binary_of_master()
        self._path = path
        self._num_bytes = mib << 20
        self._lease_ms = lease_ms
        held = [held_port(), held_port()]  # also while the master is down
        for each in held:
            weakref.finalize(self, each.close)
        self.port, self._http_port = (int(each.getsockname()[1]) for each in held)
        self._master: subprocess.Popen[bytes] | None = None
        self._owner: subprocess.Popen[bytes] | None = None
        self._client: MooncakeClient | None = None
        self._registered = Counter[int]()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> MooncakeConfig:
        return MooncakeConfig(master_server_address=self.address)

    @property
    def settings(self) -> dict[str, object]:
        """Of a tier."""
        return {"kind": MOONCAKE, "master_server_address": self.address}

    @property
    def client(self) -> MooncakeClient:
        if self._client is None:
            self._client = MooncakeClient(self.config)
        return self._client

    def kept(self, config: MooncakeConfig) -> MooncakeClient:
        """A client of that connection."""
        return KeptClient(self.client, self._registered)

    def start(self) -> None:
        """Start all, or start the master again with nothing in it."""
        self.start_master()
        if self._owner is None:
            self.start_owner()

    def start_master(self) -> None:
        arguments = [
            *("--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"),
            *(f"--metrics_port={self._http_port}", "--enable_metric_reporting=false", "--client_ttl=3"),
            f"--default_kv_lease_ttl={self._lease_ms}",
        ]
        with open(self._path / "master.log", "ab") as log:
            self._master = subprocess.Popen(
                [self._binary, *arguments], stdout=log, stderr=log, cwd=self._path, start_new_session=True
            )
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < until, (self._path / "master.log").read_text()
                assert self._master.poll() is None, (self._path / "master.log").read_text()
                time.sleep(0.02)

    def start_owner(self) -> None:
        with open(self._path / "owner.log", "ab") as log:
            self._owner = subprocess.Popen(
                [sys.executable, "-c", _OWNER, self.address, str(self._num_bytes)],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._path,
                start_new_session=True,
            )
        assert self._owner.stdout is not None
        with self._owner.stdout as said:
            assert said.readline() == b"ready\n", (self._path / "owner.log").read_text()

    def mend(self) -> None:
        """Start what was killed, and wait until it takes values."""
        if self._master is None:
            self.start_master()
        if self._owner is None:
            self.start_owner()
        content = np.zeros(1, dtype=np.uint8)
        client = self.kept(self.config)
        client.register(content.ctypes.data, 1)
        until = time.monotonic() + WAIT_SECONDS
        while client.put([f"try {time.monotonic()}"], [[content.ctypes.data]], [[1]]) != [0]:
            assert time.monotonic() < until, (self._path / "master.log").read_text()
            time.sleep(0.05)
        client.close()

    def clear(self) -> None:
        """Nobody else uses it."""
        assert self.client.remove_matching(".*") >= 0

    def all_keys(self) -> list[str]:
        """Of extents, and of others."""
        return [key for key in self.really_all_keys() if not key.startswith("kvo1:namespace-")]

    def really_all_keys(self) -> list[str]:
        with socket.create_connection(("127.0.0.1", self._http_port), 10) as connection:
            connection.sendall(b"GET /get_all_keys HTTP/1.0\r\nConnection: close\r\n\r\n")
            connection.settimeout(10)
            answer = b""
            while b"\r\n\r\n" not in answer or len(answer) < _length(answer):
                more = connection.recv(1 << 16)
                if not more:
                    break
                answer += more
        return sorted(answer.partition(b"\r\n\r\n")[2].decode().split())

    def pause(self) -> None:
        """The master takes connections, and answers nothing."""
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._master.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all its threads

    def go_on(self) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Both."""
        self.kill_owner()
        self.kill_master()

    def kill_master(self) -> None:
        self._master = _kill(self._master)

    def kill_owner(self) -> None:
        self._owner = _kill(self._owner)


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_SECONDS)


def _length(answer: bytes) -> int:
    head, _, _ = answer.partition(b"\r\n\r\n")
    for line in head.lower().splitlines():
        if line.startswith(b"content-length:"):
            return len(head) + 4 + int(line.split(b":")[1])
    return 1 << 62
