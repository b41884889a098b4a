"""A vLLM engine in one of the modes. Lives in a process of its own, see `engine_process`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.long_document_qa.client import Client
from benchmarks.long_document_qa.measure import Counters
from benchmarks.long_document_qa.settings import BARE, Settings
from benchmarks.long_document_qa.workload import Prompt, warm_up_prompts
from offload.testing.engines.environment import transfer_config
from offload.testing.engines.models import llama_config_only, tiny_llama

__all__ = ["Engine", "engine_arguments", "kv_transfer_config", "model_directory"]

_GIB = 2**30
_RESET_SECONDS = 10.0


def kv_transfer_config(settings: Settings, mode: str) -> dict[str, Any] | None:
    """Return vLLM's `--kv-transfer-config` for a mode; both CPU pools get the same number of bytes."""
    extra: dict[str, Any]
    if mode == "offload":
        extra = {"cpu_gib": settings.cpu_bytes / _GIB, "restore": settings.restore, "store": settings.store}
        return transfer_config(extra | ({} if settings.huge_pages == "auto" else {"huge_pages": False}))
    if mode == "native":
        extra = {"cpu_bytes_to_use": settings.cpu_bytes}
        if settings.device == "cpu":
            extra["spec_name"] = "PlainCpuCopySpec"
            extra["spec_module_path"] = "benchmarks.common.native_cpu_spec"
        return transfer_config(extra, "OffloadingConnector")
    if mode == BARE:
        return transfer_config({}, "BareConnector") | {
            "kv_connector_module_path": "benchmarks.common.bare_connector"
        }
    return None


def model_directory(settings: Settings) -> Path:
    """Make (or find) the model that the settings ask for."""
    model = settings.model
    if model.shape == "llama-8b":
        return llama_config_only()
    return tiny_llama(
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        vocab_size=settings.workload.vocab_size,
        max_position_embeddings=max(8192, settings.max_model_len),
    )


def engine_arguments(settings: Settings, mode: str) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` (and `EngineArgs`) for a mode; makes the model."""
    arguments: dict[str, Any] = {
        "model": str(model_directory(settings)),
        "skip_tokenizer_init": True,
        "load_format": "dummy" if settings.model.shape == "llama-8b" else "auto",
        "dtype": settings.model.dtype,
        "enforce_eager": settings.device == "cpu" or settings.graphs == "none",
        "max_model_len": settings.max_model_len,
        "block_size": settings.block_size,
        "num_gpu_blocks_override": settings.gpu_blocks,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_prefix_caching": mode != "plain",
        "disable_log_stats": False,
        "seed": settings.workload.seed,
    }
    if settings.device == "cuda" and settings.graphs == "captured":
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    transfer = kv_transfer_config(settings, mode)
    return arguments | ({"kv_transfer_config": transfer} if transfer else {})


class Engine(Client):
    """One engine, started in the constructor (tens of seconds).

    Args:
        settings: sizes of workload, model and caches.
        mode: one of `settings.MODES`, or `settings.BARE`.
    """

    def __init__(self, settings: Settings, mode: str) -> None:
        super().__init__(settings.workload)
        self._settings = settings
        self._mode = mode
        self._asked = 0
        from vllm import LLM

        self._llm = LLM(**engine_arguments(settings, mode))

    def warm_up(self, on_done: Callable[[], None]) -> None:
        """Ask about other documents, each twice; forget them after.

        Processes of an engine compile at the first forward pass (about 15 s on a CPU), and memory is mapped
        at its first touch.
        """
        prompts = warm_up_prompts(self.workload, self._settings.warm_up_documents)
        for _ in range(2):
            self.run_round(prompts, on_done)
        self.reset()

    def reset(self) -> None:
        """Drop all cached blocks, on the GPU and below. RuntimeError if the engine refuses."""
        if self._mode == "plain":
            return
        deadline = time.monotonic() + _RESET_SECONDS
        while time.monotonic() < deadline:
            self.settle()
            if self._llm.reset_prefix_cache(reset_connector=True):
                return
        raise RuntimeError(f"the engine did not reset its caches within {_RESET_SECONDS:g} s")

    def counters(self) -> Counters:
        metrics = self._llm.get_metrics()
        return Counters.read((metric.name, metric.value) for metric in metrics if hasattr(metric, "value"))

    def close(self) -> None:
        """Stop the engine's processes, by force if they take long.

        On a CPU vLLM's worker always does; on a GPU a large pool takes some time to be unpinned.
        """
        self._llm.llm_engine.engine_core.shutdown(timeout=1.0 if self._settings.device == "cpu" else 30.0)

    def ask(self, prompts: Sequence[Prompt], output_tokens: int, on_done: Callable[[], None]) -> list[float]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        waiting = [{"prompt_token_ids": prompt.tolist()} for prompt in reversed(prompts)]
        sent_at: dict[str, float] = {}
        ttft: list[float] = []
        running = 0
        while waiting or running:
            while waiting and running < self.workload.concurrency:
                self._asked += 1
                running += 1
                request = f"ask-{self._asked}"
                sent_at[request] = time.perf_counter()
                engine.add_request(request, waiting.pop(), sampling)
            for output in engine.step():
                if output.request_id in sent_at and output.outputs[0].token_ids:
                    ttft.append(time.perf_counter() - sent_at.pop(output.request_id))
                if output.finished:
                    running -= 1
                    on_done()
        return ttft
