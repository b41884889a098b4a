"""A proxy that does what vLLM's toy proxy for NixlConnector does, and with the same libraries.

    python -m offload.testing.proxies.toy --port PORT --prefill URL... --decode URL...

Prefill and decode engines take turns, each on their own. The prefill leg has ``max_tokens`` 1, no stream, and
``kv_transfer_params`` with ``do_remote_decode``. What that answers there goes to the decode leg as it is, in
place of the client's. No limits of time, no retries: whatever fails is a 500. Written anew, not copied.
"""

import argparse
import itertools
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

__all__ = ["application", "main"]

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(prefill: list[str], decode: list[str]) -> FastAPI:
    """The proxy in front of engines at these URLs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        clients = [
            [httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls]
            for urls in (prefill, decode)
        ]
        app.state.prefill, app.state.decode = map(itertools.cycle, clients)
        yield
        for client in itertools.chain(*clients):
            await client.aclose()

    app = FastAPI(lifespan=lifespan)

    async def handle(path: str, request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        headers = {
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
            "X-Request-Id": str(uuid.uuid4()),
        }
        first = {**body, "kv_transfer_params": dict(_ASKED), "stream": False, "max_tokens": 1}
        for name in ("stream_options", "min_tokens", "min_completion_tokens"):
            first.pop(name, None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        answer = await next(app.state.prefill).post(path, json=first, headers=headers)
        answer.raise_for_status()
        if params := answer.json().get("kv_transfer_params"):
            body["kv_transfer_params"] = params
        decoder: httpx.AsyncClient = next(app.state.decode)

        async def chunks() -> AsyncIterator[bytes]:
            async with decoder.stream("POST", path, json=body, headers=headers) as response:
                response.raise_for_status()
                async for chunk in response.aiter_bytes():
                    yield chunk

        return StreamingResponse(chunks(), media_type="application/json")

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        return await handle("/v1/completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        return await handle("/v1/chat/completions", request)

    @app.get("/healthcheck")
    async def healthcheck() -> dict[str, Any]:
        return {"status": "ok", "prefill_instances": len(prefill), "decode_instances": len(decode)}

    return app


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m offload.testing.proxies.toy", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    options = parser.parse_args()
    uvicorn.run(
        application(options.prefill, options.decode),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
