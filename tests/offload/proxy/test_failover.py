"""A decode engine fails before the first byte: the next one answers. And what no engine is asked."""

import asyncio
from typing import Any

import pytest

from offload.testing.upstream import Fault, Upstream, encode, render
from tests.offload.proxy.kit import PROMPT, on_a_loop, stand, until
from tests.offload.proxy.test_legs import CHAT, MESSAGES, expected

FAULTS = [
    Fault("status", status=500),
    Fault("status", status=503),
    Fault("status", status=429),
    Fault("drop"),
    Fault("garbage"),
    Fault("status", status=200, body=b"[]"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: f"{each.kind}{each.status}")
@on_a_loop
async def test_the_next_engine_answers(fault: Fault, is_stream: bool) -> None:
    async with stand(decode=3) as it:
        it.decode[0].faults.always = it.decode[1].faults.always = fault
        told = await it.ask(prompt="hello", max_tokens=9, stream=is_stream)
        assert told.status == 200 and told.text == expected(encode("hello"), 9)
        assert it.count("failovers", stage="before the first byte") >= 1


@pytest.mark.parametrize("is_stream", [False, True])
@on_a_loop
async def test_an_engine_that_hangs_before_the_first_byte_is_left(is_stream: bool) -> None:
    async with stand(decode=2, first_byte_seconds=0.1, answer_seconds=0.1) as it:
        it.decode[0].faults.always = Fault("hang")
        told = await it.ask(prompt="hello", max_tokens=9, stream=is_stream)
        assert told.text == expected(encode("hello"), 9)
        await until(lambda: it.decode[0].of()[0].has_left)


@pytest.mark.parametrize("after", [0, 3])
@on_a_loop
async def test_an_engine_that_hangs_in_a_stream_is_left(after: int) -> None:
    async with stand(decode=2, first_byte_seconds=0.1, stall_seconds=0.1) as it:
        it.decode[0].faults.always = Fault("hang", after=after)
        told = await it.ask(CHAT, messages=MESSAGES, max_tokens=9, stream=True)
        assert told.text == expected(render(MESSAGES), 9)
        await until(lambda: it.decode[0].of(CHAT)[0].has_left)


@on_a_loop
async def test_an_answer_that_breaks_off_is_asked_for_again_as_a_whole() -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.always = Fault("drop", after=5)
        for extra in (
            {},
            {"n": 2},
            {"seed": 1},
            {"response_format": {"type": "json_object"}},
            {"echo": True},
        ):
            told = await it.ask(prompt="hello", max_tokens=9, **extra)
            assert told.status == 200 and len(told.body["choices"]) == extra.get("n", 1)
            assert told.text.endswith(expected(encode("hello"), 9))


@on_a_loop
async def test_there_is_an_answer_while_one_engine_lives() -> None:
    async with stand(decode=4, prefill=1) as it:
        for number in range(3):
            await it.decode[number].kill()
            for is_stream in (False, True):
                for _ in range(4):
                    told = await it.ask(prompt=PROMPT, max_tokens=5, stream=is_stream)
                    assert told.text == expected(encode(PROMPT), 5)
        await it.decode[3].kill()
        told = await it.ask(prompt=PROMPT, max_tokens=5)
        assert told.status == 503 and told.body["error"]["message"] == "no decode engine lives"
        await it.decode[2].start()  # its pause is not over, but there is no other
        assert (await it.ask(prompt=PROMPT, max_tokens=5)).status == 200


@on_a_loop
async def test_what_all_engines_say_the_client_is_told() -> None:
    async with stand(decode=2) as it:
        for engine in it.decode:
            engine.faults.always = Fault("status", status=500)
        told = await it.ask(prompt="hello")
        assert told.status == 500 and told.body["error"]["message"] == "it is told to fail"
        for engine in it.decode:
            engine.faults.always = Fault("garbage")
        told = await it.ask(prompt="hello")
        assert (
            told.status == 502 and told.body["error"]["message"] == "every decode engine failed this request"
        )


@on_a_loop
async def test_max_attempts_bounds_what_one_request_can_do() -> None:
    async with stand(decode=4, max_attempts=2) as it:
        for engine in it.decode:
            engine.faults.always = Fault("status", status=500)
        assert (await it.ask(prompt="hello")).status == 500
        assert sum(len(each.of()) for each in it.decode) == 2


@on_a_loop
async def test_what_is_wrong_with_the_request_is_said_once() -> None:
    async with stand(decode=2) as it:
        for body, status in (({"max_tokens": 0}, 400), ({"model": "x"}, 404), ({"min_tokens": 99}, 400)):
            told = await it.ask(prompt="hello", **body)
            assert told.status == status and told.body["error"]["code"] == status
        assert sum(len(each.of()) for each in it.decode) == 3
        assert not it.count("failovers", stage="before the first byte")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b'{"prompt": NaN}', 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b"", 400),
        (b'{"prompt": "' + b"x" * 3000 + b'"}', 413),
    ],
)
@on_a_loop
async def test_a_body_that_is_none_reaches_no_engine(raw: bytes, status: int) -> None:
    async with stand(max_body_bytes=2048) as it:
        url = f"{it.url}/v1/completions"
        raw = raw if len(raw) < 4000 else raw[:2000]
        async with it.client.post(url, data=raw, headers={"Content-Type": "application/json"}) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status
        assert not it.decode[0].of()


