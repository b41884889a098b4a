"""Answers that are none, or not whole: they are not passed on as if they were."""

import json
from typing import Any

import pytest

from offload.proxy.policies import Fleet, Request, Route
from offload.testing.upstream import Fault, answer, decode, encode
from tests.offload.proxy.kit import on_a_loop, stand

PROMPT = "tell me w1"
TWO: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "stream": True, "n": 2, "ignore_eos": True}
"""A stream that no other engine can go on with."""
ONE = {**TWO, "n": 1}
TOLD = [
    {"choices": []},
    {"choices": [{"index": 0}]},
    {"choices": [{"index": 0, "text": "half", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "no", "finish_reason": "abort"}]},
    {"choices": [{"index": 0, "text": 5, "finish_reason": "stop"}]},
    {"choices": ["text"]},
    {"error": "none"},
    [],
    None,
]


@pytest.mark.parametrize("body", TOLD, ids=str)
@on_a_loop
async def test_a_whole_answer_that_is_none_comes_from_the_next_engine(body: Any) -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("status", status=200, body=json.dumps(body).encode())]
        told = await it.ask(prompt=PROMPT, max_tokens=6)
        assert told.status == 200
        assert told.text == decode([each for each in answer(encode(PROMPT), 6) if each])


@pytest.mark.parametrize(
    "odd", [{"stream": "yes"}, {"stream": 1}, {"n": "2"}, {"n": 2.0}, {"n": 0}, {"n": True}]
)
@on_a_loop
async def test_a_shape_that_is_not_clear_is_refused(odd: dict[str, Any]) -> None:
    """Engines would read true, or 2; the proxy would take their answers for failures."""
    async with stand(decode=1) as it:
        told = await it.ask(prompt=PROMPT, **odd)
        assert told.status == 400 and next(iter(odd)) in told.body["error"]["message"]
        assert not it.decode[0].of()


@pytest.mark.parametrize(
    "written",
    [
        b'data: {"choices": [\n\n',
        b"data: null\n\n",
        b"data: {\xff}\n\n",
        b"data: [DONE]\n\n",
        b'data: {"choices": [{"index": 2, "text": "x"}]}\n\n',
        b'data: {"choices": [{"index": 0}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "abort"}]}\n\n',
    ],
    ids=repr,
)
@on_a_loop
async def test_nonsense_inside_a_stream_ends_it_or_is_left_out(written: bytes) -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("write", after=2, body=written)]
        told = await it.ask(**TWO)
        assert told.error is not None and told.events[-1] == "[DONE]"
        assert len(told.chunks) == 2
        it.decode[0].faults.queue = [Fault("write", after=2, body=written)]
        told = await it.ask(**ONE)
        assert told.error is None and told.events[-1] == "[DONE]"
        assert told.text == decode(answer(encode(PROMPT), 6))


@pytest.mark.parametrize(
    "written", [b"data: {}\n\n", b"event: ping\n\n", b"neither\n\n", b'data: {"choices": []}\n\n']
)
@on_a_loop
async def test_what_says_nothing_is_not_passed_on(written: bytes) -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("write", after=2, body=written)]
        told = await it.ask(**ONE)
        assert told.text == decode(answer(encode(PROMPT), 6))
        assert all(each == "[DONE]" or each["choices"] for each in told.events)


@pytest.mark.parametrize("n", [1, 2])
@on_a_loop
async def test_an_end_before_the_usage_is_not_the_end(n: int) -> None:
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("write", after=6 * n, body=b"data: [DONE]\n\n")]
        told = await it.ask(**{**ONE, "n": n, "stream_options": {"include_usage": True}})
        if n == 1:
            assert told.error is None
            assert told.usage["completion_tokens"] == 6
        else:
            assert told.error is not None
        assert told.events.count("[DONE]") == 1


@on_a_loop
async def test_two_ends_are_one() -> None:
    async with stand(decode=1) as it:
        it.decode[0].faults.queue = [Fault("write", after=6, body=b"data: [DONE]\n\n")] * 2
        for n in (1, 2):
            told = await it.ask(**{**TWO, "n": n} if n == 2 else ONE)
            assert told.events.count("[DONE]") == 1 and told.events[-1] == "[DONE]"


class InOrder:
    """The first engine that has not failed."""

    def choose(self, request: Request, fleet: Fleet) -> Route:
        return Route(None, fleet.decode[0])


@on_a_loop
async def test_an_engine_that_refuses_the_rest_is_passed_over() -> None:
    async with stand(decode=3, policy=InOrder()) as it:
        it.decode[0].faults.queue = [Fault("drop", after=3)]
        it.decode[1].faults.queue = [Fault("status", status=400)]
        told = await it.ask(**ONE)
        assert told.error is None and told.text == decode(answer(encode(PROMPT), 6))
        assert [len(engine.of()) for engine in it.decode] == [1, 1, 1]


@pytest.mark.parametrize("token_ids", [None, [700]])
@on_a_loop
async def test_a_stop_token_beside_stop_strings_cannot_be_told_from_text(token_ids: list[int] | None) -> None:
    """An engine that goes on would have to show a stop string, and then shows a stop token, too."""
    async with stand(decode=2) as it:
        it.decode[0].faults.queue = [Fault("drop", after=3)]
        told = await it.ask(**ONE, stop=[" never"], stop_token_ids=token_ids)
        assert (told.error is None) is (token_ids is None)
