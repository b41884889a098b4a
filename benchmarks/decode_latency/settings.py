"""Settings of the decode-latency benchmark: those of the long-document engine, and a batch that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.long_document_qa.arguments import make_settings
from benchmarks.long_document_qa.settings import Settings

__all__ = ["LatencySettings", "make_latency_settings"]

_RESTORE_STEPS = 24
"""Steps of the steady batch that a side prompt may wait or be restored for, on average."""

_SIDE: dict[str, Any] = {"gpu_documents": 2, "concurrency": 1, "output_tokens": 1, "question_tokens": 8}
_CPU: dict[str, Any] = {"document_tokens": 1024, "steady": 4, "side_prompts": 10, "gap_steps": 30}
_CUDA: dict[str, Any] = {"document_tokens": 8192, "steady": 16, "side_prompts": 20, "gap_steps": 50}
_STEADY = ("steady", "steady_prompt_tokens", "side_prompts", "gap_steps")


@dataclass(frozen=True)
class LatencySettings(Settings):
    """A steady batch, and side prompts (the workload's documents) one at a time.

    steady: requests that decode all the time.
    steady_prompt_tokens: length of their prompts.
    side_prompts: in one round.
    gap_steps: steps of the steady batch from the answer to a side prompt to the next side prompt.
    """

    steady: int = 4
    steady_prompt_tokens: int = 128
    side_prompts: int = 10
    gap_steps: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _STEADY:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.workload.concurrency != 1:
            raise ValueError(f"concurrency={self.workload.concurrency}: side prompts come one at a time")
        if self.max_num_batched_tokens <= self.steady:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be more than "
                f"steady={self.steady}, or no side prompt would ever be computed"
            )
        least = 2 * self.cycle_documents + 2
        if self.cpu_documents < least:
            raise ValueError(
                f"cpu_documents={self.cpu_documents}: must be at least {least}, or what is asked again "
                f"would have left the pool"
            )

    @property
    def steady_tokens(self) -> int:
        """Length of a steady request that outlasts a round."""
        prefill_steps = -(-self.workload.request_tokens // (self.max_num_batched_tokens - self.steady))
        steps = self.gap_steps + prefill_steps + _RESTORE_STEPS
        return self.steady_prompt_tokens + (self.side_prompts + 1) * steps

    @property
    def cycle_documents(self) -> int:
        """Documents asked in turn, two more than the GPU could hold: what comes again was forgotten there."""
        return self.gpu_blocks // self.document_blocks + 2

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the GPU cache: the documents, and the steady batch at its longest."""
        return super().gpu_blocks + self.steady * (1 + self.steady_tokens // self.block_size)

    @property
    def max_model_len(self) -> int:
        return max(super().max_model_len, self.steady_tokens)

    @property
    def max_num_seqs(self) -> int:
        return super().max_num_seqs + self.steady


def make_latency_settings(chosen: Mapping[str, Any]) -> LatencySettings:
    """Make settings from what was chosen, with the defaults of the device; ValueError if they are wrong."""
    on_gpu = make_settings({"device": chosen.get("device", "auto")}).device == "cuda"
    values = {**_SIDE, **(_CUDA if on_gpu else _CPU), **chosen}
    base = make_settings(values)
    return LatencySettings(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        **{name: values[name] for name in _STEADY if name in values},
    )
