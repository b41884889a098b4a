"""The ledger beside a dict of jobs in which every rank's report is kept."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from allocator import StorePlan
from offload.ledger import JobLedger, LoadJob, StoreJob
from tests.strategies import thorough

BLOCK_IDS = st.lists(st.integers(0, 12), max_size=6, unique=True)
REQUESTS = st.sampled_from(["a", "b", "c"])
NO_PIN: Any = None
"""The ledger keeps pins and plans for others and looks into neither."""


@dataclass
class JobModel:
    """One job, and all that was said about it."""

    request_id: str | None
    block_ids: list[int]
    ranks_left: int
    copied: list[int] = field(default_factory=list)
    spoiled: bool = False

    @property
    def num_copied(self) -> int:
        return 0 if self.spoiled else min([len(self.block_ids), *self.copied])


class LedgerMachine(RuleBasedStateMachine):
    in_flight = Bundle("in_flight")

    @initialize(num_ranks=st.integers(1, 3))
    def make(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ledger = JobLedger(num_ranks)
        self.model: dict[int, JobModel] = {}
        self.over: set[int] = set()

    @rule(target=in_flight, block_ids=BLOCK_IDS)
    def open_store(self, block_ids: list[int]) -> int:
        hashes = [bytes([block_id]) for block_id in block_ids]
        plan = StorePlan(0, 0, hashes, np.arange(len(hashes), dtype=np.int32)[:, None], None)
        blocks: list[Any] = list(block_ids)
        job = self.ledger.open_store(plan, np.array(block_ids, dtype=np.int64), blocks)
        assert isinstance(job, StoreJob)
        assert job.plan is plan
        assert job.blocks is blocks
        return self._opened(job, JobModel(None, block_ids, self.num_ranks))

    @rule(target=in_flight, request_id=REQUESTS, block_ids=BLOCK_IDS)
    def open_load(self, request_id: str, block_ids: list[int]) -> int:
        hashes = [bytes([block_id]) for block_id in block_ids]
        job = self.ledger.open_load(request_id, NO_PIN, hashes, np.array(block_ids, dtype=np.int64))
        assert isinstance(job, LoadJob)
        assert (job.request_id, job.hashes) == (request_id, hashes)
        return self._opened(job, JobModel(request_id, block_ids, self.num_ranks))

    @rule(target=in_flight, job_id=consumes(in_flight), data=st.data())
    def report(self, job_id: int, data: st.DataObject) -> Any:
        model = self.model[job_id]
        num_ranks = data.draw(st.integers(1, model.ranks_left), label="ranks")
        num_copied = data.draw(st.integers(0, len(model.block_ids)), label="copied")
        before = model.num_copied
        model.copied.append(num_copied)
        model.ranks_left -= num_ranks
        progress = self.ledger.report(job_id, num_ranks, num_copied)
        assert progress is not None
        assert progress.job.job_id == job_id
        assert progress.job.num_copied == model.num_copied
        assert progress.fell_short == (model.num_copied < before)
        assert progress.ended == (model.ranks_left == 0)
        if not progress.ended:
            return job_id
        del self.model[job_id]
        self.over.add(job_id)
        return multiple()

    @rule(data=st.data(), num_ranks=st.integers(1, 3), num_copied=st.integers(0, 6))
    def report_of_a_job_that_is_not_in_flight(
        self, data: st.DataObject, num_ranks: int, num_copied: int
    ) -> None:
        never = [job_id for job_id in range(-1, 60) if job_id not in self.model]
        job_id = data.draw(st.sampled_from(sorted(self.over) or never) | st.sampled_from(never))
        assert self.ledger.report(job_id, num_ranks, num_copied) is None

    @rule()
    def spoil(self) -> None:
        self.ledger.spoil_stores()
        for model in self.model.values():
            model.spoiled |= model.request_id is None

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        loads = {job_id: model for job_id, model in self.model.items() if model.request_id is not None}
        held = sum(len(model.block_ids) for model in self.model.values() if model.request_id is None)
        assert len(self.ledger) == len(self.model)
        assert self.ledger.num_held_blocks == held
        assert [(job.job_id, job.request_id, job.num_copied) for job in self.ledger.loads()] == [
            (job_id, model.request_id, model.num_copied) for job_id, model in loads.items()
        ]

    def _opened(self, job: StoreJob | LoadJob, model: JobModel) -> int:
        assert job.job_id not in self.model
        assert job.job_id not in self.over, "a job id was used twice"
        assert job.block_ids.tolist() == model.block_ids
        assert (job.ranks_left, job.num_copied) == (self.num_ranks, len(model.block_ids))
        self.model[job.job_id] = model
        return job.job_id


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = thorough(120)


def test_a_job_fails_as_soon_as_one_rank_falls_short_and_ends_with_the_last() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open_load("a", NO_PIN, [b"x", b"y"], np.array([4, 5]))
    reports = [ledger.report(job.job_id, 1, num_copied) for num_copied in (2, 1, 2)]
    assert [(each.fell_short, each.ended) for each in reports if each] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert job.num_copied == 1


def test_a_spoiled_store_ends_with_nothing_copied_whatever_is_reported() -> None:
    ledger = JobLedger(num_ranks=1)
    plan = StorePlan(0, 0, [b"x", b"y"], np.zeros((2, 1), dtype=np.int32), None)
    job = ledger.open_store(plan, np.array([4, 5]), [4, 5])
    ledger.spoil_stores()
    progress = ledger.report(job.job_id, 1, 2)
    assert progress is not None
    assert progress.ended
    assert progress.job.num_copied == 0
