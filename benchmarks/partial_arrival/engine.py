"""An engine that is asked a whole batch at once, and the process it lives in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.long_document_qa.engine import Engine
from benchmarks.long_document_qa.engine_process import EngineProcess
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt

__all__ = ["Answered", "BatchEngine", "BatchProcess"]

_FORGET_SECONDS = 10.0


class Answered(NamedTuple):
    """One request of a batch.

    Attributes:
        first_seconds: from the batch's begin to its first token.
        last_seconds: to its last.
        num_computed: tokens of its prompt that were computed.
    """

    first_seconds: float
    last_seconds: float
    num_computed: int


class BatchEngine(Engine):
    """An `Engine` that also takes requests all at once, with hints."""

    def prime(self, prompts: Sequence[Prompt]) -> None:
        """Have the KV of these in the pool, of no others, and of none on the GPU."""
        self.reset()
        self.ask(prompts, 1, lambda: None)
        self.forget_gpu()

    def forget_gpu(self) -> None:
        """Drop what is cached on the GPU, once all of it is stored. RuntimeError if the engine refuses."""
        deadline = time.monotonic() + _FORGET_SECONDS
        while time.monotonic() < deadline:
            self.settle()
            if self._llm.reset_prefix_cache():
                return
        raise RuntimeError(f"the engine did not forget what is on the GPU within {_FORGET_SECONDS:g} s")

    def batch(
        self, prompts: Sequence[Prompt], output_tokens: int, hints: Mapping[str, Any]
    ) -> list[Answered]:
        """Hand all over before the first step, with these ``kv_transfer_params``; wait for all answers.

        An engine in a process of its own would begin with the first of them alone. So it is paused meanwhile,
        and seconds count from when it goes on.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": dict(hints)},
        )
        names = []
        self._tell("pause_scheduler", "keep", False)
        for prompt in prompts:
            self._asked += 1
            names.append(f"batch-{self._asked}")
            engine.add_request(names[-1], {"prompt_token_ids": prompt.tolist()}, sampling)
        began = time.perf_counter()
        self._tell("resume_scheduler")
        first: dict[str, float] = {}
        answered: dict[str, Answered] = {}
        while len(answered) < len(names):
            outputs = engine.step()
            seconds = time.perf_counter() - began
            for output in outputs:
                name, num_prompt = output.request_id, len(output.prompt_token_ids)
                if output.outputs[0].token_ids:
                    first.setdefault(name, seconds)
                if output.finished:
                    computed = num_prompt - output.num_cached_tokens
                    answered[name] = Answered(first[name], seconds, computed)
        return [answered[name] for name in names]

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of an engine core in a process of its own; another one makes no step by itself."""
        if not self._settings.in_process:
            self._llm.llm_engine.engine_core.call_utility(method, *arguments)


class BatchProcess(EngineProcess):
    """A `BatchEngine` in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, "offload", make=BatchEngine)

    def prime(self, prompts: Sequence[Prompt]) -> None:
        """See `BatchEngine.prime`."""
        self.run(BatchEngine.prime, list(prompts))

    def batch(
        self, prompts: Sequence[Prompt], output_tokens: int, hints: Mapping[str, Any]
    ) -> list[Answered]:
        """See `BatchEngine.batch`; what it leaves on the GPU is forgotten."""
        answered: list[Answered] = self.run(BatchEngine.batch, list(prompts), output_tokens, dict(hints))
        self.run(BatchEngine.forget_gpu)
        return answered
