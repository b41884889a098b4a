"""An engine that computes nothing: the same answer to all, as fast as Python can write it.

    python -m benchmarks.proxy.canned --port PORT

A request for one token gets an answer with parameters of a hand-off, a stream gets ``CHUNKS`` events, a
question for health or models its answer, and one for ``/count`` how many requests for one token there were.
Beside it, a proxy's own work is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any

__all__ = ["CHUNKS", "Canned", "main"]

CHUNKS = 16
"""Events of a stream that have a token."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ONE_TOKEN = re.compile(rb'"max_(?:completion_)?tokens": ?1[,}]')
_STREAM = re.compile(rb'"stream": ?true')
_PARAMS = {
    "cpu_offload_from_v": 1,
    "cpu_offload_from_peer": "0123456789abcdef",
    "cpu_offload_from_epoch": "fedcba9876543210",
    "cpu_offload_from_tokens": 192,
    "cpu_offload_from_tip": "ab" * 32,
}


def _choice(token: int, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason}
    return {**choice, "stop_reason": None, "token_ids": [token], "prompt_token_ids": None}


def _body(kind: str, choice: dict[str, Any], **more: Any) -> bytes:
    told = {"id": "cmpl-1", "object": kind, "created": 1, "model": "model", "choices": [choice], **more}
    return json.dumps(told).encode()


def _response(content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_USAGE = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201}
_WHOLE = _response(
    "application/json",
    _body("text_completion", _choice(7, "length"), usage=_USAGE, kv_transfer_params=_PARAMS),
)
_MODELS = {"object": "list", "data": [{"id": "model", "object": "model", "max_model_len": 1 << 20}]}
_PLAIN = {
    b"/health": _response("text/plain", b""),
    b"/v1/models": _response("application/json", json.dumps(_MODELS).encode()),
}
_OTHER = _response("application/json", b"{}")
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENTS = [
    _chunk(
        b"data: " + _body("text_completion", _choice(at, "length" if at == CHUNKS - 1 else None)) + b"\n\n"
    )
    for at in range(CHUNKS)
]
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Canned(asyncio.Protocol):
    """One connection: requests one after the other, with a ``Content-Length``."""

    num_prefilled = 0
    """Requests for one token, over all connections."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            found = _LENGTH.search(head)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < whole:
                return
            body = bytes(self._data[end + 4 : whole])
            del self._data[:whole]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path == b"/count":
            self._transport.write(_response("application/json", b"%d" % Canned.num_prefilled))
        elif path != b"/v1/completions":
            self._transport.write(_PLAIN.get(path, _OTHER))
        elif not _STREAM.search(body) or _ONE_TOKEN.search(body):
            Canned.num_prefilled += 1
            self._transport.write(_WHOLE)
        else:
            task = asyncio.ensure_future(self._stream())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stream(self) -> None:
        """An event in each turn of the loop, so that they come apart."""
        self._transport.write(_HEAD)
        for event in _EVENTS:
            self._transport.write(event)
            await asyncio.sleep(0)
        self._transport.write(_END)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy.canned", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
