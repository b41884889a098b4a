"""Requests to engines: what is sent, what comes back, and what counts as no answer."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp

from offload.proxy.faults import AnswerError, EngineError
from offload.proxy.members import Leg
from offload.proxy.settings import ProxySettings

__all__ = ["Answer", "Upstreams", "forwarded", "raise_for", "returned", "timed"]

_OF_ONE_CONNECTION = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
        "host",
        "content-length",
    )
)
_OF_BODIES = frozenset(("content-encoding", "accept-encoding", "content-type"))
_IDLE_SECONDS = 2.0
"""That a connection is kept for the next request; uvicorn, in front of vLLM, ends it after 5."""
_RETRIED = (408, 429)
"""Statuses below 500 that another engine may not give."""


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of a client for an engine: all but those of one connection, and of a body that is made anew."""
    named = {each.strip().lower() for each in headers.get("Connection", "").split(",")}
    dropped = _OF_ONE_CONNECTION | _OF_BODIES | named
    return {key: value for key, value in headers.items() if key.lower() not in dropped}


def returned(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of an engine for a client."""
    dropped = _OF_ONE_CONNECTION | {"date", "server"}
    return {key: value for key, value in headers.items() if key.lower() not in dropped}


class Answer(NamedTuple):
    """An answer that is no stream; ``headers`` are those for the client."""

    status: int
    headers: dict[str, str]
    body: bytes


class Upstreams:
    """Connections to engines."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Must be called on the loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_seconds)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type", "Accept"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes] | None,
        *,
        is_fresh: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the answer's head is there on entry. Nothing of it is left on exit.

        Args:
            is_fresh: on a connection of its own.

        Raises:
            EngineError: there is no answer, or it breaks off.
        """
        assert self._session is not None
        if is_fresh:
            headers = {**headers, "Connection": "close"}
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
            yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"no connection: {error}", is_dead=True) from None
        except aiohttp.ServerTimeoutError as error:
            raise EngineError(f"no connection: {error}", is_dead=True) from None
        except aiohttp.ServerDisconnectedError as error:
            raise EngineError(f"no answer: {error}", is_stale=response is None) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineError(f"no whole answer: {type(error).__name__} {str(error)[:200]}") from None
        finally:
            if response is not None:
                # A connection whose answer was read to its end is kept; others are closed.
                response.release() if response.content.at_eof() else response.close()

    async def whole(
        self, url: str, headers: Mapping[str, str], body: bytes, leg: Leg, seconds: float, is_fresh: bool
    ) -> Answer:
        """POST, and all of the answer.

        Raises:
            EngineError: there is none in time.
            AnswerError: it says that another engine may do better.
        """
        async with (
            timed(leg, seconds),
            self.request("POST", url, headers, body, is_fresh=is_fresh) as response,
        ):
            told = Answer(response.status, returned(response.headers), await self.read(response))
        raise_for(response.status, told.body, response.content_type)
        return told

    async def get(
        self, url: str, leg: Leg, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """GET, and all of the answer. Raises EngineError if there is none in time."""
        async with timed(leg, seconds), self.request("GET", url, headers or {}, None) as response:
            return Answer(response.status, returned(response.headers), await self.read(response))

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """All of an answer's body. Raises EngineError if it is too long."""
        limit, size, parts = self._settings.max_answer_bytes, 0, []
        async for part in response.content.iter_any():
            size += len(part)
            if size > limit:
                raise EngineError(f"an answer of more than {limit} bytes")
            parts.append(part)
        return b"".join(parts)


@asynccontextmanager
async def timed(leg: Leg, seconds: float) -> AsyncIterator[None]:
    """Waits for an engine end here: after so long, or when the leg is to move. Raises EngineError then."""
    try:
        async with asyncio.timeout(seconds) as timer:
            with leg.watched(timer):
                if leg.why:
                    timer.reschedule(asyncio.get_running_loop().time())
                yield
    except TimeoutError:
        if leg.why:
            raise EngineError(leg.why, counts=False) from None
        raise EngineError("it says nothing for too long") from None


def raise_for(status: int, body: bytes, content_type: str) -> None:
    """Raises AnswerError where another engine may give a better answer."""
    if status >= 500 or status in _RETRIED:
        raise AnswerError(status, body, content_type)
