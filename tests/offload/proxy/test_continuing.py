"""An engine dies in a stream: the rest comes from another one, no token twice and none missing."""

import random
from typing import Any

import pytest

from offload.testing.upstream import Fault, Upstream, answer, decode, encode, render
from tests.offload.proxy.kit import PROMPT, Told, on_a_loop, stand
from tests.offload.proxy.test_legs import CHAT, MESSAGES

KINDS = ("drop", "end", "garbage", "error_event")


def shown(told: Told) -> list[Any]:
    """What a client makes of a stream, however it is cut into chunks."""
    choices = [each["choices"][0] for each in told.chunks]
    logprobs = [each["logprobs"] for each in choices if each.get("logprobs")]
    joined: dict[str, list[Any]] = {}
    for each in logprobs:
        for key, value in each.items():
            joined.setdefault(key, []).extend(value)
    names = {(each["id"], each["model"], each["created"]) for each in told.events if isinstance(each, dict)}
    ids = [token for each in choices for token in each.get("token_ids") or ()]
    prompts = [ids for each in (*told.chunks, *choices) if (ids := each.get("prompt_token_ids"))]
    roles = [each["delta"]["role"] for each in choices if "role" in each.get("delta", {})]
    usages = [each["usage"] for each in told.events if isinstance(each, dict) and each.get("usage")]
    return [told.text, told.finish, joined, len(names), ids, prompts, roles, usages[-1:], told.events[-1]]


async def both_ways(
    path: str, body: dict[str, Any], cuts: list[int], kind: Any, per_chunk: int
) -> tuple[Told, Told, list[Upstream]]:
    """A stream in one piece, and the same one cut after so many tokens of each engine."""
    engines = [Upstream(f"d{number}", tokens_per_chunk=per_chunk) for number in range(len(cuts) + 1)]
    async with stand(decode=engines) as it:
        whole = await it.ask(path, **body, stream=True)
        for each in engines:
            each.received.clear()
        first = 1  # round robin: the engine after the one that answered
        for number, cut in enumerate(cuts):
            engines[(first + number) % len(engines)].faults.queue = [Fault(kind, after=cut)]
        told = await it.ask(path, **body, stream=True)
        return whole, told, engines


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_a_loop
async def test_the_client_sees_no_difference(kind: str, is_chat: bool) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    asked |= {"max_tokens": 40, "ignore_eos": True, "stream_options": {"include_usage": True}}
    path = CHAT if is_chat else "/v1/completions"
    whole, told, engines = await both_ways(path, asked, [7], kind, 1)
    assert shown(told) == shown(whole)
    first, second = engines[1].of(path)[0], engines[0].of(path)[0]
    prompt = render(MESSAGES) if is_chat else encode(PROMPT)
    said = answer(prompt, 40)[: len(second.prompts[0]) - len(prompt)]
    assert first.prompts == [prompt]
    assert second.prompts == [prompt + said]
    assert 5 <= len(said) <= 7  # an unfinished character is said again
    assert second.body["max_tokens"] == 40 - len(said)


