"""The client's side of one request: its answer begins with the first byte that there is for it."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from offload.proxy.events import error_event
from offload.proxy.upstream import Answer

__all__ = ["ClientGoneError", "Exchange", "error_answer"]

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class Exchange:
    """What a client is sent. Not before there is something, so that all may be tried until then.

    Args:
        request: of the client.
        stall_seconds: that it may take to read what was sent.
    """

    def __init__(self, request: web.Request, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self._stream: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the head of a stream is sent."""
        return self._stream is not None

    async def send(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A piece of a stream. ``headers``: of the engine, taken with the first. Raises ClientGoneError."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                if self._stream is None:
                    kept = {key: value for key, value in (headers or {}).items() if key.lower()[:2] == "x-"}
                    self._stream = web.StreamResponse(headers={**kept, **STREAM_HEADERS})
                    await self._stream.prepare(self._request)
                await self._stream.write(data)
        except (ConnectionError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError from error

    async def end(self) -> web.StreamResponse:
        """The stream is over. Raises ClientGoneError."""
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except ConnectionError as error:
            raise ClientGoneError from error
        return self._stream

    async def finish(self, answer: Answer) -> web.StreamResponse:
        """An answer that is no stream; an event with an error where one has begun."""
        if self._stream is None:
            return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        text = answer.body[:1000].decode(errors="replace")
        await self.send(error_event(f"another engine says: {text}", answer.status))
        return await self.end()

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """No answer, and why."""
        if self._stream is None:
            return error_answer(status, message)
        await self.send(error_event(message, status))
        return await self.end()


def error_answer(status: int, message: str) -> web.Response:
    """In the shape of OpenAI's and vLLM's errors."""
    kind = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequests"}.get(status, "proxy_error")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
