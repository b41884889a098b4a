"""The ledger beside a dict of jobs in which every rank's report is kept."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from allocator import StorePlan
from offload.scheduler.jobs import JobLedger, LoadJob, Restore, StoreJob
from tests.strategies import thorough

BLOCK_IDS = st.lists(st.integers(0, 12), max_size=6, unique=True)
NO_PIN: Any = None
"""The ledger keeps pins and plans for others and looks into neither."""


@dataclass
class JobModel:
    """One job, and all that was said about it."""

    restore: Restore | None
    num_blocks: int
    ranks_left: int
    copied: list[int] = field(default_factory=list)
    spoiled: bool = False
    given_up: bool = False
    held: int = 0

    @property
    def num_copied(self) -> int:
        return 0 if self.spoiled else min([self.num_blocks, *self.copied])


def restore_of(num_blocks: int, first: int = 0) -> Restore:
    hashes = [b"root"] * first + [bytes([index]) for index in range(num_blocks)]
    return Restore("a request", first, NO_PIN, hashes, np.arange(num_blocks))


class LedgerMachine(RuleBasedStateMachine):
    in_flight = Bundle("in_flight")

    @initialize(num_ranks=st.integers(1, 3))
    def make(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ledger = JobLedger(num_ranks)
        self.model: dict[int, JobModel] = {}
        self.over: set[int] = set()
        self.good_stops: dict[int, dict[int, None]] = {}

    @rule(target=in_flight, block_ids=BLOCK_IDS)
    def open_store(self, block_ids: list[int]) -> int:
        hashes = [bytes([block_id]) for block_id in block_ids]
        plan = StorePlan(0, 0, hashes, np.arange(len(hashes), dtype=np.int64)[:, None], None)
        blocks: list[Any] = list(block_ids)
        job = self.ledger.open_store(plan, blocks)
        assert isinstance(job, StoreJob)
        assert job.plan is plan
        assert job.blocks is blocks
        return self._opened(job, JobModel(None, len(blocks), self.num_ranks, held=len(blocks)))

    @rule(target=in_flight, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def open_load(self, sizes: list[int]) -> Any:
        restore = restore_of(sum(sizes))
        stops = list(accumulate(sizes))
        jobs = [self.ledger.open_load(restore, *part) for part in pairwise([0, *stops])]
        self.good_stops[id(restore)] = {}
        for job in jobs:
            self._opened(job, JobModel(restore, job.stop - job.start, self.num_ranks))
        return multiple(*(job.job_id for job in jobs))

    @rule(target=in_flight, job_id=consumes(in_flight), data=st.data())
    def report(self, job_id: int, data: st.DataObject) -> Any:
        model = self.model[job_id]
        gives_up = data.draw(st.sampled_from([False, False, True]), label="given up")
        num_ranks = data.draw(st.integers(0 if gives_up else 1, model.ranks_left), label="ranks")
        num_copied = 0 if gives_up else data.draw(st.integers(0, model.num_blocks), label="copied")
        before, was_given_up = model.num_copied, model.given_up
        model.given_up |= gives_up
        model.copied.append(num_copied)
        model.ranks_left -= num_ranks
        progress = self.ledger.report(job_id, num_ranks, num_copied, gives_up)
        assert progress is not None
        assert progress.job.job_id == job_id
        assert progress.gave_up == (gives_up and not was_given_up)
        assert progress.job.num_copied == model.num_copied
        assert progress.fell_short == (model.num_copied < before)
        assert progress.ended == (model.ranks_left == 0)
        if not progress.ended:
            return job_id
        del self.model[job_id]
        self.over.add(job_id)
        if isinstance(progress.job, LoadJob):
            self._landed(progress.job, model)
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
            model.spoiled |= model.restore is None

    @rule(data=st.data())
    def take_held(self, data: st.DataObject) -> None:
        stores = [job_id for job_id, model in self.model.items() if model.restore is None]
        if stores:
            job_id = data.draw(st.sampled_from(stores))
            job = self.ledger._jobs[job_id]
            assert isinstance(job, StoreJob)
            assert len(self.ledger.take_held(job)) == self.model[job_id].held
            self.model[job_id].held = 0

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        loads = {job_id: model for job_id, model in self.model.items() if model.restore is not None}
        assert len(self.ledger) == len(self.model)
        assert self.ledger.num_held_blocks == sum(model.held for model in self.model.values())
        stuck = [model.num_blocks for model in loads.values() if model.given_up]
        assert self.ledger.num_stuck_blocks == sum(stuck)
        assert self.ledger.num_given_up == sum(model.given_up for model in self.model.values())
        assert [(job.job_id, job.restore, job.num_copied) for job in self.ledger.loads()] == [
            (job_id, model.restore, model.num_copied) for job_id, model in loads.items()
        ]

    def _opened(self, job: StoreJob | LoadJob, model: JobModel) -> int:
        assert job.job_id not in self.model
        assert job.job_id not in self.over, "a job id was used twice"
        assert (job.ranks_left, job.num_copied) == (self.num_ranks, model.num_blocks)
        self.model[job.job_id] = model
        return job.job_id

    def _landed(self, job: LoadJob, model: JobModel) -> None:
        """The leading blocks that are good are those before the first that is not here."""
        ended = self.good_stops[id(job.restore)]
        ended.update(dict.fromkeys(range(job.start, job.start + model.num_copied)))
        expected = next(index for index in range(len(job.restore.block_ids) + 1) if index not in ended)
        assert job.restore.num_landed == expected
        left = [other for other in self.model.values() if other.restore is job.restore]
        assert job.restore.parts_left == len(left)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = thorough(120)


def test_a_job_fails_as_soon_as_one_rank_falls_short_and_ends_with_the_last() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open_load(restore_of(2), 0, 2)
    reports = [ledger.report(job.job_id, 1, num_copied) for num_copied in (2, 1, 2)]
    assert [(each.fell_short, each.ended) for each in reports if each] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert job.num_copied == 1


def test_news_of_a_job_is_news_once() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open_load(restore_of(3), 0, 3)
    reports = [ledger.report(job.job_id, 0, 1, True), ledger.report(job.job_id, 1, 1, True)]
    assert [(each.fell_short, each.gave_up) for each in reports if each] == [(True, True), (False, False)]


def test_a_job_ends_with_the_last_of_its_ranks_however_they_are_reported() -> None:
    ledger = JobLedger(num_ranks=3)
    job = ledger.open_load(restore_of(2), 0, 2)
    reports = [ledger.report(job.job_id, num_ranks, 2) for num_ranks in (1, 2)]
    assert [each.ended for each in reports if each] == [False, True]


def test_a_restore_counts_its_parts() -> None:
    ledger = JobLedger(num_ranks=1)
    restore = restore_of(4)
    jobs = [ledger.open_load(restore, 0, 1), ledger.open_load(restore, 1, 4)]
    assert (restore.parts_left, restore.restore_id) == (2, jobs[0].job_id)
    for left, job in zip((1, 0), jobs, strict=True):
        ledger.report(job.job_id, 1, job.num_blocks)
        assert restore.parts_left == left


def test_a_spoiled_store_ends_with_nothing_copied_whatever_is_reported() -> None:
    ledger = JobLedger(num_ranks=1)
    plan = StorePlan(0, 0, [b"x", b"y"], np.zeros((2, 1), dtype=np.int64), None)
    job = ledger.open_store(plan, [4, 5])
    ledger.spoil_stores()
    progress = ledger.report(job.job_id, 1, 2)
    assert progress is not None
    assert progress.ended
    assert progress.job.num_copied == 0


def test_a_restore_has_the_beginning_of_a_chain_in_common() -> None:
    chain = [b"root", *(bytes([index]) for index in range(6)), b"more"]
    restore = restore_of(6, first=1)
    assert restore.num_common(chain) == 6
    for size in range(1, 7):
        assert restore.num_common(chain[:size]) == size - 1
        assert restore.num_common([*chain[:size], *(b"other %d" % at for at in range(8))]) == size - 1
