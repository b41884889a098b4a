"""An engine in memory behind vLLM's HTTP API, on a socket of its own, with the faults that it is given."""

import asyncio
import hashlib
import json
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from offload.testing.engines.server import held_port
from offload.testing.upstream.answers import Shape
from offload.testing.upstream.faults import Fault, Faults
from offload.testing.upstream.generation import Limits, RefusalError, Step, steps
from offload.testing.upstream.handoff import Handoffs
from offload.testing.upstream.words import decode, encode, render

__all__ = ["Received", "Upstream"]


@dataclass
class Received:
    """A request that came.

    Attributes:
        path, body, headers: of it; the body as JSON, or empty.
        outcome: ``running``, ``done``, ``refused``, ``fault`` or ``cancelled``.
        has_left: the client went away before the end.
        prompts: token ids.
        num_computed: prompt tokens that were not fetched from another engine.
        num_tokens: of answers, sent so far.
    """

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    outcome: str = "running"
    has_left: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_tokens: int = 0


_SEEN = web.RequestKey("seen", Received)
_WRITTEN = web.RequestKey("written", bool)


class Upstream:
    """An engine. A context manager: it listens on 127.0.0.1 on entry, and nobody does on exit.

    Args:
        name: of it; its peer id is made from it.
        model: the one that it serves.
        role: ``prefill`` hands over every prompt, ``both`` those with ``do_remote_decode``, ``decode`` none.
        knows: engines that it can fetch from.
        key: what must come as ``Authorization: Bearer``; None: nothing.
        tokens_per_chunk: of streams.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str = "model",
        role: str = "both",
        knows: Sequence["Upstream"] = (),
        key: str | None = None,
        block_size: int = 16,
        max_model_len: int = 200_000,
        tokens_per_chunk: int = 1,
        patience: float = 5.0,
        num_refused: int = 0,
    ) -> None:
        self.name = name
        self.role = role
        self.faults = Faults()
        self.received: list[Received] = []
        self.handoffs = Handoffs(hashlib.sha256(name.encode()).hexdigest()[:16], block_size, num_refused)
        self.is_healthy = True
        self.num_looks = 0
        """How often somebody asked whether it is."""
        self.adapters: dict[str, str] = {}
        """Paths by the name that requests have as their model."""
        held = held_port()  # also while nobody listens
        self._let_port_go = weakref.finalize(self, held.close)
        self.port = int(held.getsockname()[1])
        self.tokens_per_chunk = tokens_per_chunk
        self._model, self._key, self._knows = model, key, list(knows)
        self._max_model_len, self._patience = max_model_len, patience
        self._runner: web.AppRunner | None = None
        self._count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether it listens."""
        return self._runner is not None

    def of(self, path: str = "/v1/completions") -> list[Received]:
        """Requests to a path."""
        return [each for each in self.received if each.path == path]

    def routes(self) -> Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        """Handlers by method and path."""
        return {
            "POST /v1/completions": self._generate,
            "POST /v1/chat/completions": self._generate,
            "POST /v1/embeddings": self._embed,
            "POST /v1/responses": self._echo_body,
            "POST /tokenize": self._tokenize,
            "POST /detokenize": self._detokenize,
            "GET /v1/models": self._models,
            "GET /health": self._health,
            "GET /metrics": self._metrics,
        }

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()
        self._let_port_go()

    async def start(self) -> None:
        """Listen, at the same port in every life."""
        app = web.Application(client_max_size=1 << 28)
        for route, handler in self.routes().items():
            method, _, path = route.partition(" ")
            app.router.add_route(method, path, self._received(path, handler))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        await self.handoffs.restart(is_up=True)

    async def kill(self) -> None:
        """As after SIGKILL: connections end, nobody listens, what it had is gone."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        await self.handoffs.restart(is_up=False)
        for site in list(runner.sites):
            await site.stop()
        if runner.server is not None:
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    def _received(
        self, path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            try:
                body = json.loads(raw) if raw else {}
            except ValueError:
                body = {}
            seen = Received(path, body if isinstance(body, dict) else {}, request.headers.copy())
            request[_SEEN] = seen
            self.received.append(seen)
            try:
                if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
                    raise RefusalError("Unauthorized", 401)
                answer = await handler(request)
                seen.outcome = "done" if seen.outcome == "running" else seen.outcome
                return answer
            except RefusalError as refusal:
                seen.outcome = "refused"
                return _error(refusal.status, str(refusal))
            except (asyncio.CancelledError, ConnectionError):
                seen.has_left = not (seen.outcome == "fault" and isinstance(sys.exception(), ConnectionError))
                seen.outcome = "cancelled" if seen.outcome == "running" else seen.outcome
                raise

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen: Received = request[_SEEN]
        body = seen.body
        fault = self.faults.next(seen.path, body)
        if fault is not None and fault.after < 0 and (told := await self._fail(request, fault)) is not None:
            return told
        is_chat = seen.path.endswith("/chat/completions")
        if body.get("stream_options") and not body.get("stream"):
            raise RefusalError("Stream options can only be defined when `stream=True`.")
        if body.get("model") not in (None, self._model, *self.adapters):
            raise RefusalError(f"The model `{body['model']}` does not exist.", 404)
        seen.prompts = self._prompts(body, is_chat)
        longest = max(map(len, seen.prompts))
        if longest >= self._max_model_len:
            raise RefusalError(
                f"The prompt is {longest} tokens long; at most {self._max_model_len - 1} are served."
            )
        limits = Limits.of(body, self._max_model_len - longest if is_chat else 16)
        self._count += 1
        prefix = "chatcmpl" if is_chat else "cmpl"
        shape = Shape.of(f"{prefix}-{self.name}-{self._count}", self._model, is_chat, body)
        params = body.get("kv_transfer_params")
        params = dict(params) if isinstance(params, dict) else {}
        fetched = 0
        for prompt in seen.prompts:
            peers = [each.handoffs for each in self._knows]
            fetched += await self.handoffs.fetch(prompt, params, peers, self._patience)
        seen.num_computed = sum(map(len, seen.prompts)) - fetched
        told_params = None
        if self.role == "prefill" or (self.role == "both" and params.get("do_remote_decode") is True):
            told_params = await self.handoffs.keep(seen.prompts[0])
        if body.get("stream"):
            return await self._stream(request, shape, limits, fault)
        answers = []
        for prompt in seen.prompts:
            for _ in range(body.get("n") or 1):
                made = list(steps(prompt, limits))
                text = "".join(each.text for each in made)
                tokens = [token for each in made for token in each.tokens]
                answers.append((tokens, made[-1]._replace(text=text)))
        seen.num_tokens = sum(len(tokens) for tokens, _ in answers)
        if fault is not None and fault.after >= 0 and (told := await self._fail(request, fault)) is not None:
            return told
        echo = [decode(each) for each in seen.prompts] if body.get("echo") else None
        return web.json_response(shape.whole(seen.prompts, answers, echo, told_params))

    async def _stream(
        self, request: web.Request, shape: Shape, limits: Limits, fault: Fault | None
    ) -> web.StreamResponse:
        seen: Received = request[_SEEN]
        prompts, num_choices = seen.prompts, seen.body.get("n") or 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, prompt in enumerate(prompts):
            for index in range(number * num_choices, (number + 1) * num_choices):
                if fault is not None and fault.after == 0 and await self._cut(request, response, fault):
                    return response
                if (first := shape.first(index, prompt)) is not None:
                    await _send(response, first)
                ids, offset, is_first = 0, 0, True
                for step in _batched(steps(prompt, limits), self.tokens_per_chunk):
                    chunk = shape.chunk(index, step, prompt if is_first else None, offset)
                    ids, is_first = ids + len(step.tokens), False
                    offset += sum(len(decode([each])) for each in step.tokens)
                    if "continuous_usage" in shape.wants:
                        chunk["usage"] = (shape.last(len(prompt), ids) or {})["usage"]
                    await _send(response, chunk)
                    seen.num_tokens += len(step.tokens)
                    if (
                        fault is not None
                        and 0 < fault.after <= seen.num_tokens
                        and await self._cut(request, response, fault)
                    ):
                        return response
        if (last := shape.last(sum(map(len, prompts)), seen.num_tokens)) is not None:
            await _send(response, last)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _fail(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """A fault before the head. None: the answer comes all the same."""
        if fault.kind == "wait":
            await fault.until.wait()
            return None
        if fault.kind == "write":
            return None
        request[_SEEN].outcome = "fault"
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "status":
            if fault.body is not None:
                return web.Response(body=fault.body, status=fault.status)
            return _error(fault.status, "it is told to fail")
        if fault.kind == "garbage":
            return web.Response(body=b'{"choices": [', content_type="application/json")
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    async def _cut(self, request: web.Request, response: web.StreamResponse, fault: Fault) -> bool:
        """A fault inside a stream. False: it goes on."""
        if fault.kind == "wait":
            await fault.until.wait()
            return False
        if fault.kind == "write":
            if _WRITTEN not in request:
                request[_WRITTEN] = True
                await response.write(fault.body or b"")
            return False
        request[_SEEN].outcome = "fault"
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "error_event":
            error = {
                "error": {"message": "told to fail", "type": "InternalServerError", "code": fault.status}
            }
            await _send(response, error)
            await response.write(b"data: [DONE]\n\n")
        elif fault.kind == "garbage":
            await response.write(b'data: {"choices": [\n\n')
        if fault.kind != "drop":
            await response.write_eof()
            return True
        assert request.transport is not None
        request.transport.close()  # what is written already still arrives
        return True

    def _prompts(self, body: Mapping[str, Any], is_chat: bool) -> list[list[int]]:
        if is_chat:
            params = body.get("kv_transfer_params")
            if isinstance(params, dict) and params.get("prompt_token_ids"):
                return [list(params["prompt_token_ids"])]
            messages = body.get("messages")
            if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
                raise RefusalError("messages must be a list of messages")
            return [render(messages)]
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [encode(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise RefusalError("Either prompt or prompt_embeds must be provided and non-empty.")
        if all(isinstance(each, int) for each in prompt):
            return [list(prompt)]
        return [encode(each) if isinstance(each, str) else list(each) for each in prompt]

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = request[_SEEN].body
        fault = self.faults.next("/tokenize", body)
        if fault is not None and (told := await self._fail(request, fault)) is not None:
            return told
        ids = render(body["messages"]) if "messages" in body else encode(str(body.get("prompt")))
        return web.json_response({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"prompt": decode(request[_SEEN].body["tokens"])})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        data = [{"id": self._model, "object": "model", "max_model_len": self._max_model_len}]
        data += [
            {"id": name, "object": "model", "root": path, "parent": self._model}
            for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": data}, headers={"X-Engine": self.name})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.num_looks += 1
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        labels = f'engine="0",model_name="{self._model}",reason="unknown_peer"'
        count = float(self.handoffs.num_unknown)
        name = "vllm:cpu_offload_unused_hand_offs_total"
        return web.Response(text=f"# TYPE {name} counter\n{name}{{{labels}}} {count}\n")

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"embedding": [0.0, 1.0], "index": 0}]})

    async def _echo_body(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"engine": self.name, "body": request[_SEEN].body})


def _batched(made: Iterator[Step], size: int) -> Iterator[Step]:
    """Steps of ``size`` tokens in one, as when a client is slow."""
    batch: list[Step] = []
    for step in made:
        batch.append(step)
        if len(batch) == size or step.finish_reason is not None:
            tokens = [token for each in batch for token in each.tokens]
            yield step._replace(tokens=tokens, text="".join(each.text for each in batch))
            batch = []


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await asyncio.sleep(0)


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}.get(
        status, "InternalServerError"
    )
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
