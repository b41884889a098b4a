"""Ranks that copy when a test says so, and know what is in every slot: no bytes, but whose bytes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offload.messages import LOAD, Ids, JobReport, StepPlan, WorkerReport
from offload.testing.memory_engine import Kv, MemoryEngine


class Fill(NamedTuple):
    """What is in a slot, and the store job that put it there."""

    kv: Kv | None
    job_id: int


@dataclass(eq=False)
class Copy:
    """A job of a plan. ``request_id`` and ``fills`` are those of a load. ``end`` by rank: its good blocks."""

    job_id: int
    block_ids: Ids
    slots: Ids
    ranks: set[int]
    request_id: str | None = None
    fills: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    hung: set[int] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    worst: int | None = None

    @property
    def is_load(self) -> bool:
        return self.request_id is not None


class Polled(NamedTuple):
    """What all ranks say in one step; ``ended`` restores are those of which all ranks have told."""

    report: WorkerReport | None
    invalid: set[int]
    ended: list[str]
    failed: set[str]


@dataclass
class _Told:
    """Of a restore on one rank: jobs that have not ended, and blocks that were not filled."""

    left: set[int]
    unfilled: set[int] = field(default_factory=set)
    is_worthless: bool = False


class Ranks:
    """Copies happen at the last moment, when they end: what may be reused before that is seen."""

    def __init__(self, engine: MemoryEngine, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.slots: list[dict[int, Fill]] = [{} for _ in range(num_ranks)]
        self.copies: dict[int, Copy] = {}
        self.may_seem_foreign = False
        """A copy has hung on one of several ranks: what another rank did not fill may seem a sibling's."""
        self._engine = engine
        self._restores: dict[tuple[str, int], _Told] = {}
        self._waiting: dict[str, int] = {}

    def take(self, plan: StepPlan) -> None:
        """A step begins."""
        for order in plan.orders:
            is_load = order.route == LOAD
            blocks, slots = (order.targets, order.sources) if is_load else (order.sources, order.targets)
            for job_id, start, stop in order.parts:
                part = slice(start, stop)
                copy = Copy(job_id, blocks[part], slots[part], set(range(self.num_ranks)), order.request_id)
                if order.fills is not None:
                    copy.fills = order.fills[part].tolist()
                self.copies[job_id] = copy
            if order.request_id is not None:
                for rank in range(self.num_ranks):
                    self._restores[order.request_id, rank] = _Told({part.job_id for part in order.parts})
                self._waiting[order.request_id] = self.num_ranks
        for job_id in plan.cancelled:
            if job_id in self.copies:
                self.copies[job_id].is_cancelled = True

    def end(self, copy: Copy, rank: int, num_good: int) -> None:
        """That copy ends in the next step, with so many leading blocks good."""
        if rank in copy.ranks:
            copy.ends[rank] = num_good

    def hang(self, copy: Copy, rank: int) -> None:
        """That copy is past its deadline in the next step."""
        if rank in copy.ranks and rank not in copy.ends:
            copy.hung.add(rank)
            self.may_seem_foreign |= self.num_ranks > 1

    def end_all(self) -> None:
        """All copies end well in the next step, as far as they still can."""
        for copy in self.copies.values():
            for rank in copy.ranks:
                copy.ends.setdefault(rank, len(copy.slots))

    def poll(self) -> Polled:
        """A step ends."""
        polled = Polled(WorkerReport(), set(), [], set())
        assert polled.report is not None
        for copy in list(self.copies.values()):
            for rank in sorted(copy.hung - copy.told):
                copy.told.add(rank)
                polled.report.add(copy.job_id, JobReport(0, 0, True))
                self._tell(copy, rank, 0, polled, is_stuck=True)
            for rank, num_good in copy.ends.items():
                copy.ranks.discard(rank)
                self._move(copy, rank, num_good)
                if copy.is_cancelled or rank in copy.told:
                    num_good = 0
                polled.report.add(copy.job_id, JobReport(1, num_good))
                self._tell(copy, rank, num_good, polled, is_stuck=False)
            copy.ends.clear()
            if not copy.ranks:
                del self.copies[copy.job_id]
        return polled if polled.report.jobs else polled._replace(report=None)

    def _move(self, copy: Copy, rank: int, num_good: int) -> None:
        """Bytes move. A copy that falls short leaves rubbish."""
        slots = self.slots[rank]
        copy.worst = num_good if copy.worst is None else min(copy.worst, num_good)
        blocks: list[Any] = self._engine.blocks(copy.block_ids)
        for index, (slot, block) in enumerate(zip(copy.slots.tolist(), blocks, strict=True)):
            is_good = index < num_good
            if not copy.is_load:
                slots[slot] = Fill(block.kv if is_good else None, copy.job_id)
                continue
            fill = slots.get(slot)
            assert fill is not None and fill.job_id == copy.fills[index], (
                f"job {copy.job_id} loads slot {slot} of job {copy.fills[index]}, it has {fill}"
            )
            block.kv = fill.kv if index < copy.worst else None

    def _tell(self, copy: Copy, rank: int, num_good: int, polled: Polled, *, is_stuck: bool) -> None:
        """What a worker tells the scheduler of a restore, once all its parts have ended."""
        request_id = copy.request_id
        if request_id is None or (not is_stuck and rank in copy.told):
            return
        told = self._restores[request_id, rank]
        told.left.discard(copy.job_id)
        told.is_worthless |= is_stuck or copy.is_cancelled
        told.unfilled |= set(copy.block_ids[num_good:].tolist())
        if told.left:
            return
        del self._restores[request_id, rank]
        self._waiting[request_id] -= 1
        if told.is_worthless:
            polled.failed.add(request_id)
        else:
            polled.invalid.update(told.unfilled)
        if not self._waiting[request_id]:
            del self._waiting[request_id]
            polled.ended.append(request_id)
