"""What one round measured, the engine's counters, and the row that a pass becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from benchmarks.long_document_qa.settings import Workload
from benchmarks.long_document_qa.workload import Prompt, rounds

__all__ = ["Counters", "PassTally", "RoundResult", "measure"]

# Which Prometheus counters (without their `_total`) add up to each of ours. A name that the engine does
# not export adds nothing; only one connector is ever on.
_SOURCES = {
    "cached_gpu_tokens": ("vllm:prefix_cache_hits",),
    "cached_cpu_tokens": ("vllm:external_prefix_cache_hits",),
    "bytes_stored": ("vllm:cpu_offload_stored_bytes", "vllm:kv_offload_store_bytes"),
    "bytes_loaded": ("vllm:cpu_offload_loaded_bytes", "vllm:kv_offload_load_bytes"),
    "evicted_blocks": ("vllm:cpu_offload_evicted_blocks",),
    "failed_jobs": ("vllm:cpu_offload_failed_jobs",),
    "preemptions": ("vllm:num_preemptions",),
}


@dataclass(frozen=True)
class Counters:
    """A reading of the engine's counters, or the difference of two readings."""

    cached_gpu_tokens: int = 0
    cached_cpu_tokens: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    evicted_blocks: int = 0
    failed_jobs: int = 0
    preemptions: int = 0

    @classmethod
    def read(cls, samples: Iterable[tuple[str, float]]) -> Counters:
        """Add up samples given as (counter name without `_total`, value), over all label sets."""
        totals: dict[str, float] = {}
        for name, value in samples:
            totals[name] = totals.get(name, 0) + value
        return cls(
            **{ours: int(sum(totals.get(name, 0) for name in names)) for ours, names in _SOURCES.items()}
        )

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class RoundResult:
    """One round.

    seconds: from the first request sent to the last answer.
    ttft: seconds to the first token, one for each request.
    prompt_tokens: of all requests.
    counters: what the engine counted meanwhile.
    """

    seconds: float
    ttft: list[float]
    prompt_tokens: int
    counters: Counters


@dataclass
class PassTally:
    """Adds up the rounds of one pass."""

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    counters: Counters = field(default_factory=Counters)

    def add(self, result: RoundResult) -> None:
        self.seconds += result.seconds
        self.ttft += result.ttft
        self.prompt_tokens += result.prompt_tokens
        self.counters += result.counters

    def row(self, mode: str, documents: int, number: int, workload: Workload) -> dict[str, Any]:
        """Return the JSON row of this pass; times in seconds."""
        p50, p90, p99 = _percentiles(self.ttft)
        return {
            "mode": mode,
            "documents": documents,
            "pass": number,
            "order": workload.order,
            "concurrency": workload.concurrency,
            "requests": len(self.ttft),
            "seconds": round(self.seconds, 4),
            "ttft_p50": p50,
            "ttft_p90": p90,
            "ttft_p99": p99,
            "prompt_tokens": self.prompt_tokens,
            **{f.name: getattr(self.counters, f.name) for f in fields(Counters)},
        }


def measure(
    run_round: Callable[[Sequence[Prompt]], RoundResult], workload: Workload, documents: int, mode: str
) -> list[dict[str, Any]]:
    """Ask all rounds for one document count; return one row per pass."""
    tallies = {number: PassTally() for number in range(1, workload.passes + 1)}
    for number, prompts in rounds(workload, documents):
        tallies[number].add(run_round(prompts))
    return [tally.row(mode, documents, number, workload) for number, tally in tallies.items()]


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return round(float(p50), 4), round(float(p90), 4), round(float(p99), 4)
