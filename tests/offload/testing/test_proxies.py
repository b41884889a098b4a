"""Proxies of others hand our parameters on: from prefill engines in memory to decode engines in memory."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from offload.testing.proxies import ROUTER_FOLDER, ProxyProcess, has_vllm_router, toy_like, vllm_router
from offload.testing.upstream import Upstream, answer, encode, render
from tests.offload.testing.test_upstream import events, on_a_loop

Start = Callable[[Sequence[str], Sequence[str]], ProxyProcess]

PROXIES = [
    pytest.param(
        vllm_router,
        id="vllm-router",
        marks=pytest.mark.skipif(not has_vllm_router(), reason=f"no vllm-router in {ROUTER_FOLDER.name}"),
    ),
    pytest.param(toy_like, id="like the toy proxy"),
]
WORDS = " w1 w2 w3" * 20
PROMPT = encode(WORDS)
MESSAGES = [{"role": "user", "content": WORDS}]
REQUESTS = [
    pytest.param("/v1/completions", {"prompt": PROMPT}, PROMPT, id="completions"),
    pytest.param("/v1/chat/completions", {"messages": MESSAGES}, render(MESSAGES), id="chat"),
]


@pytest.mark.parametrize("start", PROXIES)
@pytest.mark.parametrize(("path", "asked", "prompt"), REQUESTS)
@on_a_loop
async def test_our_parameters_reach_the_decode_engine(
    start: Start, path: str, asked: dict[str, Any], prompt: list[int]
) -> None:
    """Two of each: whichever pair is taken, the decode engine fetches the prompt where it is."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        givers = [await enter(Upstream(f"p{i}", role="prefill")) for i in range(2)]
        takers = [await enter(Upstream(f"d{i}", role="decode", knows=givers)) for i in range(2)]
        proxy = await enter(start([each.url for each in givers], [each.url for each in takers]))
        client = await enter(aiohttp.ClientSession())
        whole = answer(prompt, 12)
        for is_stream in (False, True) * 2:
            body = {
                **asked,
                "model": "model",
                "max_tokens": 12,
                "return_token_ids": True,
                "stream": is_stream,
            }
            async with client.post(proxy.url + path, json=body) as response:
                assert response.status == 200
                if is_stream:
                    chunks = [event for event in await events(response) if event != "[DONE]"]
                    tokens = [one for each in chunks for one in each["choices"][0].get("token_ids") or []]
                else:
                    tokens = (await response.json(content_type=None))["choices"][0]["token_ids"]
            assert tokens == whole
        seen = [each for taker in takers for each in taker.of(path)]
        assert len(seen) == 4 == sum(len(giver.of(path)) for giver in givers)
        for each in seen:
            assert each.body["kv_transfer_params"]["cpu_offload_from_v"] == 1
            assert each.num_computed == len(prompt) % 16, "the rest was fetched"
