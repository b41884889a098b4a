"""Prefill leg, decode leg, and what goes from one to the other."""

import asyncio
from typing import Any

import aiohttp
import pytest

from offload.proxy.metrics import MOST_REASONS, ProxyMetrics
from offload.testing.upstream import Fault, Upstream, answer, decode, encode, render
from tests.offload.proxy.kit import PROMPT, on_a_loop, stand, until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]
REFUSAL = "lease_share"
"""What an engine in memory says when it refuses."""


def expected(prompt: list[int], num_tokens: int) -> str:
    """The text of an answer; a character that is not finished has none."""
    return decode(answer(prompt, num_tokens)).rstrip("�")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@on_a_loop
async def test_a_request_is_prefilled_on_one_and_decoded_on_another(is_stream: bool, is_chat: bool) -> None:
    async with stand(prefill=1, decode=1) as it:
        path = CHAT if is_chat else "/v1/completions"
        asked: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
        told = await it.ask(path, **asked, max_tokens=12, stream=is_stream)
        ids = render(MESSAGES) if is_chat else encode(PROMPT)
        assert told.status == 200 and told.text == expected(ids, 12)
        (first,), (second,) = it.prefill[0].of(path), it.decode[0].of(path)
        assert first.num_computed == len(ids)
        assert second.num_computed == len(ids) % 16  # the rest came from the prefill engine
        assert first.body["max_tokens"] == 1 and first.body["stream"] is False
        assert first.body["kv_transfer_params"] == {"do_remote_decode": True}
        assert second.body["kv_transfer_params"]["cpu_offload_from_peer"] == it.prefill[0].handoffs.peer
        assert it.count("legs", role="prefill", outcome="done") == 1
        assert it.count("requests", path=path, outcome="answered") == 1


@on_a_loop
async def test_both_legs_begin_at_once_when_the_prefill_engine_is_known() -> None:
    async with stand(prefill=1, decode=1) as it:
        await it.ask(prompt=PROMPT, max_tokens=1)
        assert "cpu_offload_from_tip" in it.decode[0].of()[0].body["kv_transfer_params"]
        gate = asyncio.Event()
        it.prefill[0].faults.queue = [Fault("wait", until=gate)]
        asked = asyncio.create_task(it.ask(prompt=PROMPT + " w1", max_tokens=5, stream=True))
        await until(lambda: len(it.decode[0].of()) == 2)
        gate.set()
        told = await asked
        ids = encode(PROMPT + " w1")
        assert told.text == expected(ids, 5)
        second = it.decode[0].of()[1]
        peer = it.prefill[0].handoffs
        assert second.body["kv_transfer_params"] == {
            "cpu_offload_from_v": 1,
            "cpu_offload_from_peer": peer.peer,
            "cpu_offload_from_epoch": peer.epoch,
        }
        assert second.num_computed == len(ids) % 16


@on_a_loop
async def test_sequential_means_one_after_the_other() -> None:
    async with stand(prefill=1, decode=1, is_sequential=True) as it:
        for number in range(3):
            await it.ask(prompt=PROMPT + f" w{number}", max_tokens=1)
        assert all("cpu_offload_from_tip" in each.body["kv_transfer_params"] for each in it.decode[0].of())


@pytest.mark.parametrize("kind", ["status", "drop", "garbage"])
@on_a_loop
async def test_a_prefill_leg_that_fails_leaves_the_decode_leg_alone(kind: Any) -> None:
    async with stand(prefill=1, decode=1) as it:
        it.prefill[0].faults.always = Fault(kind)
        for is_stream in (False, True):
            told = await it.ask(prompt=PROMPT, max_tokens=8, stream=is_stream)
            assert told.text == expected(encode(PROMPT), 8)
        assert it.decode[0].of()[0].num_computed == len(encode(PROMPT))
        assert it.count("legs", role="prefill", outcome="failed") == 2


@on_a_loop
async def test_a_prefill_leg_that_is_late_is_not_waited_for() -> None:
    async with stand(prefill=1, decode=1, prefill_seconds=0.05) as it:
        it.prefill[0].faults.queue = [Fault("hang")]
        told = await it.ask(prompt=PROMPT, max_tokens=8)
        assert told.text == expected(encode(PROMPT), 8)
        await until(lambda: it.prefill[0].of()[0].has_left)