@pytest.mark.parametrize("seed", range(60))
@on_a_loop
async def test_random_streams_cut_anywhere(seed: int) -> None:
    drawn = random.Random(seed)
    is_chat = drawn.random() < 0.5
    text = "story " + "".join(f" w{drawn.randrange(512)}" for _ in range(drawn.randrange(1, 20)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    prompt = render(body["messages"]) if is_chat else encode(text)
    body["max_tokens"] = limit = drawn.randrange(4, 60)
    said = answer(prompt, limit)
    if drawn.random() < 0.5:
        body["min_tokens"] = drawn.randrange(limit)
    if drawn.random() < 0.4:
        body["ignore_eos"] = True
    if drawn.random() < 0.6:
        whole_text = decode(said)
        at = drawn.randrange(max(1, len(whole_text)))
        stop = whole_text[at : at + drawn.randrange(1, 12)].replace("�", "") or "w"
        body["stop"] = drawn.choice([stop, [stop], [stop, "nowhere to be found", "w9"]])
        body["include_stop_str_in_output"] = drawn.random() < 0.4
    if drawn.random() < 0.3:
        body["logprobs"] = True if is_chat else 1
    if drawn.random() < 0.3:
        body["return_token_ids"] = True
    if drawn.random() < 0.7:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": drawn.random() < 0.5}
    cuts = [drawn.randrange(1, max(2, len(said))) for _ in range(drawn.randrange(1, 4))]
    path = CHAT if is_chat else "/v1/completions"
    # Of a chunk of several tokens nobody here knows which one completes a stop string that began before.
    per_chunk = 1 if "stop" in body else drawn.choice([1, 1, 2, 5])
    whole, told, _ = await both_ways(path, body, cuts, drawn.choice(KINDS), per_chunk)
    if told.error is not None:  # only where a character is cut that the client knows a token of
        assert per_chunk > 1 and (body.get("logprobs") or body.get("return_token_ids"))
        assert whole.text.startswith(told.text)
        return
    assert shown(told) == shown(whole), (body, cuts)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"seed": 0},
        {"structured_outputs": {"choice": ["a"]}},
        {"response_format": {"type": "json_object"}},
        {"echo": True},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"bad_words": ["x"]},
        {"vllm_xargs": {"mine": 1}},
        {"thinking_token_budget": 5},
        {"prompt": [PROMPT, PROMPT]},
        {"tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
    ids=lambda each: next(iter(each)),
)
@on_a_loop
async def test_what_cannot_go_on_ends_with_an_error(extra: dict[str, Any]) -> None:
    is_chat = "tools" in extra or "messages" in extra
    asked = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("drop", after=6)]
        path = CHAT if is_chat else "/v1/completions"
        told = await it.ask(path, **(asked | extra), max_tokens=20, ignore_eos=True, stream=True)
        assert told.status == 200 and not told.is_broken
        assert told.error["code"] == 502 and "cannot go on elsewhere" in told.error["message"]
        assert told.events[-1] == "[DONE]" and told.events[-2] == {"error": told.error}
        assert not it.decode[1].of(path)
        assert "return_token_ids" not in it.decode[0].of(path)[0].body
        assert it.count("continuations", outcome="broken off") == 1


@pytest.mark.parametrize("extra", [{"n": 2}, {"seed": 0}, {"tools": [{"type": "function"}]}], ids=str)
@on_a_loop
async def test_what_cannot_go_on_may_begin_elsewhere(extra: dict[str, Any]) -> None:
    """As long as the client has heard nothing but the role."""
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("drop", after=0)]
        told = await it.ask(CHAT, messages=MESSAGES, **extra, max_tokens=5, stream=True, ignore_eos=True)
        assert told.error is None and told.events[-1] == "[DONE]"
        assert len(told.chunks) == 6 * extra.get("n", 1)


@on_a_loop
async def test_no_other_engine_is_left() -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("drop", after=6)]
        await it.decode[1].kill()
        told = await it.ask(prompt=PROMPT, max_tokens=20, ignore_eos=True, stream=True)
        assert "no other decode engine lives" in told.error["message"]


@on_a_loop
async def test_an_end_that_the_engine_does_not_see_to_is_made_here() -> None:
    """It dies after the last token and before usage and the end: nobody is asked again."""
    async with stand(decode=2) as it:
        whole = await it.ask(prompt=PROMPT, max_tokens=9, stream=True, stream_options={"include_usage": True})
        it.decode[1].faults.queue = [Fault("drop", after=9)]
        told = await it.ask(prompt=PROMPT, max_tokens=9, stream=True, stream_options={"include_usage": True})
        assert shown(told) == shown(whole)
        assert len(it.decode[0].of()) == 1


@on_a_loop
async def test_an_engine_that_does_not_take_the_answer_so_far_is_not_believed() -> None:
    """One that begins anew would tell the client the same twice."""

    class Forgetful(Upstream):
        def _prompts(self, body: Any, is_chat: bool) -> list[list[int]]:
            return [render(body["messages"])]

    async with stand(decode=[Upstream("d0"), Forgetful("d1")]) as it:
        it.decode[0].faults.queue = [Fault("drop", after=6)]
        told = await it.ask(CHAT, messages=MESSAGES, max_tokens=20, ignore_eos=True, stream=True)
        assert "does not take the answer so far" in told.error["message"]
        assert decode(answer(render(MESSAGES), 20)).startswith(told.text)


