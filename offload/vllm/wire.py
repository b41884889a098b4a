"""Our messages in vLLM's envelopes, in which they travel between its processes."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from offload.messages import StepPlan, WorkerFacts, WorkerReport


@dataclass(slots=True)
class PlanEnvelope(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    plan: StepPlan

    def __reduce__(self) -> tuple[Any, ...]:
        """Most plans say nothing. As dataclasses, both would be pickled with each field looked up by name."""
        plan = self.plan
        said = plan.orders, plan.cancelled, plan.kept, plan.listening, plan.verdicts, plan.resizes, plan.timed
        return _envelope, (plan.fingerprint, *said) if any(said) else (plan.fingerprint,)


def _envelope(*said: Any) -> PlanEnvelope:
    """Of a plan of these fields; the others say nothing."""
    return PlanEnvelope(StepPlan(*said))


@dataclass(slots=True)
class ReportEnvelope(KVConnectorWorkerMetadata):
    """Workers to scheduler, when there is something to report.

    ``facts`` are those of ranks that no handshake has asked, each with its first report.
    """

    report: WorkerReport
    facts: list[WorkerFacts] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportEnvelope":
        """Merge another rank's report into a new one."""
        assert isinstance(other, ReportEnvelope), f"{type(other)} is not our report"
        return ReportEnvelope(self.report.merged(other.report), self.facts + other.facts)


@dataclass(slots=True)
class FactsEnvelope(KVConnectorHandshakeMetadata):
    """Workers to scheduler, once at start."""

    facts: WorkerFacts
