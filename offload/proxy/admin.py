"""Admin endpoints: engines are added, drained and removed while requests run; and the metrics."""

import asyncio
import hmac
from typing import Any

from aiohttp import web

from offload.errors import ProxyError
from offload.fleet_config import Address
from offload.proxy.core import Core
from offload.proxy.exchange import error_answer
from offload.proxy.faults import ClientError
from offload.proxy.health import drain
from offload.proxy.members import Member
from offload.proxy.settings import KvSource, check_near, engine_url, fleet_address, kv_source
from offload.proxy.turns import decode_object

__all__ = ["Admin"]


class Admin:
    """Answers them.

    | path | what it does |
    | --- | --- |
    | ``GET /engines`` | how all engines are |
    | ``POST /engines`` | ``{"url", "role", "fleet", "kv_events"}``: one more, and where it says what it has |
    | ``POST /engines/drain`` | ``{"url"}``: nothing new begins there; what runs goes on elsewhere in time |
    | ``POST /engines/resume`` | ``{"url"}``: it is used again |
    | ``POST /engines/remove`` | ``{"url"}``: it is forgotten; what runs goes on elsewhere at once |
    | ``GET /metrics`` | for Prometheus |
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tasks: set[asyncio.Task[int]] = set()

    def add_routes(self, app: web.Application, prefix: str) -> None:
        """To an application of its own, or below a prefix to that for clients."""
        for method, path, handler in (
            ("GET", "/engines", self._list),
            ("POST", "/engines", self._add),
            ("POST", "/engines/drain", self._drain),
            ("POST", "/engines/resume", self._resume),
            ("POST", "/engines/remove", self._remove),
            ("GET", "/metrics", self._metrics),
        ):
            app.router.add_route(method, prefix + path, self._guarded(handler))

    def _guarded(self, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            key = self._core.settings.admin_key
            given = request.headers.get("X-Admin-Key", "")
            if key is not None and not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
                return error_answer(401, "X-Admin-Key is not the key of --admin-key-file")
            try:
                told: web.StreamResponse = await handler(request)
                return told
            except ClientError as error:
                return error_answer(error.status, str(error))
            except ProxyError as error:
                return error_answer(400, str(error))

        return handle

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"engines": [self._told(each) for each in self._core.members]})

    async def _add(self, request: web.Request) -> web.StreamResponse:
        fields = decode_object(await request.read())
        role, address, source = fields.get("role", "both"), _address_in(fields), _source_in(fields)
        if address is not None:
            check_near(address, self._core.settings.fleet_key, '"fleet"')
        member = self._core.members.add(_url_in(fields), role if isinstance(role, str) else repr(role)[:80])
        if address is not None:
            self._core.trees.add(member.url, address)
        if source is not None:
            self._core.events.add(member.url, source)
        return web.json_response(self._told(member))

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        member = await self._member(request)
        if not member.is_draining:
            member.is_draining = True
            task = asyncio.create_task(drain(self._core, member))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return web.json_response(self._told(member))

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        member = await self._member(request)
        member.is_draining = False
        return web.json_response(self._told(member))

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        member = self._core.members.remove(_url_in(decode_object(await request.read())))
        self._core.history.forget(member.url)
        self._core.trees.remove(member.url)
        await self._core.events.remove(member.url)
        return web.json_response(self._told(member))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = self._core.metrics.text(self._core.members, self._core.now())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _member(self, request: web.Request) -> Member:
        url = _url_in(decode_object(await request.read()))
        member = self._core.members.get(url)
        if member is None:
            raise ClientError(404, f"{url} is not there; GET /engines says which are")
        return member

    def _told(self, member: Member) -> dict[str, Any]:
        address = self._core.trees.address_of(member.url)
        return {
            "url": member.url,
            "role": member.role,
            "state": member.state(self._core.now()),
            "running": len(member.legs),
            "prompt_tokens": member.prompt_tokens,
            "peer": member.peer,
            "fleet": None if address is None else address.shown,
            "kv_events": self._core.events.told(member.url),
            "failures": member.num_failures,
        }


def _address_in(fields: dict[str, Any]) -> Address | None:
    address = fields.get("fleet")
    if address is None:
        return None
    if not isinstance(address, str):
        raise ClientError(400, 'give {"fleet": "10.0.0.1:7000"}, as the engine has it in listen')
    return fleet_address(address, '"fleet"')


def _source_in(fields: dict[str, Any]) -> KvSource | None:
    ends = fields.get("kv_events")
    if ends is None:
        return None
    if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends):
        raise ClientError(
            400, 'give {"kv_events": ["tcp://10.0.0.1:5557"]}, and the replay endpoint behind it'
        )
    return kv_source(ends, '"kv_events"')


def _url_in(fields: dict[str, Any]) -> str:
    url = fields.get("url")
    if not isinstance(url, str):
        raise ClientError(400, 'give {"url": "http://10.0.0.1:8000"}')
    return engine_url(url)
