"""The ledger beside a dict of jobs in which every rank's report is kept."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from offload.scheduler.jobs import JobLedger
from tests.strategies import thorough

FLOWS: list[Any] = ["one flow", "another"]
"""The ledger keeps flows, tasks and blocks for others and looks into none."""


@dataclass
class JobModel:
    """One job, and all that was said about it."""

    flow: Any
    task: Any
    num_blocks: int
    ranks_left: int
    copied: list[int] = field(default_factory=list)
    given_up: bool = False

    @property
    def num_good(self) -> int:
        return min([self.num_blocks, *self.copied])


class LedgerMachine(RuleBasedStateMachine):
    in_flight = Bundle("in_flight")

    @initialize(num_ranks=st.integers(1, 3))
    def make(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ledger = JobLedger(num_ranks)
        self.model: dict[int, JobModel] = {}
        self.over: set[int] = set()

    @rule(target=in_flight, flow=st.sampled_from(FLOWS), num_blocks=st.integers(0, 6), holds=st.booleans())
    def open(self, flow: Any, num_blocks: int, holds: bool) -> int:
        task = object()
        blocks: list[Any] = list(range(num_blocks))
        job = self.ledger.open(flow, task, num_blocks, blocks if holds else None)
        assert (job.flow, job.task, job.num_blocks) == (flow, task, num_blocks)
        assert job.blocks == (blocks if holds else [])
        assert job.job_id not in self.model
        assert job.job_id not in self.over, "a job id was used twice"
        assert (job.ranks_left, job.num_good) == (self.num_ranks, num_blocks)
        self.model[job.job_id] = JobModel(flow, task, num_blocks, self.num_ranks)
        return job.job_id

    @rule(target=in_flight, job_id=consumes(in_flight), data=st.data())
    def report(self, job_id: int, data: st.DataObject) -> Any:
        model = self.model[job_id]
        gives_up = data.draw(st.sampled_from([False, False, True]), label="given up")
        num_ranks = data.draw(st.integers(0 if gives_up else 1, model.ranks_left), label="ranks")
        num_good = 0 if gives_up else data.draw(st.integers(0, model.num_blocks), label="copied")
        before, was_given_up = model.num_good, model.given_up
        model.given_up |= gives_up
        model.copied.append(num_good)
        model.ranks_left -= num_ranks
        progress = self.ledger.report(job_id, num_ranks, num_good, gives_up)
        assert progress is not None
        assert progress.job.job_id == job_id
        assert progress.gave_up == (gives_up and not was_given_up)
        assert progress.job.num_good == model.num_good
        assert progress.fell_short == (model.num_good < before)
        assert progress.ended == (model.ranks_left == 0)
        if not progress.ended:
            return job_id
        del self.model[job_id]
        self.over.add(job_id)
        return multiple()

    @rule(data=st.data(), num_ranks=st.integers(1, 3), num_good=st.integers(0, 6))
    def report_of_a_job_that_is_not_in_flight(
        self, data: st.DataObject, num_ranks: int, num_good: int
    ) -> None:
        never = [job_id for job_id in range(-1, 60) if job_id not in self.model]
        job_id = data.draw(st.sampled_from(sorted(self.over) or never) | st.sampled_from(never))
        assert self.ledger.report(job_id, num_ranks, num_good) is None

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        assert len(self.ledger) == len(self.model)
        assert self.ledger.num_opened == len(self.model) + len(self.over)
        assert self.ledger.num_given_up == sum(model.given_up for model in self.model.values())
        assert [job.job_id for job in self.ledger] == list(self.model)
        for flow in FLOWS:
            assert [(job.job_id, job.task, job.num_good) for job in self.ledger.of(flow)] == [
                (job_id, model.task, model.num_good)
                for job_id, model in self.model.items()
                if model.flow == flow
            ]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = thorough(120)


def test_a_job_fails_as_soon_as_one_rank_falls_short_and_ends_with_the_last() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open(FLOWS[0], None, 2)
    reports = [ledger.report(job.job_id, 1, num_good) for num_good in (2, 1, 2)]
    assert [(each.fell_short, each.ended) for each in reports if each] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert job.num_good == 1


def test_news_of_a_job_is_news_once() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open(FLOWS[0], None, 3)
    reports = [ledger.report(job.job_id, 0, 1, True), ledger.report(job.job_id, 1, 1, True)]
    assert [(each.fell_short, each.gave_up) for each in reports if each] == [(True, True), (False, False)]


def test_a_job_ends_with_the_last_of_its_ranks_however_they_are_reported() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open(FLOWS[0], None, 2)
    reports = [ledger.report(job.job_id, num_ranks, 2) for num_ranks in (1, 2)]
    assert [each.ended for each in reports if each] == [False, True]
