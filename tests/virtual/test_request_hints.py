"""Where vLLM's requests carry hints: what its own entry points make of them, and what we read there."""

import logging
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from offload.scheduler import client_values
from offload.scheduler.hints import RequestHints
from offload.vllm.request_hints import hints_of
from tests.offload.counted import Counted
from tests.virtual.driver import Engines, depth_of, serve, step_until, tokens

POOL = {"gpu_blocks": 32, "cpu_slots": 64, "block_size": 4}
DOCUMENT = 10  # blocks


@pytest.fixture(autouse=True)
def _warnings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_values, "_warned", set())
    logging.disable(logging.NOTSET)


def envelope(*actions: tuple[str, dict[str, Any]]) -> KvHintsEnvelope:
    made = [KvHintAction(f"a{index}", kind, "1.0", payload) for index, (kind, payload) in enumerate(actions)]
    return KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=made)


def request_of(sampling: SamplingParams | None, kv_hints: Any = None) -> Request:
    return Request(
        "r",
        [1, 2, 3],
        sampling_params=sampling,
        pooling_params=None if sampling else PoolingParams(task="embed"),
        kv_hints=kv_hints,
    )


COMPLETION = {"model": "m", "prompt": [1, 2, 3]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(("kind", "body"), [(CompletionRequest, COMPLETION), (ChatCompletionRequest, CHAT)])
class TestHttp:
    """The bodies of vLLM's OpenAI entry points, parsed by vLLM."""

    def read(self, kind: Any, body: dict[str, Any], more: dict[str, Any]) -> tuple[RequestHints, Any]:
        parsed = kind.model_validate({**body, **more})
        sampling = parsed.to_sampling_params(5, {})
        return hints_of(request_of(sampling)), sampling.extra_args

    def test_xargs(self, kind: Any, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        """True and false arrive as 1 and 0."""
        said = {"cpu_offload_store": False, "cpu_offload_load": True, "cpu_offload_ttl_seconds": 5}
        hints, extra = self.read(kind, body, {"vllm_xargs": said})
        assert extra == {"cpu_offload_store": 0, "cpu_offload_load": 1, "cpu_offload_ttl_seconds": 5}
        assert [type(value) for value in extra.values()] == [int, int, int]
        assert hints == RequestHints(store=False, load=True, ttl_seconds=5)
        assert not caplog.records

    def test_params_win(self, kind: Any, body: dict[str, Any]) -> None:
        xargs = {"cpu_offload_priority": "high", "cpu_offload_pin_seconds": 1.5}
        params = {"cpu_offload_priority": "low", "cpu_offload_keep": True, "max_load_tokens": 7}
        hints, _ = self.read(kind, body, {"vllm_xargs": xargs, "kv_transfer_params": params})
        assert hints == RequestHints(priority="low", pin_seconds=1.5, max_load_tokens=7)

    def test_nothing_carries_kv_hints(self, kind: Any, body: dict[str, Any]) -> None:
        """When vLLM has a field for them, the README has to say so."""
        assert "kv_hints" not in kind.model_fields


class TestEnvelope:
    def test_it_survives_the_way_to_the_engine(self, caplog: pytest.LogCaptureFixture) -> None:
        """As vLLM sends a request from the front end's process to the engine's."""
        sent = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"cpu_offload_priority": "low"}),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            kv_hints=envelope(("kv.retain", {"priority": "high", "ttl_seconds": 60}), ("kv.demote", {})),
        )
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreRequest)
        request = Request.from_engine_core_request(received, None)
        assert hints_of(request) == RequestHints(priority="low", ttl_seconds=60, keep=False)
        assert not caplog.records

    def test_pooling_requests_carry_nothing_else(self) -> None:
        request = request_of(None, envelope(("kv.pin", {"ttl_seconds": 5})))
        assert hints_of(request) == RequestHints(pin_seconds=5)
        assert request.kv_transfer_params is None

    @pytest.mark.parametrize(
        "wrong",
        [
            {"actions": [{"action_type": "kv.demote"}]},
            "kv.demote",
            KvHintsEnvelope("0.1", "m", None),  # type: ignore[arg-type]
            KvHintsEnvelope("0.1", "m", [{"action_type": "kv.demote"}]),  # type: ignore[list-item]
            KvHintsEnvelope("0.1", "m", [KvHintAction("a", 7, None, "x")]),  # type: ignore[arg-type]
            KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.demote", "1", None)]),  # type: ignore[arg-type]
        ],
        ids=str,
    )
    def test_what_nobody_checked(self, wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
        """An engine in the caller's process gets whatever the caller has."""
        sampling = SamplingParams(max_tokens=1, extra_args={"cpu_offload_store": False})
        for _ in range(2):
            assert hints_of(request_of(sampling, wrong)) == RequestHints(store=False)
        (record,) = caplog.records
        assert "in kv_hints, here and from now on, ignored" in record.getMessage()

    def test_the_first_of_many_actions_are_taken(self, caplog: pytest.LogCaptureFixture) -> None:
        many = envelope(*[("kv.retain", {"priority": "low"})] * 64, ("kv.demote", {}))
        assert hints_of(request_of(None, many)) == RequestHints(priority="low")
        (record,) = caplog.records
        assert "after the first 64" in record.getMessage()


PINS: dict[str, dict[str, Any]] = {
    "params": {"hints": {"cpu_offload_pin_seconds": 1000}},
    "xargs": {"xargs": {"cpu_offload_pin_seconds": 1000}},
    "kv.pin": {"kv_hints": envelope(("kv.pin", {"ttl_seconds": 1000}))},
    "kv.retain": {"kv_hints": envelope(("kv.retain", {"priority": "high"}))},
    "overwritten params": {"hints": {"do_remote_decode": False}, "xargs": {"cpu_offload_priority": "high"}},
}
LOWEST: dict[str, dict[str, Any]] = {
    "params": {"hints": {"cpu_offload_keep": False}},
    "xargs": {"xargs": {"cpu_offload_keep": 0}},
    "kv.demote": {"kv_hints": envelope(("kv.demote", {}))},
    "kv.retain": {"kv_hints": envelope(("kv.retain", {"priority": "low"}))},
}


@pytest.mark.parametrize("said", PINS.values(), ids=PINS)
def test_what_is_to_stay_survives_pressure(said: dict[str, Any], engines: Engines) -> None:
    engine = engines(**POOL)
    kept = serve(engine, tokens(4 * DOCUMENT, 0), **said)
    other = serve(engine, tokens(4 * DOCUMENT, 1))
    for number in range(2, 10):
        serve(engine, tokens(4 * DOCUMENT, number))
    assert (depth_of(engine, kept), depth_of(engine, other)) == (DOCUMENT, 0)


@pytest.mark.parametrize("said", LOWEST.values(), ids=LOWEST)
def test_what_is_not_wanted_goes_first(said: dict[str, Any], engines: Engines) -> None:
    engine = engines(**POOL)
    first = serve(engine, tokens(4 * DOCUMENT), **said)
    assert depth_of(engine, first) == DOCUMENT, "there was room"
    others = [serve(engine, tokens(4 * DOCUMENT, number)) for number in range(1, 7)]
    assert depth_of(engine, first) == 4
    assert [depth_of(engine, request) for request in others] == [DOCUMENT] * 6


def test_a_time_to_live_from_kv_hints_ends(engines: Engines) -> None:
    engine = engines(**POOL, step_seconds=10.0)
    mortal = serve(engine, tokens(4 * DOCUMENT, 6), kv_hints=envelope(("kv.retain", {"ttl_seconds": 10})))
    recent = [serve(engine, tokens(4 * DOCUMENT, number)) for number in range(5)]
    serve(engine, tokens(4 * DOCUMENT, 8))
    assert depth_of(engine, mortal) < DOCUMENT
    assert [depth_of(engine, request) for request in recent] == [DOCUMENT] * 5


def test_a_pooling_request_with_kv_hints(engines: Engines) -> None:
    engine = engines(**POOL)
    pooled = serve(
        engine, tokens(4 * DOCUMENT), is_pooled=True, kv_hints=envelope(("kv.pin", {"ttl_seconds": 1000}))
    )
    for number in range(2, 10):
        serve(engine, tokens(4 * DOCUMENT, number))
    assert depth_of(engine, pooled) == DOCUMENT


def test_a_waiting_request_is_read_once(engines: Engines) -> None:
    engine = engines(gpu_blocks=24, cpu_slots=64)
    running = engine.add(tokens(60), 30)
    step_until(engine, lambda: running.num_output_tokens > 0)
    payload = Counted({"ttl_seconds": 1000})
    said = envelope(("kv.pin", payload))  # type: ignore[arg-type]
    waiting = engine.add(tokens(70, first=3), 1, kv_hints=said)
    waiting.sampling_params.extra_args = xargs = Counted({"cpu_offload_keep": 1})  # type: ignore[union-attr,assignment]
    step_until(engine, lambda: xargs.num_lookups > 0)
    num_read = xargs.num_lookups, payload.num_lookups
    step_until(engine, waiting.is_finished)
    assert (xargs.num_lookups, payload.num_lookups) == num_read
