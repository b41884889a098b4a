"""An engine with a steady batch, and the process it lives in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.decode_latency.gaps import Gaps
from benchmarks.decode_latency.pace import Token, keep_pace
from benchmarks.decode_latency.settings import LatencySettings
from benchmarks.long_document_qa.engine import Engine
from benchmarks.long_document_qa.engine_process import EngineProcess
from benchmarks.long_document_qa.measure import Counters
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt

__all__ = ["Decoded", "SteadyEngine", "SteadyProcess"]

_FIRST_ID = 3
_STEADY = 2**31 + 1  # part of the seed; side prompts and documents have other numbers there


class Decoded(NamedTuple):
    """One round: gaps between the steady batch's tokens, and what the engine counted."""

    gaps: Gaps
    counters: Counters


class SteadyEngine(Engine):
    """An `Engine` that also lets a batch decode beside side prompts."""

    def __init__(self, settings: LatencySettings, mode: str) -> None:
        super().__init__(settings, mode)
        self._latency = settings
        self._num_batches = 0
        self._prefix = ""

    def decode(self, prompts: Sequence[Prompt], on_done: Callable[[], None]) -> Decoded:
        """Run one round (`keep_pace`) with these side prompts; each round's steady prompts are new."""
        settings = self._latency
        self._num_batches += 1
        self._prefix = f"batch-{self._num_batches}-"
        rng = np.random.default_rng([settings.workload.seed, _STEADY, self._num_batches])
        shape = (settings.steady, settings.steady_prompt_tokens)
        steady = rng.integers(_FIRST_ID, settings.workload.vocab_size, shape, dtype=np.int32)
        before = self.settle()
        tokens = settings.steady_tokens - settings.steady_prompt_tokens
        timeline = keep_pace(self, list(steady), tokens, prompts, settings.gap_steps, on_done)
        return Decoded(Gaps.of(timeline), self.settle() - before)

    def add(self, request: str, prompt: Prompt, output_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens = {"prompt_token_ids": prompt.tolist()}
        self._llm.llm_engine.add_request(self._prefix + request, tokens, sampling)

    def step(self) -> list[Token]:
        """The times are those of the engine's core, when it handed the tokens out."""
        return [
            Token(
                output.request_id.removeprefix(self._prefix),
                output.metrics.last_token_ts,
                output.metrics.scheduled_ts,
                output.finished,
            )
            for output in self._llm.llm_engine.step()
            if output.outputs[0].token_ids
        ]

    def abort(self, requests: Sequence[str]) -> None:
        engine = self._llm.llm_engine
        engine.abort_request([self._prefix + name for name in requests])
        while engine.has_unfinished_requests():
            engine.step()


class SteadyProcess(EngineProcess):
    """A `SteadyEngine` in a process of its own."""

    def __init__(self, settings: LatencySettings, mode: str) -> None:
        super().__init__(settings, mode, make=_steady_engine)

    def decode(self, prompts: Sequence[Prompt]) -> Decoded:
        """See `SteadyEngine.decode`."""
        return self.run_told(self.on_done, SteadyEngine.decode, list(prompts))


def _steady_engine(settings: Settings, mode: str) -> Engine:
    assert isinstance(settings, LatencySettings)
    return SteadyEngine(settings, mode)
