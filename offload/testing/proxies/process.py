"""A proxy in a process of its own, at a port of this machine."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import aiohttp

from offload.testing.engines.server import held_port
from offload.testing.engines.sessions import kill, processes_of

__all__ = ["PORT", "ProxyError", "ProxyProcess"]

PORT = "{port}"
"""In a command: the port to listen at."""

START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 0.1


class ProxyError(RuntimeError):
    """A proxy did not start; the message has the end of what it printed."""


class ProxyProcess:
    """An asynchronous context manager: the command runs on entry, until it answers, and ends on exit.

    Args:
        name: in messages.
        command: arguments of this Python; each may have ``PORT``.
        variables: of its environment, beside ours.
        ready: path that it answers once it serves; any status below 500 will do.
    """

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] = {}, ready: str = "/health"
    ) -> None:
        self.name = name
        self._held = held_port()
        self.port = int(self._held.getsockname()[1])
        self._command = [sys.executable, *(part.replace(PORT, str(self.port)) for part in command)]
        self._variables, self._ready = dict(variables), ready
        self._folder = tempfile.TemporaryDirectory(prefix="kv-offload-proxy-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    async def __aenter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await asyncio.wait_for(self._answers(), START_SECONDS)
        except TimeoutError:
            await self.__aexit__()
            raise ProxyError(f"{self.name} does not answer after {START_SECONDS:.0f} s") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _STOP_SECONDS)
        kill(processes_of(process.pid))
        process.wait()
        self._held.close()
        self._folder.cleanup()

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """The same for those who have no event loop."""
        asyncio.run(self.__aenter__())
        try:
            yield self
        finally:
            asyncio.run(self.__aexit__())

    def kill(self) -> None:
        """End it with SIGKILL."""
        os.killpg(self.pid, signal.SIGKILL)

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "log"

    async def _answers(self) -> None:
        assert self._process is not None
        async with aiohttp.ClientSession() as client:
            while True:
                if self._process.poll() is not None:
                    raise ProxyError(f"{self.name} did not start:\n{self.log()[-3000:]}")
                try:
                    async with client.get(self.url + self._ready) as response:
                        if response.status < 500:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_LOOK_SECONDS)
