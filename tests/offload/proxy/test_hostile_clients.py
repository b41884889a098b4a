"""Whatever clients send, they get an answer of their own making, and the proxy goes on.

A status of 500 is never ours: the engines in memory answer all that they can read.
"""

import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.testing.upstream import Upstream
from offload.testing.upstream.answers import Shape
from offload.testing.upstream.generation import Limits, RefusalError, Step, steps
from tests.offload.proxy.kit import on_a_loop, stand

PATHS = ("/v1/completions", "/v1/chat/completions")
KEYS = (
    *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"),
    *("min_tokens", "stop", "stop_token_ids", "seed", "logprobs", "echo", "tools", "response_format"),
    *("kv_transfer_params", "vllm_xargs", "cache_salt", "return_token_ids", "prompt_embeds", "priority"),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["model", "x" * 3000, "\ud800", "\0"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": values}),
    max_size=3,
)
ours = st.dictionaries(
    st.sampled_from(
        [
            *("do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "prompt_token_ids"),
            *("cpu_offload_from_v", "cpu_offload_from_peer", "cpu_offload_from_epoch"),
            *("cpu_offload_from_tokens", "cpu_offload_from_tip", "cpu_offload_priority"),
        ]
    ),
    values,
    max_size=4,
)
sound = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=50) | st.lists(st.integers(1, 700), min_size=1, max_size=50),
        "messages": messages,
        "max_tokens": st.integers(1, 5),
        "stream": st.booleans(),
        "kv_transfer_params": ours | values,
        "vllm_xargs": ours | values,
        "n": st.integers(1, 3),
    },
)
bodies = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda sound, odd: json.dumps(sound | odd).encode(errors="surrogatepass"),
        sound,
        st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    ),
    values.map(lambda value: json.dumps(value).encode(errors="surrogatepass")),
)


class Strict(Upstream):
    """An engine that answers 400 to whatever it cannot read, as vLLM does, and not 500."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            is_chat = "chat" in request.path
            for prompt in self._prompts(body, is_chat):
                list(steps(prompt, Limits.of({**body, "max_tokens": 2, "max_completion_tokens": None}, 2)))
            Limits.of(body, 20)
            shape = Shape.of("", "", is_chat, body)
            shape.whole([[1]], [([1], Step([1], "", "stop", None))], None, None)
            if body.get("n") not in (None, 1, 2, 3) or (body.get("max_tokens") or 1) > 1000:
                raise ValueError("too much")
        except RefusalError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise RefusalError(f"it cannot be read: {error!r}") from None
        return await super()._generate(request)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(st.tuples(st.sampled_from(PATHS), bodies), min_size=1, max_size=12))
def test_no_body_is_too_much(asked: list[tuple[str, bytes]]) -> None:
    @on_a_loop
    async def run() -> None:
        async with stand(prefill=[Strict("p", role="prefill")], decode=[Strict("d", role="decode")]) as it:

            async def ask(path: str, body: bytes) -> None:
                headers = {"Content-Type": "application/json"}
                async with it.client.post(it.url + path, data=body, headers=headers) as response:
                    raw = await response.read()
                    assert response.status in (200, 400, 404), (response.status, raw)
                    if response.status != 200:
                        assert json.loads(raw)["error"]["message"]

            await asyncio.gather(*(ask(path, body) for path, body in asked))
            assert (await it.ask(prompt="still there", max_tokens=2)).status == 200

    run()


@on_a_loop
async def test_requests_that_are_no_http_are_refused() -> None:
    async with stand(decode=1) as it:
        assert it.proxy.port is not None
        for raw in (
            b"\0\0\0\0\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
            b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.proxy.port)
            writer.write(raw)
            writer.write_eof()
            told = await reader.read()
            assert not told or (told.startswith(b"HTTP/1.") and b" 4" in told[:16]), told[:80]
            writer.close()
        assert (await it.ask(prompt="still there", max_tokens=2)).status == 200


@on_a_loop
async def test_a_client_that_never_sends_its_body_is_given_up() -> None:
    async with stand(decode=1, stall_seconds=0.2) as it:
        assert it.proxy.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", it.proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


@on_a_loop
async def test_a_body_in_pieces_and_one_that_waits_for_100_are_read() -> None:
    async with stand(decode=1) as it:
        whole = json.dumps({"prompt": "字", "max_tokens": 2}).encode()

        async def pieces() -> Any:
            for at in range(len(whole)):
                yield whole[at : at + 1]

        headers = {"Content-Type": "application/json"}
        for more in ({}, {"Expect": "100-continue"}):
            async with it.client.post(
                it.url + "/v1/completions", data=pieces(), headers=headers | more
            ) as response:
                assert response.status == 200


@on_a_loop
async def test_a_compressed_body_is_read_or_refused() -> None:
    import gzip

    async with stand(decode=1) as it:
        body = gzip.compress(json.dumps({"prompt": "x", "max_tokens": 2}).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with it.client.post(it.url + "/v1/completions", data=body, headers=headers) as response:
            assert response.status in (200, 400, 415)
        bomb = gzip.compress(b" " * (128 << 20))
        async with it.client.post(it.url + "/v1/completions", data=bomb, headers=headers) as response:
            assert response.status in (400, 413, 415)
        with_nothing = {"Content-Type": "application/json", "Content-Encoding": "zip"}
        try:
            async with it.client.post(
                it.url + "/v1/completions", data=b"x", headers=with_nothing
            ) as response:
                assert response.status in (400, 415)
        except aiohttp.ClientError:
            pass
