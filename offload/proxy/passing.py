"""Paths that are not answered here: they go to an engine as they are."""

import asyncio

import msgspec
from aiohttp import web

from offload.proxy.core import Core
from offload.proxy.exchange import ClientGoneError, error_answer
from offload.proxy.faults import ClientError, EngineError
from offload.proxy.members import Leg
from offload.proxy.turns import decode_object, strip
from offload.proxy.upstream import forwarded, returned, timed

__all__ = ["PASSED", "is_passed", "pass_on"]

PASSED = (
    "/v1/",
    "/v2/",
    "/health",
    "/ping",
    "/version",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/inference/v1/generate",
)
"""Paths, and beginnings of paths, that engines answer for clients. Others change engines, or tell of them."""
_REFUSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They would reach one engine of many."""


def is_passed(path: str, more: tuple[str, ...]) -> bool:
    """Whether clients may have a path."""
    if path in _REFUSED or ".." in path or "//" in path:
        return path in more
    return path in more or any(path.startswith(each) if each[-1] == "/" else path == each for each in PASSED)


async def pass_on(core: Core, request: web.Request, body: bytes) -> web.StreamResponse:
    """Send a request to an engine, to the next one if that does not answer, and return what it says.

    Raises:
        ClientError: the path is not for clients, or the body says what clients may not.
        ClientGoneError: nobody reads the answer.
    """
    path = request.path
    if not is_passed(path, core.settings.passed):
        raise ClientError(404, f"{path} is not passed to engines; ask an engine itself, or use --pass {path}")
    headers = forwarded(request.headers)
    if "Content-Type" in request.headers:
        headers["Content-Type"] = request.headers["Content-Type"]
    if body and "json" in request.content_type:
        fields = decode_object(body)
        if stripped := strip(fields):
            core.metrics.stripped.inc(stripped)
        body = msgspec.json.encode(fields)
    failed: set[str] = set()
    while members := core.members.any_of(failed):
        member = min(members, key=lambda each: len(each.legs))
        failed.add(member.url)
        leg = Leg(lambda: False)
        try:
            member.begin()
            response = await _passed(core, request, member.url, headers, body, leg)
            member.succeeded()
            return response
        except EngineError as error:
            core.failed(member, error)
            if request.get(_BEGUN):
                raise ClientGoneError from error  # it has half an answer; the connection ends with it
        finally:
            member.forgotten()
    return error_answer(503, "no engine answers")


_BEGUN = web.RequestKey("begun", bool)


async def _passed(
    core: Core, request: web.Request, url: str, headers: dict[str, str], body: bytes, leg: Leg
) -> web.StreamResponse:
    settings = core.settings
    async with (
        timed(leg, settings.answer_seconds),
        core.upstreams.request(request.method, url + request.raw_path, headers, body or None) as upstream,
    ):
        response = web.StreamResponse(status=upstream.status, headers=returned(upstream.headers))
        async for part in upstream.content.iter_any():
            await _write(request, response, part, leg, settings.stall_seconds)
        await _write(request, response, b"", leg, settings.stall_seconds)
    await response.write_eof()
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, part: bytes, leg: Leg, seconds: float
) -> None:
    leg.pause()
    try:
        async with asyncio.timeout(seconds):
            if not response.prepared:
                request[_BEGUN] = True
                await response.prepare(request)
            if part:
                await response.write(part)
    except (ConnectionError, TimeoutError) as error:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGoneError from error
    leg.resume()
