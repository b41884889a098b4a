"""What the scheduler side and the worker side tell each other. Plain data; a reader never changes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
"""Ids of GPU blocks, of slots, or of what another place keeps."""


class Route(NamedTuple):
    """The way between two places, in one direction.

    Attributes:
        verb: what it is called to move blocks along it.
        source: the place that blocks come from.
        target: the place that they are copied to.
    """

    verb: str
    source: str
    target: str

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return f"{self.source}_to_{self.target}"


GPU, POOL = "gpu", "pool"
STORE, LOAD = Route("store", GPU, POOL), Route("load", POOL, GPU)
GPU_ROUTES = (STORE, LOAD)


class Fingerprint(NamedTuple):
    """Equal on every rank of an engine, however its layers are spread over them.

    Attributes:
        kv_offload: version of this package.
        vllm: version of vLLM.
        world_size: ranks of the engine.
        block_size: tokens per block.
        dtype: element types of the KV cache, and of the model where that says "auto".
        layout: order of the cache's dimensions.
        groups: kinds of its cache groups.
    """

    kv_offload: str
    vllm: str
    world_size: int
    block_size: int
    dtype: str
    layout: str
    groups: str = ""


class Part(NamedTuple):
    """Job ``job_id`` moves blocks ``start <= i < stop`` of an order."""

    job_id: int
    start: int
    stop: int


class Order(NamedTuple):
    """Copy blocks along a route.

    Attributes:
        route: where from and where to.
        parts: the jobs that do it.
        sources: ids of the blocks to copy, ``int64[n]``, in chain order.
        targets: ids of where they go, ``int64[n]``.
        fills: where slots are read, the jobs that filled them, ``int64[n]``.
        request_id: the request that waits for it; None if none does.
    """

    route: Route
    parts: list[Part]
    sources: Ids
    targets: Ids
    fills: Ids | None = None
    request_id: str | None = None


@dataclass(slots=True)
class StepPlan:
    """Scheduler to workers, once a step, the same for every rank."""

    fingerprint: Fingerprint
    orders: list[Order] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Jobs in flight whose bytes are no longer wanted."""


class JobReport(NamedTuple):
    """What became of a job on some ranks.

    Attributes:
        num_ranks: ranks where it is over.
        num_good: leading blocks that are good on the worst rank heard of.
        given_up: a rank's copy is past its deadline; it is over there when ``num_ranks`` says so.
        seconds: that the copy took on the slowest rank heard of.
        nbytes: that were copied, on these ranks together.
    """

    num_ranks: int
    num_good: int
    given_up: bool = False
    seconds: float = 0.0
    nbytes: int = 0

    def merged(self, other: "JobReport") -> "JobReport":
        """Both reports as one."""
        return JobReport(
            self.num_ranks + other.num_ranks,
            min(self.num_good, other.num_good),
            self.given_up or other.given_up,
            max(self.seconds, other.seconds),
            self.nbytes + other.nbytes,
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
    """Workers to scheduler, once at start: what this rank's part of the pool is like.

    Attributes:
        num_slots: slots that this rank reads.
        slot_bytes: of one on this rank.
        fingerprint: this rank's.
        num_sharing: ranks that have these slots in one memory, this one included.
    """

    num_slots: int
    slot_bytes: int
    fingerprint: Fingerprint
    num_sharing: int = 1
