"""The engines in memory behave like vLLM's server where a proxy looks."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import aiohttp
import pytest

from offload.testing.upstream import EOS, Fault, Upstream, answer, decode, encode, render
from offload.testing.upstream.words import Detokenizer


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    lines = [line async for line in response.content if line.startswith(b"data: ")]
    return [json.loads(line[6:]) if line.strip() != b"data: [DONE]" else "[DONE]" for line in lines]


@pytest.mark.parametrize("text", ["", "plain", " w1 w511 w512 w07", "字 and w3字"])
def test_text_comes_back(text: str) -> None:
    assert decode(encode(text)) == text


def test_an_interrupted_answer_goes_on_the_same() -> None:
    prompt = encode("hello w1")
    whole = answer(prompt, 60)
    for cut in range(len(whole)):
        assert answer([*prompt, *whole[:cut]], 60 - cut) == whole[cut:] or whole[cut - 1] == EOS


def test_a_prompt_that_ends_inside_a_character_is_a_trap() -> None:
    """As measured with vLLM's detokenizer: the first text is all of the prompt's."""
    ids = encode("hello 字x")
    detokenizer = Detokenizer(ids[:-2])
    assert [detokenizer.step(each) for each in ids[-2:]] == ["hello 字", "x"]


@on_a_loop
async def test_a_stream_has_the_answer_and_its_end() -> None:
    async with Upstream("a") as engine, aiohttp.ClientSession() as client:
        body = {
            "prompt": "hello w1",
            "max_tokens": 40,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
        }
        async with client.post(f"{engine.url}/v1/completions", json=body) as response:
            got = await events(response)
    assert got[-1] == "[DONE]"
    tokens = [token for each in got[:-2] for token in each["choices"][0]["token_ids"]]
    assert len(tokens) == 40 == got[-2]["usage"]["completion_tokens"]
    text = "".join(each["choices"][0]["text"] for each in got[:-2])
    assert decode(tokens).rstrip("�").startswith(text)
    assert got[0]["choices"][0]["prompt_token_ids"] == encode("hello w1")


@on_a_loop
async def test_what_vllm_refuses_is_refused() -> None:
    async with Upstream("a") as engine, aiohttp.ClientSession() as client:
        for body, status in [
            ({"prompt": "x", "stream_options": {"include_usage": True}}, 400),
            ({"prompt": "x", "max_tokens": 1, "min_tokens": 2}, 400),
            ({"prompt": "x", "max_tokens": 0}, 400),
            ({"prompt": []}, 400),
            ({"prompt": "x", "model": "other"}, 404),
        ]:
            async with client.post(f"{engine.url}/v1/completions", json=body) as response:
                assert response.status == status, body
                assert (await response.json())["error"]["code"] == status


@on_a_loop
async def test_a_prompt_is_handed_over_by_reference() -> None:
    async with Upstream("p", role="prefill") as giver, Upstream("d", knows=[giver]) as taker:
        async with aiohttp.ClientSession() as client:
            body = {"messages": [{"role": "user", "content": " w1" * 40}], "max_tokens": 1}
            async with client.post(f"{giver.url}/v1/chat/completions", json=body) as response:
                params = (await response.json())["kv_transfer_params"]
            assert params["cpu_offload_from_peer"] == giver.handoffs.peer
            body = {**body, "kv_transfer_params": params}
            async with client.post(f"{taker.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
        num_prompt = len(render(body["messages"]))
        assert taker.received[-1].num_computed == num_prompt % 16 < num_prompt


@on_a_loop
async def test_faults_come_when_they_are_asked_for() -> None:
    async with Upstream("a") as engine, aiohttp.ClientSession() as client:
        engine.faults.queue = [Fault("status", status=503), Fault("drop"), Fault("drop", after=3)]
        body = {"prompt": "x", "max_tokens": 10, "stream": True, "ignore_eos": True}
        async with client.post(f"{engine.url}/v1/completions", json=body) as response:
            assert response.status == 503
        with pytest.raises(aiohttp.ClientError):
            await client.post(f"{engine.url}/v1/completions", json=body)
        async with client.post(f"{engine.url}/v1/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientError):
                await events(response)
        assert [each.outcome for each in engine.received] == ["fault"] * 3
        assert engine.received[-1].num_tokens == 3
        await engine.kill()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.post(f"{engine.url}/v1/completions", json=body)
        await engine.start()
        async with client.post(f"{engine.url}/v1/completions", json={**body, "stream": False}) as response:
            assert (await response.json())["choices"][0]["finish_reason"] == "length"


@on_a_loop
async def test_a_client_that_goes_away_is_noticed() -> None:
    async with Upstream("a") as engine:
        engine.faults.queue = [Fault("hang", after=2)]
        body = {"prompt": "x", "max_tokens": 10, "stream": True, "ignore_eos": True}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{engine.url}/v1/completions", json=body) as response,
        ):
            await response.content.readline()
        async with asyncio.timeout(30):
            while not engine.received[0].has_left:
                await asyncio.sleep(0)
        assert engine.received[0].num_tokens == 2