@on_a_loop
async def test_a_known_prefill_engine_that_hangs_holds_nobody() -> None:
    async with stand(prefill=1, decode=[Upstream("d0", role="decode", patience=0.0)]) as it:
        await it.ask(prompt=PROMPT, max_tokens=1)
        it.prefill[0].faults.queue = [Fault("hang")]
        told = await it.ask(prompt=PROMPT, max_tokens=8, stream=True)
        assert told.text == expected(encode(PROMPT), 8)
        await until(lambda: it.prefill[0].of()[1].has_left)
        assert it.count("legs", role="prefill", outcome="cancelled") == 1


@on_a_loop
async def test_what_a_client_did_wrong_the_decode_engine_says() -> None:
    async with stand(prefill=1, decode=1) as it:
        told = await it.ask(prompt=PROMPT, max_tokens=1, model="other")
        assert told.status == 404 and "does not exist" in told.body["error"]["message"]
        # Only the prefill leg finds fault with this one: nobody hears of it.
        it.prefill[0].faults.queue = [Fault("status", status=400)]
        told = await it.ask(prompt=PROMPT, max_tokens=4)
        assert told.status == 200 and told.text == expected(encode(PROMPT), 4)


@on_a_loop
async def test_a_prefill_leg_asks_for_nothing_but_the_prompt() -> None:
    async with stand(prefill=1, decode=1) as it:
        asked = {
            "messages": MESSAGES,
            "max_completion_tokens": 20,
            "max_tokens": 30,
            "min_tokens": 5,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "response_format": {"type": "json_object"},
            "best_of": 2,
            "cache_salt": "s",
            "temperature": 0.5,
        }
        told = await it.ask(CHAT, **asked)
        assert told.status == 200
        (first,) = it.prefill[0].of(CHAT)
        assert first.outcome == "done"
        kept = ("messages", "tools", "cache_salt", "temperature")
        assert first.body == {each: asked[each] for each in kept} | {
            "max_completion_tokens": 1,
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        (second,) = it.decode[0].of(CHAT)
        assert {key: value for key, value in second.body.items() if key != "kv_transfer_params"} == asked


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "short"}, "short"),
        ({"prompt": PROMPT, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": PROMPT, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
@on_a_loop
async def test_some_requests_have_no_prefill_leg(body: dict[str, Any], reason: str) -> None:
    async with stand(prefill=1, decode=1) as it:
        told = await it.ask(**body, max_tokens=4)
        assert told.status == 200
        assert not it.prefill[0].of() and len(it.decode[0].of()) == 1
        assert it.count("decoded_alone", reason=reason) == 1


@on_a_loop
async def test_a_prompt_that_the_decode_engine_has_is_not_prefilled_again() -> None:
    async with stand(prefill=1, decode=1, history_tokens=1 << 20) as it:
        ids = encode(PROMPT) * 3
        for _ in range(2):
            assert (await it.ask(prompt=ids, max_tokens=2)).status == 200
        assert len(it.prefill[0].of()) == 1
        assert it.count("decoded_alone", reason="cached") == 1


@on_a_loop
async def test_several_prompts_share_a_reference_without_a_length() -> None:
    async with stand(prefill=1, decode=1) as it:
        told = await it.ask(prompt=[PROMPT, PROMPT + " w1"], max_tokens=2)
        assert len(told.body["choices"]) == 2
        assert set(it.decode[0].of()[0].body["kv_transfer_params"]) == {
            "cpu_offload_from_v",
            "cpu_offload_from_peer",
            "cpu_offload_from_epoch",
        }


@on_a_loop
async def test_a_hand_off_that_is_refused_is_not_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted by the reason that the engine gave, and one line of the log says so."""
    async with stand(
        prefill=[Upstream("p", role="prefill", num_refused=1)], decode=1, is_sequential=True
    ) as it:
        await it.ask(prompt=PROMPT, max_tokens=2)
        assert "kv_transfer_params" not in it.decode[0].of()[0].body
        assert it.count("legs", role="prefill", outcome="no reference") == 1
        assert it.count("refused_hand_offs", reason=REFUSAL) == 1
        [said] = [each.getMessage() for each in caplog.records if REFUSAL in each.getMessage()]
        assert it.prefill[0].url in said


def test_reasons_of_engines_become_a_bounded_number_of_labels() -> None:
    metrics = ProxyMetrics()
    told = [metrics.refused_for(f"reason {number % 100}") for number in range(200)]
    assert set(told) == {f"reason {number}" for number in range(MOST_REASONS)} | {"other"}
    assert told.count("other") == 2 * (100 - MOST_REASONS)


@on_a_loop
async def test_what_clients_may_not_say_is_left_out_and_hints_are_kept() -> None:
    async with stand(prefill=1, decode=1) as it:
        hints = {"cpu_offload_priority": "high", "max_load_tokens": 512}
        hostile = {
            "cpu_offload_from_peer": "0" * 16,
            "do_remote_prefill": True,
            "do_remote_decode": True,
            "remote_host": "10.0.0.1",
            "remote_block_ids": [1, 2],
        }
        told = await it.ask(
            prompt=PROMPT,
            max_tokens=2,
            kv_transfer_params=hints | hostile,
            ec_transfer_params={"x": 1},
            vllm_xargs={"cpu_offload_store": 0, "remote_port": 5, "cpu_offload_from_v": 1, "mine": "x"},
        )
        assert told.status == 200
        first, second = it.prefill[0].of()[0].body, it.decode[0].of()[0].body
        assert first["kv_transfer_params"] == hints | {"do_remote_decode": True}
        kept = second["kv_transfer_params"]
        assert {key: kept[key] for key in hints} == hints
        assert not set(kept) & {"do_remote_prefill", "do_remote_decode", "remote_host", "remote_block_ids"}
        assert kept["cpu_offload_from_peer"] == it.prefill[0].handoffs.peer
        assert second["vllm_xargs"] == {"cpu_offload_store": 0, "mine": "x"}
        assert "ec_transfer_params" not in second
        assert it.count("stripped_keys") == 8


@on_a_loop
async def test_both_legs_have_the_clients_authorization() -> None:
    engines = [Upstream("p", role="prefill", key="k")], [Upstream("d", role="decode", key="k")]
    async with stand(prefill=engines[0], decode=engines[1]) as it:
        assert (await it.ask(prompt=PROMPT, max_tokens=2)).status == 401
        headers = {"Authorization": "Bearer k", "X-Request-Id": "r1"}
        assert (await it.ask(prompt=PROMPT, max_tokens=2, headers=headers)).status == 200
        for engine in (*it.prefill, *it.decode):
            assert engine.of()[-1].headers["X-Request-Id"] == "r1"


@on_a_loop
async def test_both_legs_have_one_id_though_the_client_gives_none() -> None:
    async with stand(prefill=1, decode=1) as it:
        for _ in range(2):
            await it.ask(prompt=PROMPT, max_tokens=2)
        legs = [
            [each.headers["X-Request-Id"] for each in engine.of()] for engine in (*it.prefill, *it.decode)
        ]
        assert legs[0] == legs[1] and len(set(legs[0])) == 2
        await it.ask(prompt=PROMPT, max_tokens=2, request_id="r2")
        assert "X-Request-Id" not in it.decode[0].of()[-1].headers, "its body has one"


@on_a_loop
async def test_a_report_is_asked_of_the_engine_that_decodes_alone() -> None:
    async with stand(prefill=1, decode=1) as it:
        await it.ask(prompt=PROMPT, max_tokens=2, kv_transfer_params={"cpu_offload_report": True})
        first, second = it.prefill[0].of()[0].body, it.decode[0].of()[0].body
        assert first["kv_transfer_params"] == {"do_remote_decode": True}
        assert second["kv_transfer_params"]["cpu_offload_report"] is True


@pytest.mark.parametrize("is_stream", [False, True])
@on_a_loop
async def test_a_client_that_goes_away_ends_both_legs(is_stream: bool) -> None:
    async with stand(prefill=1, decode=[Upstream("d0", role="decode", patience=0.0)]) as it:
        await it.ask(prompt=PROMPT, max_tokens=1)
        it.prefill[0].faults.queue = [Fault("hang")]
        it.decode[0].faults.queue = [Fault("hang")]
        body = {"prompt": PROMPT, "stream": is_stream}
        async with aiohttp.ClientSession() as client:
            asked = asyncio.create_task(client.post(f"{it.url}/v1/completions", json=body))
            await until(lambda: len(it.prefill[0].of()) == 2 and len(it.decode[0].of()) == 2)
            asked.cancel()
        await until(lambda: it.prefill[0].of()[1].has_left and it.decode[0].of()[1].has_left)
        await until(lambda: it.count("requests", path="/v1/completions", outcome="cancelled") == 1)


@on_a_loop
async def test_a_fleet_of_both_alone_is_served() -> None:
    async with stand(decode=2, both=True) as it:
        for _ in range(4):
            assert (await it.ask(prompt=PROMPT, max_tokens=4)).text == expected(encode(PROMPT), 4)
        assert [len(each.of()) for each in it.decode] == [2, 2]
        assert all("kv_transfer_params" not in each.body for engine in it.decode for each in engine.of())