@on_a_loop
async def test_a_key_that_is_there_twice_is_what_was_checked() -> None:
    """What the proxy read last, every engine reads: nobody's own bytes are sent on."""
    async with stand() as it:
        allowed, hostile = b'{"cpu_offload_load": false}', b'{"remote_host": "h"}'
        raw = b'{"prompt": "x", "kv_transfer_params": %b, "kv_transfer_params": %b}' % (allowed, hostile)
        async with it.client.post(f"{it.url}/v1/completions", data=raw) as response:
            assert response.status == 200
        assert "kv_transfer_params" not in it.decode[0].of()[0].body


@on_a_loop
async def test_a_header_that_is_too_long_is_refused() -> None:
    async with stand(max_header_bytes=1024) as it:
        told = await it.ask(prompt="x", headers={"X-Long": "y" * 5000})
        assert told.status == 400
        assert not it.decode[0].of()


@on_a_loop
async def test_requests_beyond_the_limit_are_refused_at_once() -> None:
    async with stand(max_requests=2) as it:
        gate = asyncio.Event()
        it.decode[0].faults.always = Fault("wait", until=gate)
        first = [asyncio.create_task(it.ask(prompt="hello", max_tokens=1)) for _ in range(2)]
        await until(lambda: len(it.decode[0].of()) == 2)
        told = await it.ask(prompt="hello")
        assert told.status == 429 and "--max-requests" in told.body["error"]["message"]
        gate.set()
        assert [each.status for each in await asyncio.gather(*first)] == [200, 200]
        assert (await it.ask(prompt="hello")).status == 200


@on_a_loop
async def test_a_prompt_of_100_000_tokens_is_served() -> None:
    async with stand(prefill=1, decode=1) as it:
        ids = [256 + number % 512 for number in range(100_000)]
        told = await it.ask(prompt=ids, max_tokens=3, stream=True)
        assert told.text == expected(ids, 3)
        assert it.decode[0].of()[0].num_computed == 0


@on_a_loop
async def test_an_answer_beyond_the_limit_is_no_answer() -> None:
    async with stand(decode=2, max_answer_bytes=1 << 16) as it:
        it.decode[0].faults.always = Fault("status", status=200, body=b"x" * (1 << 17))
        assert (await it.ask(prompt="hello", max_tokens=2)).status == 200


@on_a_loop
async def test_a_connection_that_has_ended_is_not_an_engine_that_has() -> None:
    """uvicorn ends idle connections: a request that meets such an end is sent once more."""
    async with stand(decode=[Upstream("d0")]) as it:
        it.decode[0].faults.queue = [Fault("drop")]
        assert (await it.ask(prompt="hello", max_tokens=2)).status == 200
        assert len(it.decode[0].of()) == 2
        it.decode[0].faults.queue = [Fault("drop"), Fault("drop")]
        told: Any = await it.ask(prompt="hello", max_tokens=2)
        assert told.status == 502
