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
    """Scheduler to workers, once a step. None: the plan says nothing."""

    plan: StepPlan | None

    @classmethod
    def of(cls, plan: StepPlan) -> "PlanEnvelope":
        """Of nearly every plan it is ``NOTHING``."""
        return cls(plan) if any(_said(plan)) else NOTHING

    def __reduce__(self) -> str | tuple[Any, ...]:
        """The model has emptied the processor's caches: what is sent in each step is to touch little.

        So ``NOTHING`` is sent by its name, and no field of a plan by its own.
        """
        if self is NOTHING:
            return "NOTHING"
        assert self.plan is not None, "what says nothing has one envelope"
        return _envelope, (self.plan.fingerprint, *_said(self.plan))


NOTHING = PlanEnvelope(None)


def _said(plan: StepPlan) -> tuple[Any, ...]:
    """Its fields, but for the fingerprint."""
    return plan.orders, plan.cancelled, plan.kept, plan.listening, plan.verdicts, plan.resizes, plan.timed


def _envelope(*said: Any) -> PlanEnvelope:
    """Of a plan of these fields."""
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
