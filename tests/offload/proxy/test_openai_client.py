"""OpenAI's Python package, which knows nothing of us, asks the proxy."""

import asyncio

import openai
import pytest

from offload.testing.upstream import Fault, answer, decode, encode, render
from tests.offload.proxy.kit import PROMPT, Stand, on_a_loop, stand, until

MESSAGES = [{"role": "user", "content": PROMPT}]
LENGTH = 20


def client_of(it: Stand) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="of-the-client", max_retries=0)


def expected(ids: list[int]) -> str:
    """What vLLM says: no text for a character that is not whole."""
    return decode([each for each in answer(ids, LENGTH) if each]).rstrip("\ufffd")


async def chat(client: openai.AsyncOpenAI, is_stream: bool) -> str:
    """The text of an answer to ``MESSAGES``."""
    create = client.chat.completions.create
    if not is_stream:
        told = await create(model="model", messages=MESSAGES, max_tokens=LENGTH)  # type: ignore[arg-type]
        return str(told.choices[0].message.content)
    text = ""
    stream = await create(model="model", messages=MESSAGES, max_tokens=LENGTH, stream=True)  # type: ignore[call-overload]
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    return text


async def completion(client: openai.AsyncOpenAI, is_stream: bool) -> str:
    """The text of an answer to ``PROMPT``."""
    create = client.completions.create
    if not is_stream:
        told = await create(model="model", prompt=PROMPT, max_tokens=LENGTH)
        return str(told.choices[0].text)
    text = ""
    async for chunk in await create(model="model", prompt=PROMPT, max_tokens=LENGTH, stream=True):
        text += chunk.choices[0].text
    return text


@pytest.mark.parametrize("is_stream", [False, True])
@on_a_loop
async def test_it_gets_whole_answers(is_stream: bool) -> None:
    async with stand(prefill=1, decode=2) as it, client_of(it) as client:
        for _ in range(2):
            assert await chat(client, is_stream) == expected(render(MESSAGES))
            assert await completion(client, is_stream) == expected(encode(PROMPT))
        seen = [each for engine in it.decode for each in engine.received if "completions" in each.path]
        assert len(seen) == 4 and all(each.num_computed < 16 for each in seen), "all were handed over"
        assert {each.headers["Authorization"] for each in seen} == {"Bearer of-the-client"}


@on_a_loop
async def test_it_does_not_notice_that_an_engine_dies_in_the_middle() -> None:
    async with stand(decode=2) as it, client_of(it) as client:
        it.decode[0].faults.queue = [Fault("drop", after=7)]
        assert await chat(client, True) == expected(render(MESSAGES))
        await until(lambda: it.count("continuations", outcome="whole") == 1)


@on_a_loop
async def test_an_answer_that_cannot_go_on_raises_there() -> None:
    async with stand(decode=2) as it, client_of(it) as client:
        it.decode[0].faults.queue = [Fault("drop", after=7)]
        stream = await client.completions.create(
            model="model", prompt=PROMPT, max_tokens=LENGTH, stream=True, seed=1
        )
        with pytest.raises(openai.APIError, match="cannot go on elsewhere: seed"):
            async for _ in stream:
                pass


@on_a_loop
async def test_errors_are_of_its_own_classes() -> None:
    async with stand(decode=1) as it, client_of(it) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="model", prompt="x", max_tokens=0)
        await it.decode[0].kill()
        with pytest.raises(openai.InternalServerError, match="no decode engine lives"):
            await client.completions.create(model="model", prompt="x")


@on_a_loop
async def test_it_lists_models_and_asks_for_embeddings() -> None:
    async with stand(decode=1) as it, client_of(it) as client:
        assert [each.id async for each in client.models.list()] == ["model"]
        told = await client.embeddings.create(model="model", input="x", encoding_format="float")
        assert told.data[0].embedding == [0.0, 1.0]


@on_a_loop
async def test_many_at_once_get_each_their_own() -> None:
    async with stand(prefill=2, decode=3) as it, client_of(it) as client:

        async def ask(number: int) -> bool:
            prompt = f"{PROMPT} {number}"
            told = await client.completions.create(model="model", prompt=prompt, max_tokens=LENGTH)
            return told.choices[0].text == expected(encode(prompt))

        assert all(await asyncio.gather(*(ask(number) for number in range(40))))
