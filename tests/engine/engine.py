"""A real vLLM engine. Lives in a process of its own, see ``process``; tests run its methods there."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from offload.testing.engines.environment import ENVIRONMENT, transfer_config
from offload.testing.engines.models import tiny_llama
from tests.engine.answers import ALL_RESTORED, BLOCK_SIZE, VOCAB_SIZE, Answer, Prompt

MAX_MODEL_LEN = 1536

SHORT: Prompt = [3] * 8
"""Shorter than a block: stored nowhere. Asked to keep the engine going."""

_ANSWER_SECONDS = 180.0
_SETTLE_SECONDS = 60.0


def model_directory(*, vocab_size: int = VOCAB_SIZE, with_tokenizer: bool = False, kv_heads: int = 2) -> Path:
    """A tiny Llama whose weights are large enough for every block of a prompt to matter."""
    return tiny_llama(
        vocab_size=vocab_size,
        max_position_embeddings=MAX_MODEL_LEN,
        with_tokenizer=with_tokenizer,
        kv_heads=kv_heads,
    )


class Engine:
    """One engine with or without the connector, asked through vLLM's own ``LLMEngine``."""

    def __init__(
        self,
        extra_config: Mapping[str, Any] | None,
        *,
        in_process: bool = False,
        fork: bool = False,
        num_gpu_blocks: int = 49,
        max_model_len: int = MAX_MODEL_LEN,
        model: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """Start it.

        Args:
            extra_config: ``kv_connector_extra_config``, besides ``ALL_RESTORED``; None for an engine without
                connector.
            in_process: scheduler and worker in this very process, where tests can look at them.
            fork: fork the engine's processes, which start sooner than those the CPU backend spawns.
            num_gpu_blocks: blocks of the GPU cache, the reserved one included.
            max_model_len: longest request in tokens; the GPU cache must hold one.
            model: its directory; None for the tiny Llama.
            variables: of its environment, beside or in place of those in ``ENVIRONMENT``.
            settings: of ``vllm.EngineArgs``.
        """
        os.environ.update({**ENVIRONMENT, **variables})
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if settings.get("async_scheduling"):
            _after_cpu_check(_schedule_asynchronously)
        if fork:
            _after_cpu_check(_fork_processes)
        if extra_config is not None:
            settings["kv_transfer_config"] = transfer_config({**ALL_RESTORED, **extra_config})
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "worker_extension_cls": "tests.engine.worker_probe.WorkerProbe",
        }
        arguments = EngineArgs(
            str(model or model_directory()),
            skip_tokenizer_init=True,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_gpu_blocks,
            gpu_memory_utilization=0.2,
            max_model_len=max_model_len,
            max_logprobs=-1,
            **defaults | settings,
        )
        self.llm = LLMEngine.from_engine_args(arguments)
        self._num_asked = 0
        self._outputs: dict[str, Any] = {}

    def ask(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 4,
        *,
        priorities: Sequence[int] | None = None,
        abort_at: Mapping[int, int] | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Ask all prompts at once and wait for the answers.

        Args:
            prompts: token ids.
            max_tokens: tokens to generate for each.
            priorities: one per prompt, smaller goes first; for engines that schedule by priority.
            abort_at: index of a prompt to the engine step after which it is aborted, counted from 1; its
                answer has the tokens generated until then.
            hints: ``kv_transfer_params`` of every request.
        """
        ranks = priorities or [0] * len(prompts)
        names = [
            self.add(prompt, max_tokens, rank, hints) for prompt, rank in zip(prompts, ranks, strict=True)
        ]
        for num_steps in range(1, max(abort_at.values()) + 1 if abort_at else 0):
            self.step()
            self.llm.abort_request([names[index] for index, at in abort_at.items() if at == num_steps])
        return self.finish(names)

    def add(
        self, prompt: Prompt, max_tokens: int, priority: int = 0, hints: Mapping[str, Any] | None = None
    ) -> str:
        """Hand one request over without a step; return its name."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=-1,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(hints)} if hints else None,
        )
        self._num_asked += 1
        name = f"request-{self._num_asked}"
        self.llm.add_request(name, {"prompt_token_ids": prompt}, sampling, priority=priority)
        return name

    def step(self) -> list[str]:
        """Let the engine make one step; return the names of requests that have a new token."""
        outputs = self.llm.step()
        self._outputs.update((output.request_id, output) for output in outputs)
        return [output.request_id for output in outputs]

    def finish(self, names: Sequence[str]) -> list[Answer]:
        """Step until all requests are done; return the answers of those named.

        Raises TimeoutError if the engine makes no end.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while self.llm.has_unfinished_requests():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"unfinished requests after {_ANSWER_SECONDS:g} s")
        return [_answer(self._outputs.pop(name, None)) for name in names]

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, of an engine that is in this process."""
        return self.llm.engine_core.engine_core.scheduler

    def settle(self) -> dict[str, float]:
        """Wait until no job is in flight, and no block waits for one; return the counters.

        An engine reports counters along with answers, so it is asked something too short to be cached.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self.ask([SHORT], 1)
            counters = self.counters()
            if not counters.get("jobs_in_flight") and not counters.get("queued_blocks"):
                return counters
        raise TimeoutError(f"jobs still in flight after {_SETTLE_SECONDS:g} s: {counters}")

    def counters(self) -> dict[str, float]:
        """Counters and gauges as last reported, by name without prefix.

        ``prompt_tokens_by_source`` comes under the names of its sources, such as ``local_cache_hit``. What is
        counted by route comes for all, and for each as ``name:route``.
        """
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                name = metric.name.removeprefix("vllm:").removeprefix("cpu_offload_")
                if name == "prompt_tokens_by_source":
                    name = metric.labels["source"]
                values[name] = values.get(name, 0) + metric.value
                if "route" in metric.labels:
                    values[f"{name}:{metric.labels['route']}"] = metric.value
        return values

    def forget_gpu(self) -> bool:
        """Empty the GPU's prefix cache, once no job is in flight; True if every block was free."""
        self.settle()
        return self.llm.reset_prefix_cache()

    def forget_all(self) -> bool:
        """Empty the GPU's prefix cache and the CPU pool."""
        self.settle()
        return self.llm.reset_prefix_cache(reset_connector=True)

    def probe(self, method: str, *arguments: Any) -> Any:
        """Run a method of ``WorkerProbe`` in the worker and return what it returns."""
        [result] = self.probe_all(method, *arguments)
        return result

    def probe_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same in every worker."""
        results: list[Any] = self.llm.collective_rpc(method, args=arguments)
        return results

    def close(self) -> None:
        """Stop the engine and its processes."""
        self.llm.engine_core.shutdown()


def _after_cpu_check(change: Callable[[Any], None]) -> None:
    """Let ``change`` have the last word on a configuration that vLLM has adapted to the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_change(platform: Any, vllm_config: Any) -> None:
        check(platform, vllm_config)
        change(vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_change)


def _schedule_asynchronously(vllm_config: Any) -> None:
    """vLLM turns it off on the CPU, where it gains nothing; yet there it works too."""
    vllm_config.scheduler_config.async_scheduling = True


def _fork_processes(vllm_config: Any) -> None:
    """vLLM spawns them on the CPU, and each imports everything anew."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _answer(output: Any | None) -> Answer:
    if output is None:
        return Answer((), np.empty((0, VOCAB_SIZE)), 0)
    completion = output.outputs[0]
    flat = completion.logprobs
    logprobs = np.full((len(flat), VOCAB_SIZE), np.nan)
    for row, start, end in zip(logprobs, flat.start_indices, flat.end_indices, strict=True):
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
    assert not np.isnan(logprobs).any(), "the engine left out a part of the distribution"
    return Answer(tuple(completion.token_ids), logprobs, output.num_cached_tokens)
