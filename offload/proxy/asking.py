"""Asks engines how much of a prompt their pools have: a few connections to each, and one limit for all."""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import TypeVar

from offload.fleet_config import Address
from offload.peering.frames import ProtocolError
from offload.peering.locating import Locate, Located, ask, ask_in
from offload.peering.talk import Talk

__all__ = ["Doors"]

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 4
"""To an engine."""
PAUSE_SECONDS = 2.0
"""An engine that could not be asked is not asked for so long."""

Of = TypeVar("Of")


class _Connection:
    """One that has been let in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def carry(self, talk: Talk[Of]) -> Of:
        """One side of a conversation. Raises OSError, and asyncio.IncompleteReadError."""
        try:
            while True:
                wants = next(talk)
                if isinstance(wants, memoryview):
                    wants[:] = await self._reader.readexactly(len(wants))
                else:
                    self._writer.writelines(wants)
                    await self._writer.drain()
        except StopIteration as end:
            found: Of = end.value
            return found
        finally:
            talk.close()

    def close(self) -> None:
        self._writer.close()


class _Door:
    """An engine's: connections that nobody uses now, and until when it is left alone."""

    def __init__(self, address: Address, key: bytes, context: ssl.SSLContext | None) -> None:
        self.address = address
        self._key = key
        self._context = context
        self._is_closed = False
        self._idle: list[_Connection] = []
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._quiet_until = 0.0
        self._is_failing = False

    async def ask(self, question: Locate) -> int | None:
        """Leading tokens that it has; None: it does not say. Raises nothing but cancellation."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._quiet_until:
            return None
        async with self._room:
            connection: _Connection | None = None
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                located: Located = await connection.carry(ask(question))
            except (OSError, EOFError) as error:
                if connection is not None:
                    connection.close()
                self.fail(loop.time(), error)
                return None
            except BaseException:  # it is too late: what it says now is not of the next question
                if connection is not None:
                    connection.close()
                raise
            self._is_failing = False
            if self._is_closed:  # the engine was removed meanwhile
                connection.close()
            else:
                self._idle.append(connection)
            return None if located.is_busy else located.num_tokens

    def fail(self, now: float, error: BaseException) -> None:
        """It could not be asked."""
        self._quiet_until = now + PAUSE_SECONDS
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if not self._is_failing:
            self._is_failing = True
            text = str(error) or type(error).__name__
            logger.warning("%s does not say which prompts it has: %s", self.address.shown, text)

    @property
    def num_idle(self) -> int:
        """Connections that nobody uses now."""
        return len(self._idle)

    def close(self) -> None:
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(*self.address, ssl=self._context)
        connection = _Connection(reader, writer)
        try:
            heard = await connection.carry(ask_in(self._key))
            if not heard.position_tokens:
                raise ProtocolError("positions of no tokens")
        except BaseException:
            connection.close()
            raise
        return connection


class Doors:
    """Of all engines whose addresses in the fleet are known. On one loop."""

    def __init__(
        self, addresses: Mapping[str, Address], key: bytes, context: ssl.SSLContext | None, seconds: float
    ) -> None:
        """Connect to nobody yet.

        Args:
            addresses: where rank 0 listens, by the engine's URL.
            key: the fleet's; empty: it has none.
            context: of TLS; None: in clear.
            seconds: after which an answer is of no use.
        """
        self._key = key
        self._context = context
        self._seconds = seconds
        self._doors: dict[str, _Door] = {}
        for url, address in addresses.items():
            self.open(url, address)

    def __contains__(self, url: object) -> bool:
        """Whether that engine can be asked."""
        return url in self._doors

    def open(self, url: str, address: Address) -> None:
        """That engine can be asked from now on."""
        self._doors[url] = _Door(address, self._key, self._context)

    def shut(self, url: str) -> None:
        """It is asked no more. Idempotent."""
        if (door := self._doors.pop(url, None)) is not None:
            door.close()

    def address_of(self, url: str) -> Address | None:
        """Where it is asked; None: it is not."""
        door = self._doors.get(url)
        return None if door is None else door.address

    async def ask(self, urls: list[str], question: Locate) -> dict[str, int]:
        """Leading tokens that engines have, of those that say so in time. All are asked at once."""
        doors = [(url, self._doors[url]) for url in urls if url in self._doors]
        asked = {asyncio.create_task(door.ask(question)): (url, door) for url, door in doors}
        if not asked:
            return {}
        try:
            done, late = await asyncio.wait(asked, timeout=self._seconds)
        except asyncio.CancelledError:
            for task in asked:
                task.cancel()
            raise
        for task in late:
            task.cancel()
        now = asyncio.get_running_loop().time()
        for task in late:
            asked[task][1].fail(now, TimeoutError(f"not within {self._seconds:g} seconds"))
        return {asked[task][0]: found for task in done if (found := task.result()) is not None}

    @staticmethod
    def now() -> float:
        """On the clock of the loop."""
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Let go of all connections."""
        for door in self._doors.values():
            door.close()

    def check_invariants(self) -> None:
        """No engine has more connections than it may. For tests."""
        for url, door in self._doors.items():
            assert door.num_idle <= MOST_CONNECTIONS, f"{url} has {door.num_idle} connections"