@on_a_loop
async def test_an_engine_that_finds_fault_in_a_stream_is_believed() -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("error_event", after=6, status=400)]
        told = await it.ask(prompt=PROMPT, max_tokens=20, ignore_eos=True, stream=True)
        assert told.error["code"] == 400 and told.events[-1] == "[DONE]"
        assert not it.decode[1].of()


@on_a_loop
async def test_token_ids_are_asked_for_and_not_shown() -> None:
    async with stand() as it:
        for path, asked in (("/v1/completions", {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
            told = await it.ask(path, **asked, max_tokens=5, stream=True)
            assert it.decode[0].of(path)[0].body["return_token_ids"] is True
            choices = [each["choices"][0] for each in told.chunks]
            assert not any(each.get("token_ids") for each in choices)
            assert not any(each.get("prompt_token_ids") for each in (*choices, *told.chunks))
            told = await it.ask(path, **asked, max_tokens=5, stream=True, return_token_ids=True)
            assert any(each["choices"][0].get("token_ids") for each in told.chunks)


class Thinking(Upstream):
    """Its first ``num_thoughts`` tokens come as ``reasoning``, as behind a parser."""

    num_thoughts = 7

    async def _stream(self, request: Any, shape: Any, limits: Any, fault: Any) -> Any:
        made = shape.chunk

        def chunk(index: int, step: Any, prompt: Any, offset: int) -> Any:
            told = made(index, step, prompt, offset)
            if self.of(CHAT)[-1].num_tokens < self.num_thoughts:
                told["choices"][0]["delta"] = {"reasoning": step.text}
            return told

        return await super()._stream(request, _Shape(shape, chunk), limits, fault)


class _Shape:
    def __init__(self, shape: Any, chunk: Any) -> None:
        self._shape = shape
        self.chunk = chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shape, name)


@pytest.mark.parametrize(("after", "goes_on"), [(7, False), (15, True)])
@on_a_loop
async def test_a_reasoning_part_ends_where_it_began_and_what_follows_goes_on(
    after: int, goes_on: bool
) -> None:
    async with stand(decode=[Thinking("d0"), Upstream("d1")]) as it:
        it.decode[0].faults.queue = [Fault("drop", after=after)]
        told = await it.ask(CHAT, messages=MESSAGES, max_tokens=20, ignore_eos=True, stream=True)
        parts = [each["choices"][0]["delta"].get("reasoning") for each in told.chunks]
        thoughts = "".join(filter(None, parts))
        assert len(list(filter(None, parts))) > 1  # as they come
        said = decode(answer(render(MESSAGES), 20)).rstrip("�")
        if goes_on:
            assert told.error is None and thoughts + told.text == said
        else:
            assert "a parser is at work" in told.error["message"]
            assert said.startswith(thoughts) and not it.decode[1].of(CHAT)


@on_a_loop
async def test_a_tool_call_ends_where_it_began() -> None:
    """Also if the request has no tools: a parser made it, and holds more of it."""

    class Calling(Upstream):
        async def _stream(self, request: Any, shape: Any, limits: Any, fault: Any) -> Any:
            made = shape.chunk

            def chunk(index: int, step: Any, prompt: Any, offset: int) -> Any:
                told = made(index, step, prompt, offset)
                if self.of(CHAT)[-1].num_tokens == 2:
                    told["choices"][0]["delta"] = {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}
                return told

            return await super()._stream(request, _Shape(shape, chunk), limits, fault)

    async with stand(decode=[Calling("d0"), Upstream("d1")]) as it:
        it.decode[0].faults.queue = [Fault("drop", after=9)]
        told = await it.ask(CHAT, messages=MESSAGES, max_tokens=20, ignore_eos=True, stream=True)
        assert "tool calls" in told.error["message"] and not it.decode[1].of(CHAT)
