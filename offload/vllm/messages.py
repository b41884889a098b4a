"""What the scheduler side and the worker side tell each other. Plain data; a reader never changes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from offload.layout import Ids


class StoreOrder(NamedTuple):
    """Copy GPU ``block_ids`` down into ``slots``."""

    job_id: int
    block_ids: Ids
    slots: Ids


class LoadOrder(NamedTuple):
    """Copy ``slots`` up into GPU ``block_ids``, for one request."""

    job_id: int
    request_id: str
    slots: Ids
    block_ids: Ids


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers, once a step, the same for every rank."""

    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Loads in flight whose bytes are no longer wanted."""


class JobReport(NamedTuple):
    """How a job ended on ``num_ranks`` ranks, the worst of which copied ``num_copied`` leading blocks."""

    num_ranks: int
    num_copied: int


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: jobs that ended since the last report."""

    jobs: dict[int, JobReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge another rank's report into a new one."""
        assert isinstance(other, WorkerReport)
        merged = dict(self.jobs)
        for job_id, (num_ranks, num_copied) in other.jobs.items():
            mine = merged.get(job_id)
            if mine is None:
                merged[job_id] = JobReport(num_ranks, num_copied)
            else:
                merged[job_id] = JobReport(mine.num_ranks + num_ranks, min(mine.num_copied, num_copied))
        return WorkerReport(merged)


@dataclass(slots=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Workers to scheduler, once at start: what this rank's part of the pool is like."""

    num_slots: int
    slot_bytes: int
