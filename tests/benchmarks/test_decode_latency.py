"""The decode-latency benchmark: its logic with an engine of a few lines, and a real one once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.decode_latency import __main__ as decode_latency
from benchmarks.decode_latency.engine import Decoded, SteadyProcess
from benchmarks.decode_latency.gaps import Gaps, percentiles_ms
from benchmarks.decode_latency.pace import Span, Timeline, Token, keep_pace
from benchmarks.decode_latency.settings import LatencySettings, make_latency_settings
from benchmarks.decode_latency.summary import format_goal
from benchmarks.decode_latency.traffic import TRAFFICS, Traffic
from benchmarks.long_document_qa import arguments
from benchmarks.long_document_qa.measure import Counters
from benchmarks.long_document_qa.workload import Prompt
from offload.testing.engines.environment import ENVIRONMENT
from tests.benchmarks.conftest import Run

STEP, CHUNK, STORING = 0.010, 0.100, 0.002
"""Seconds: a step that decodes, what a chunk of a side prompt adds, and what a store adds to a step."""

CHUNKS, RESTORE_STEPS, STORE_STEPS = 2, 3, 4


class VirtualStepper:
    """Steps on a clock of its own. Side prompts take `CHUNKS` steps, their stores the steps after those."""

    def __init__(self, *, stores: bool = False, restores: bool = False) -> None:
        self.now = 100.0
        self.decoding: dict[str, int] = {}
        self.aborted: list[str] = []
        self._stores = stores
        self._restores = restores
        self._side: str | None = None
        self._waits = self._chunks = self._storing = 0
        self._scheduled_at = 0.0

    def add(self, request: str, prompt: Prompt, output_tokens: int) -> None:
        if request.startswith("steady"):
            self.decoding[request] = output_tokens
        else:
            assert self._side is None, "one side prompt at a time"
            self._side, self._chunks = request, CHUNKS
            self._waits = RESTORE_STEPS if self._restores else 0

    def step(self) -> list[Token]:
        start, is_last_chunk = self.now, False
        self.now += STEP
        if self._storing:
            self.now += STORING
            self._storing -= 1
        if self._waits:
            self._waits -= 1
        elif self._chunks:
            self._scheduled_at = start if self._chunks == CHUNKS else self._scheduled_at
            self.now += CHUNK
            self._chunks -= 1
            is_last_chunk = not self._chunks
        tokens = []
        for name in list(self.decoding):
            self.decoding[name] -= 1
            tokens.append(Token(name, self.now, 0.0, not self.decoding[name]))
        if is_last_chunk:
            assert self._side is not None
            tokens.append(Token(self._side, self.now, self._scheduled_at, True))
            self._side = None
            self._storing = STORE_STEPS if self._stores else 0
        return tokens

    def abort(self, requests: Sequence[str]) -> None:
        self.aborted += requests


def a_round(stepper: VirtualStepper, *, steady_tokens: int = 1000, side_prompts: int = 5) -> Timeline:
    prompt = np.zeros(8, dtype=np.int32)
    answered: list[None] = []
    timeline = keep_pace(
        stepper, [prompt] * 3, steady_tokens, [prompt] * side_prompts, 10, lambda: answered.append(None)
    )
    assert len(answered) == side_prompts
    return timeline


@pytest.mark.parametrize("restores", [False, True])
def test_steps_beside_a_prefill_are_told_apart(restores: bool) -> None:
    """A step in which a side prompt waits for its restore decodes only, and so does the one behind it."""
    stepper = VirtualStepper(restores=restores)
    gaps = Gaps.of(a_round(stepper))
    assert len(gaps.seconds) == 3 * 5 * (10 + CHUNKS + (RESTORE_STEPS if restores else 0))
    assert gaps.decode_only == pytest.approx(STEP)
    assert gaps.seconds[~gaps.is_decode_only] == pytest.approx(STEP + CHUNK)
    assert (~gaps.is_decode_only).sum() == 3 * 5 * CHUNKS
    assert stepper.aborted == ["steady-0", "steady-1", "steady-2"]


def test_what_stores_cost_shows_in_the_steps_behind_a_prefill() -> None:
    gaps = Gaps.of(a_round(VirtualStepper(stores=True)))
    slower = np.isclose(gaps.decode_only, STEP + STORING)
    assert slower.mean() == pytest.approx(STORE_STEPS / 10)
    assert percentiles_ms(gaps.decode_only) == (10.0, 12.0)


def test_a_steady_batch_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before the last side prompt"):
        a_round(VirtualStepper(), steady_tokens=50)


def test_a_gap_that_only_touches_a_prefill_is_not_beside_it() -> None:
    gaps = Gaps.of(Timeline([[0.0, 1.0, 2.0, 3.0, 4.0]], [Span(1.0, 2.0), Span(3.5, 3.6)]))
    assert gaps.is_decode_only.tolist() == [True, False, True, False]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_again_has_left_the_gpu_but_not_the_pool(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "device_of", lambda wanted: wanted)
    settings = make_latency_settings({"device": device})
    assert settings.max_num_seqs == settings.steady + 1
    assert settings.max_model_len >= settings.steady_tokens
    assert settings.gpu_blocks * settings.block_size >= settings.steady * settings.steady_tokens
    traffic = Traffic(settings, "again", 1)
    size = settings.workload.document_tokens
    seen: list[bytes] = [prompt[:size].tobytes() for prompt in traffic.to_prime()]
    for _ in range(3):
        prompts = traffic.next_round()
        assert len(prompts) == settings.side_prompts
        for number, prompt in enumerate(prompts):
            document = prompt[:size].tobytes()
            if number % 2 == 0:
                since = seen[::-1].index(document)
                assert (since + 1) * settings.document_blocks > settings.gpu_blocks
                assert since < settings.cpu_documents
            else:
                assert document not in seen
            seen.append(document)


def test_both_engines_get_the_same_traffic_and_kinds_and_starts_differ() -> None:
    settings = make_latency_settings({"device": "cpu"})
    firsts = {
        (kind, start): Traffic(settings, kind, start).next_round()[1].tobytes()
        for kind in TRAFFICS
        for start in (0, 1, 2)
    }
    assert len(set(firsts.values())) == len(firsts)
    assert Traffic(settings, "new", 1).next_round()[1].tobytes() == firsts["new", 1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"steady": 0}, "steady=0"),
        ({"concurrency": 2}, "concurrency=2: side prompts come one at a time"),
        ({"cpu_documents": 3}, "cpu_documents=3: must be at least"),
        ({"max_num_batched_tokens": 4}, "must be more than steady=4"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_latency_settings({"device": "cpu", **wrong})


class VirtualProcess:
    """Stands in for `SteadyProcess`: with a connector, stores and restores take their time."""

    def __init__(self, settings: LatencySettings, mode: str) -> None:
        self._settings = settings
        self._stores = mode == "offload"
        self._restores = False

    def __enter__(self) -> "VirtualProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        self._restores = False

    def run_round(self, prompts: Sequence[Prompt]) -> None:
        assert len(prompts) == 1
        self._restores = self._stores

    def decode(self, prompts: Sequence[Prompt]) -> Decoded:
        stepper = VirtualStepper(stores=self._stores, restores=self._restores)
        timeline = a_round(stepper, side_prompts=len(prompts))
        return Decoded(Gaps.of(timeline), Counters(bytes_stored=len(prompts) * self._stores))


def test_the_whole_run(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(decode_latency, "SteadyProcess", VirtualProcess)
    command = "--device cpu --starts 2 --rounds 2 --side-prompts 4"
    rows, meta, said, _ = run(decode_latency, *command.split())
    assert [(row["start"], row["mode"], row["traffic"]) for row in rows] == [
        (start, mode, kind)
        for start, modes in ((1, ("prefix", "offload")), (2, ("offload", "prefix")))
        for mode in modes
        for kind in TRAFFICS
    ]
    for row in rows:
        slow = row["mode"] == "offload"
        assert row["decode_p50_ms"] == pytest.approx(10)
        assert row["decode_p99_ms"] == pytest.approx(12 if slow else 10)
        assert row["all_p99_ms"] == pytest.approx(110)
        assert row["bytes_stored"] == (8 if slow else 0)
    assert meta["settings"]["steady"] == 4
    assert "1.200x, not met" in format_goal(rows, "offload")
    assert "1.200x, not met" in said
    assert "say little about a GPU" in said


@pytest.mark.engine
def test_a_real_engine_decodes_stores_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = make_latency_settings(
        {
            "device": "cpu",
            "hidden_size": 64,
            "heads": 2,
            "kv_heads": 1,
            "layers": 2,
            "block_size": 32,
            "document_tokens": 128,
            "max_num_batched_tokens": 68,
            "side_prompts": 4,
            "gap_steps": 6,
        }
    )
    with SteadyProcess(settings, "offload") as engine:
        new = engine.decode(Traffic(settings, "new", 1).next_round())
        engine.reset()
        traffic = Traffic(settings, "again", 1)
        for prompt in traffic.to_prime():
            engine.run_round([prompt])
        again = engine.decode(traffic.next_round())
    for decoded in (new, again):
        counts = len(decoded.gaps.decode_only), len(decoded.gaps.seconds)
        assert counts[0] >= 4 * 4 * 6, "fewer gaps than the pace makes"
        assert counts[1] - counts[0] >= 4 * 4, "every side prompt is computed in a step at least"
        assert (decoded.gaps.seconds > 0).all()
        assert decoded.counters.failed_jobs == decoded.counters.preemptions == 0
    stored = 4 * 4 * settings.block_bytes
    assert new.counters.bytes_stored >= stored
    assert new.counters.bytes_loaded == new.counters.cached_gpu_tokens == 0
    assert again.counters.bytes_loaded == 2 * 4 * settings.block_bytes
    assert again.counters.cached_gpu_tokens == 0
