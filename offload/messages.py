"""What the scheduler side and the worker side tell each other. Plain data; a reader never changes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
"""Ids of GPU blocks, or of slots."""


class Fingerprint(NamedTuple):
    """Equal on every rank of an engine, however its layers are spread over them.

    Attributes:
        kv_offload: version of this package.
        vllm: version of vLLM.
        world_size: ranks of the engine.
        block_size: tokens per block.
        dtype: element types of the KV cache, and of the model where that says "auto".
        layout: order of the cache's dimensions.
    """

    kv_offload: str
    vllm: str
    world_size: int
    block_size: int
    dtype: str
    layout: str


class StoreOrder(NamedTuple):
    """Copy GPU ``block_ids`` down into ``slots``."""

    job_id: int
    block_ids: Ids
    slots: Ids


class LoadPart(NamedTuple):
    """Job ``job_id`` loads blocks ``start <= i < stop`` of an order."""

    job_id: int
    start: int
    stop: int


class LoadOrder(NamedTuple):
    """Copy ``slots``, as store jobs ``fills`` left them, up into GPU ``block_ids``, for one request."""

    request_id: str
    parts: list[LoadPart]
    slots: Ids
    fills: Ids
    block_ids: Ids


@dataclass(slots=True)
class StepPlan:
    """Scheduler to workers, once a step, the same for every rank."""

    fingerprint: Fingerprint
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Loads in flight whose bytes are no longer wanted."""


class JobReport(NamedTuple):
    """What became of a job on some ranks.

    Attributes:
        num_ranks: ranks where it is over.
        num_copied: leading blocks that are good on the worst rank heard of.
        given_up: a rank's copy is past its deadline; it is over there when ``num_ranks`` says so.
    """

    num_ranks: int
    num_copied: int
    given_up: bool = False

    def merged(self, other: "JobReport") -> "JobReport":
        """Both reports as one."""
        return JobReport(
            self.num_ranks + other.num_ranks,
            min(self.num_copied, other.num_copied),
            self.given_up or other.given_up,
        )


@dataclass(slots=True)
class WorkerReport:
    """Workers to scheduler: what has become of jobs since the last report."""

    jobs: dict[int, JobReport] = field(default_factory=dict)

    def add(self, job_id: int, report: JobReport) -> None:
        """Take in one more report on a job."""
        mine = self.jobs.get(job_id)
        self.jobs[job_id] = report if mine is None else mine.merged(report)

    def merged(self, other: "WorkerReport") -> "WorkerReport":
        """Both ranks' reports as one, a new one."""
        merged = WorkerReport(dict(self.jobs))
        for job_id, report in other.jobs.items():
            merged.add(job_id, report)
        return merged


@dataclass(slots=True)
class WorkerFacts:
    """Workers to scheduler, once at start: what this rank's part of the pool is like."""

    num_slots: int
    slot_bytes: int
    fingerprint: Fingerprint
