"""What all flows work with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allocator import CpuOffloadingBlockAllocator, Note, StorePlan
from offload.messages import BROKEN, Ids, JobReport, Route
from offload.observe.metrics import Metrics
from offload.scheduler.arrivals import Arrivals
from offload.scheduler.costs import Costs
from offload.scheduler.engine import Engine, Request
from offload.scheduler.flow import Flow, Job
from offload.scheduler.jobs import JobLedger
from offload.scheduler.lasting import Lasting
from offload.scheduler.spelling import SlotTokens
from offload.scheduler.why.note import name_of
from offload.scheduler.why.notes import Notes


class Compute(NamedTuple):
    """How an engine computes.

    Attributes:
        overlaps: whether a step may be scheduled before the one before it has ended.
        shares_cores: whether copies take cores that compute.
    """

    overlaps: bool = True
    shares_cores: bool = False


@dataclass(frozen=True, slots=True)
class LateStores:
    """Blocks are stored once the GPU is about to evict them.

    Attributes:
        is_gapped: whether the pool may lack what the GPU has of a chain.
        overlaps: whether a step may be scheduled before the one before it has ended.
        fills_room: blocks are stored as they fill while the pool has room, as nothing else needs it.
        hear: told the id of a request that is over when something of it has been stored since.
    """

    is_gapped: bool
    overlaps: bool
    fills_room: bool = False
    hear: list[Callable[[str], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Common:
    """One for each scheduler's side.

    Attributes:
        allocator: of the pool.
        ledger: of the jobs.
        engine: whose blocks these are.
        metrics: counts.
        clock: in seconds.
        block_size: tokens per block.
        slot_bytes: bytes of a block in the pool, on all ranks.
        block_bytes: the same on the GPU, where ranks may have copies.
        filled_by: for every slot the job that filled it, ``int64[slots]``.
        arrivals: what is on its way into the pool from below.
        costs: what was measured.
        tokens: that slots hold KV of, as far as KV events are to tell of it.
        notes: of requests, for whoever asks why.
        lasting: told what the pool holds if it outlives the engine.
        record_events: whether to list what enters and leaves places.
        late: how blocks are stored late; None: they are stored as they fill.
    """

    allocator: CpuOffloadingBlockAllocator
    ledger: JobLedger
    engine: Engine
    metrics: Metrics
    clock: Callable[[], float]
    block_size: int
    slot_bytes: int
    block_bytes: int
    filled_by: Ids
    arrivals: Arrivals
    costs: Costs
    tokens: SlotTokens
    notes: Notes
    lasting: Lasting | None = None
    record_events: bool = False
    late: LateStores | None = None

    @property
    def is_gapped(self) -> bool:
        """Whether the pool may lack what the GPU has of a chain."""
        return self.late is not None and self.late.is_gapped

    def slots_in(self, share: float) -> int:
        """Slots of that part of the pool, as large as it is now."""
        return int(self.allocator.capacity * share)

    def count_prompt(self, num_tokens: int, num_local: int) -> None:
        """A prompt of so many tokens was admitted, of which the GPU had ``num_local``."""
        self.metrics.count("prompt_tokens", num_tokens)
        self.metrics.count("local_tokens", num_local)

    def count_failed(self, route: Route) -> None:
        """A job of that route, or a restore, has failed."""
        self.metrics.count("failed_jobs")
        self.metrics.count("route_failed_jobs", 1, route)

    def account(self, job: Job[Any], report: JobReport, *, has_ended: bool) -> None:
        """Ranks have reported so much of a job; ``has_ended``: they were the last."""
        self.metrics.count("route_bytes", report.nbytes, job.flow.route)
        self.metrics.count("route_seconds", max(report.seconds - job.seconds, 0.0), job.flow.route)
        self.metrics.count("route_broken_jobs", report.reason == BROKEN, job.flow.route)
        job.seconds = max(job.seconds, report.seconds)
        job.nbytes += report.nbytes
        if has_ended and job.num_good == job.num_blocks:
            self.costs.link(job.flow.route).add(job.nbytes, job.seconds, self.clock())

    def drop_jobs(self, flow: Flow[Any]) -> list[int]:
        """Nobody wants what the jobs of a flow bring, or write, any more. Returns which these are."""
        jobs = list(self.ledger.of(flow))
        for job in jobs:
            job.task.is_dropped = True
        return [job.job_id for job in jobs]

    def may_last(self, request: Request) -> bool:
        """Whether what is stored of that request may outlive the engine."""
        return self.lasting is not None and self.lasting.is_meant(request)

    def note_of(self, request: Request) -> Note | None:
        """Has a plan for that request spelled, as its events are to be; None: there are none.

        The spelling also has what the bag at the end of the plan is of. The plan has to be made next: what
        leaves the pool for it leaves for that request.
        """
        self.allocator.departures.begin(name_of(request.request_id), self.clock())
        if not self.record_events:
            return None
        spelled, reach = self.engine.spelled, self.engine.groups.reach
        return lambda start, stop: spelled(request, max(0, min(start, stop - reach)), stop)

    def committed(self, plan: StorePlan, *, is_lasting: bool = True, late: str | None = None) -> None:
        """That plan was; what it fills may outlive the engine if it ``is_lasting``.

        ``late``: the id of the request that it is of, if that is over.
        """
        self.tokens.keep(plan)
        if late is not None:
            for hear in () if self.late is None else self.late.hear:
                hear(late)
        if is_lasting and self.lasting is not None:
            self.lasting.committed(plan, self.filled_by[plan.all_slots])
