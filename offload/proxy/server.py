"""The proxy as an HTTP server."""

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Self

from aiohttp import web

from offload.errors import ProxyError
from offload.proxy.admin import Admin
from offload.proxy.core import Core
from offload.proxy.exchange import ClientGoneError, Exchange, error_answer
from offload.proxy.faults import ClientError
from offload.proxy.health import watch
from offload.proxy.members import Members
from offload.proxy.passing import pass_on
from offload.proxy.policies import Policy
from offload.proxy.relay import Relay
from offload.proxy.settings import ProxySettings
from offload.proxy.turns import CHAT, COMPLETIONS, parse
from offload.proxy.upstream import forwarded

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)


class Proxy:
    """A context manager: it listens while it is entered.

    Attributes:
        core: what its requests share.
        port, admin_port: at which it listens; None: not at all.

    Raises on entry:
        ProxyError: an address cannot be had.
    """

    def __init__(self, settings: ProxySettings, policy: Policy) -> None:
        self._settings = settings
        self._policy = policy
        self._runners: list[web.AppRunner] = []
        self._watch: asyncio.Task[None] | None = None
        self._num_running = 0
        self.port: int | None = None
        self.admin_port: int | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.core = Core(self._settings, Members(self._settings.engines, loop.time), self._policy)
        await self.core.open()
        try:
            await self._listen()
        except BaseException:
            await self.__aexit__()
            raise
        self._watch = asyncio.create_task(watch(self.core))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for runner in self._runners:
            await runner.cleanup()
        await self.core.close()

    async def _listen(self) -> None:
        settings, admin = self._settings, Admin(self.core)
        app = web.Application(client_max_size=settings.max_body_bytes)
        if settings.admin_port is None and settings.admin_key is not None:
            admin.add_routes(app, "/admin")
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.port = await self._start(app, settings.host, settings.port, "--port")
        if settings.admin_port is not None:
            admin_app = web.Application()
            admin.add_routes(admin_app, "")
            self.admin_port = await self._start(
                admin_app, settings.admin_host, settings.admin_port, "--admin-port"
            )

    async def _start(self, app: web.Application, host: str, port: int, option: str) -> int:
        size = self._settings.max_header_bytes
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            max_line_size=size,
            max_field_size=size,
            shutdown_timeout=5.0,
            keepalive_timeout=75.0,
        )
        self._runners.append(runner)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except (OSError, OverflowError) as error:
            raise ProxyError(
                f"{option} {port} at {host} cannot be had ({error}); give another one, or end who has it"
            ) from None
        return int(runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        metrics, path = self.core.metrics, request.path
        is_turn = path in (COMPLETIONS, CHAT) and request.method == "POST"
        label = path if is_turn else "other"
        if self._num_running >= self._settings.max_requests and request.method == "POST":
            metrics.requests.labels(label, "too many").inc()
            return error_answer(
                429, f"{self._num_running} requests run, and --max-requests allows no more; try again later"
            )
        self._num_running += 1
        metrics.running.set(self._num_running)
        outcome, begun = "cancelled", self.core.now()
        try:
            body = await self._read(request)
            if is_turn:
                response, outcome = await self._turn(request, body)
            else:
                response = await pass_on(self.core, request, body)
                outcome = "answered" if response.status < 400 else "refused"
            return response
        except ClientError as error:
            outcome = "refused"
            return error_answer(error.status, str(error))
        except ClientGoneError:
            raise ConnectionResetError("the client has gone") from None
        except Exception:
            outcome = "error"
            logger.exception("a request failed within the proxy")
            raise
        finally:
            self._num_running -= 1
            metrics.running.set(self._num_running)
            metrics.requests.labels(label, outcome).inc()
            metrics.seconds.labels(label).observe(self.core.now() - begun)

    async def _turn(self, request: web.Request, body: bytes) -> tuple[web.StreamResponse, str]:
        settings = self._settings
        turn = parse(request.path, body, request.headers.get("Authorization"), settings.min_prefill_tokens)
        if turn.num_stripped:
            self.core.metrics.stripped.inc(turn.num_stripped)
            self.core.warn_once(
                "stripped", text="a client sent kv_transfer_params of engines; they are left out"
            )
        exchange = Exchange(request, settings.stall_seconds)
        headers = forwarded(request.headers)
        if "X-Request-Id" not in request.headers and "request_id" not in turn.body:
            headers["X-Request-Id"] = uuid.uuid4().hex  # so that both legs are known by one id
        return await Relay(self.core, turn, headers, exchange).serve()

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.stall_seconds):
                return await request.read()
        except TimeoutError:
            raise ClientError(408, "the body did not come in time") from None
        except web.HTTPRequestEntityTooLarge:
            raise ClientError(
                413,
                f"the body has more than {self._settings.max_body_bytes} bytes; see --max-body-bytes",
            ) from None
