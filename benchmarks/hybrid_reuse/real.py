"""The same on a real engine of a tiny model: what each request computes, as vLLM itself tells."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import methodcaller
from statistics import fmean
from typing import Any

from offload.testing.engines.environment import ENVIRONMENT, transfer_config
from offload.testing.engines.hybrids import HYBRIDS, tiny_hybrid
from offload.testing.engines.process import IMPORTS, EngineProcess

__all__ = ["RealEngine", "measure"]

_CPU_BYTES = 1 << 28
_NATIVE = {
    "cpu_bytes_to_use": _CPU_BYTES,
    "spec_name": "PlainCpuCopySpec",
    "spec_module_path": "benchmarks.common.native_cpu_spec",
}
_KEPT = {"prefix_cache_retention_interval": None}
_CONNECTORS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "native": {"kv_transfer_config": transfer_config(_NATIVE, "OffloadingConnector")},
    "native, all kept": {"kv_transfer_config": transfer_config(_NATIVE, "OffloadingConnector"), **_KEPT},
    "offload": {"kv_transfer_config": transfer_config({"cpu_gib": _CPU_BYTES / 2**30})},
}
"""Settings of vLLM's engine, by name. Its SimpleCPUOffloadConnector does not start without CUDA."""
_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ASKS, _SIBLINGS = 3, 3
_BLOCK_TOKENS = 32
_STEP_TOKENS = 256
_DOCUMENT_TOKENS = (1098, 1240, 1500, 1007)
_QUESTION_TOKENS = 70
_ANSWER_TOKENS = 4
_VOCABULARY = range(3, 250)
_SHORT = [3] * 8
"""Shorter than a block: asked to keep an engine going."""
_SECONDS = 60.0


class RealEngine:
    """One engine with or without a connector, on the CPU backend, in this process."""

    def __init__(self, kind: str, connector: str) -> None:
        """``kind``: of ``HYBRIDS``; ``connector``: one of those above."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        common = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "block_size": _BLOCK_TOKENS,
            "num_gpu_blocks_override": 1600,
            "max_model_len": 2048,
            "max_num_batched_tokens": _STEP_TOKENS,
            "enable_prefix_caching": True,
        }
        settings: dict[str, Any] = {**common, **HYBRIDS[kind].settings, **_CONNECTORS[connector]}
        self._llm = LLMEngine.from_engine_args(EngineArgs(str(tiny_hybrid(kind)), **settings))
        self._num_asked = 0

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Ask all at once. Then the GPU forgets. Returns how many tokens of each prompt were computed."""
        computed = self._answer(prompts)
        end = time.monotonic() + _SECONDS
        while not self._llm.reset_prefix_cache():  # its blocks are held while they are stored
            if time.monotonic() > end:
                raise TimeoutError(f"some GPU blocks are still held after {_SECONDS:g} s")
            self._answer([_SHORT])
        return computed

    def close(self) -> None:
        """Stop it."""
        self._llm.engine_core.shutdown()

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True
        )
        left: dict[str, int] = {}
        for prompt in prompts:
            self._num_asked += 1
            left[str(self._num_asked)] = len(prompt)
            self._llm.add_request(str(self._num_asked), {"prompt_token_ids": list(prompt)}, sampling)
        computed: dict[str, int] = {}
        while len(computed) < len(left):
            for output in self._llm.step():
                if output.finished:
                    num_cached = output.num_cached_tokens or 0
                    computed[output.request_id] = left[output.request_id] - num_cached
        return [computed[name] for name in left]


def measure(kind: str) -> list[dict[str, Any]]:
    """A row for each connector: tokens computed beside the question, in the mean.

    The bar is for our second ask, one step, as the pool has room for everything.
    """
    rng = random.Random(kind)
    documents = [rng.choices(_VOCABULARY, k=length) for length in _DOCUMENT_TOKENS]
    rows = []
    for connector in _CONNECTORS:
        print(f"  a real engine, {kind}: {connector}", file=sys.stderr, flush=True)
        made = partial(RealEngine, kind, connector)
        with EngineProcess(made, "hybrid-reuse", variables=_ENVIRONMENT, fork_from=[IMPORTS]) as engine:
            asks = [_ask(engine, documents, rng, 1) for _ in range(_ASKS)]
        with EngineProcess(made, "hybrid-reuse", variables=_ENVIRONMENT, fork_from=[IMPORTS]) as engine:
            _ask(engine, documents, rng, 1)
            siblings = _ask(engine, documents, rng, _SIBLINGS)
        bar = max(_STEP_TOKENS, HYBRIDS[kind].block_size)
        rows.append(
            {
                "engine": f"tiny {kind}",
                "connector": connector,
                "document_tokens": fmean(_DOCUMENT_TOKENS),
                "computed": [round(fmean(each), 1) for each in asks],
                "most": max(asks[1]),
                "siblings": round(fmean(siblings), 1),
                "near": bar,
                "is_met": max(asks[1]) <= bar if connector == "offload" else None,
            }
        )
    return rows


def _ask(
    engine: EngineProcess[RealEngine], documents: Sequence[list[int]], rng: random.Random, at_once: int
) -> list[int]:
    computed = []
    for document in documents:
        questions = [rng.choices(_VOCABULARY, k=_QUESTION_TOKENS) for _ in range(at_once)]
        prompts = [[*document, *question] for question in questions]
        computed += [each - _QUESTION_TOKENS for each in engine.run(methodcaller("ask", prompts))]
    return computed
