"""What the two sides tell each other: merged in any order, whole after a trip between processes."""

import pickle
from copy import deepcopy
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import (
    LOAD,
    STORE,
    Fingerprint,
    JobReport,
    Order,
    Part,
    StepPlan,
    WorkerFacts,
    WorkerReport,
)
from offload.vllm.wire import NOTHING, PlanEnvelope
from tests.strategies import thorough

FINGERPRINT = Fingerprint("1", "0.32", 2, 16, "bfloat16", "BLHNC")

JOBS = st.dictionaries(
    st.integers(0, 5),
    st.builds(
        JobReport,
        st.integers(0, 4),
        st.integers(0, 9),
        st.booleans(),
        st.floats(0, 9),
        st.integers(0, 99),
    ),
    max_size=4,
)
NAMES = st.lists(st.binary(min_size=2, max_size=2), max_size=3).map(sorted)
REPORTS = st.builds(WorkerReport, JOBS, NAMES)


@given(REPORTS, REPORTS)
@thorough(200)
def test_order_of_reports_does_not_matter(one: WorkerReport, other: WorkerReport) -> None:
    assert one.merged(other) == other.merged(one)


@given(REPORTS, REPORTS, REPORTS)
@thorough(200)
def test_grouping_of_reports_does_not_matter(
    first: WorkerReport, second: WorkerReport, third: WorkerReport
) -> None:
    left = first.merged(second).merged(third)
    assert left == first.merged(second.merged(third))


@given(st.lists(REPORTS, min_size=1, max_size=4))
@thorough(200)
def test_a_job_has_all_its_ranks_and_the_worst_of_what_any_said(reports: list[WorkerReport]) -> None:
    merged = reports[0]
    for report in reports[1:]:
        merged = merged.merged(report)
    said: dict[int, list[JobReport]] = {}
    for report in reports:
        for job_id, job in report.jobs.items():
            said.setdefault(job_id, []).append(job)
    assert merged.jobs == {
        job_id: JobReport(
            sum(job.num_ranks for job in jobs),
            min(job.num_good for job in jobs),
            any(job.given_up for job in jobs),
            max(job.seconds for job in jobs),
            sum(job.nbytes for job in jobs),
            all(job.is_sound for job in jobs),
            max(job.reason for job in jobs),
        )
        for job_id, jobs in said.items()
    }
    assert merged.released == sorted(name for report in reports for name in report.released)


@given(REPORTS, REPORTS)
@thorough(100)
def test_merging_changes_neither_report(one: WorkerReport, other: WorkerReport) -> None:
    before = [WorkerReport(dict(each.jobs), list(each.peers), list(each.released)) for each in (one, other)]
    merged = one.merged(other)
    merged.jobs.clear()
    merged.released.clear()
    assert [one, other] == before


def test_an_empty_report_is_not_dropped_for_being_false() -> None:
    assert WorkerReport()


def test_a_report_that_says_anything_is_not_empty() -> None:
    assert WorkerReport().is_empty
    told = {"served_bytes": 1, "timed": 2, "jobs": {1: JobReport(1, 1)}, "resized": {1: None}}
    for field in fields(WorkerReport):
        said: dict[str, Any] = {field.name: told.get(field.name, ["it"])}
        assert not WorkerReport(**said).is_empty, said


def test_whatever_a_plan_says_arrives() -> None:
    """Each alone: a plan that says nothing is sent by its name."""
    for field in fields(StepPlan)[1:]:
        said: dict[str, Any] = {field.name: 3 if field.name == "timed" else ["it"]}
        plan = StepPlan(FINGERPRINT, **said)
        assert pickle.loads(pickle.dumps(PlanEnvelope.of(plan))) == PlanEnvelope(plan)
    quiet = PlanEnvelope.of(StepPlan(FINGERPRINT))
    assert quiet is NOTHING is pickle.loads(pickle.dumps(quiet))
    assert deepcopy(NOTHING) is NOTHING


def test_a_plan_arrives_whole() -> None:
    block_ids, slots = np.array([5, 3, 9]), np.arange(3, dtype=np.int64) + (1 << 33)
    fills = np.array([1, 1, 4])
    orders = [
        Order(LOAD, [Part(1, 0, 2), Part(4, 2, 3)], slots, block_ids, fills, "request"),
        Order(STORE, [Part(2, 0, 3)], block_ids, slots),
        Order(STORE, [Part(3, 0, 0)], block_ids[:0], slots[:0]),
    ]
    plan = StepPlan(FINGERPRINT, orders, cancelled=[7])
    copy = pickle.loads(pickle.dumps(plan))
    assert isinstance(copy, StepPlan)
    assert copy.cancelled == [7]
    assert copy.fingerprint == FINGERPRINT
    assert [each.route for each in copy.orders] == [LOAD, STORE, STORE]
    assert [each.parts for each in copy.orders] == [each.parts for each in orders]
    load, store, empty = copy.orders
    assert (load.request_id, store.request_id) == ("request", None)
    assert load.fills.tolist() == [1, 1, 4] and store.fills is None
    assert load.targets.tolist() == store.sources.tolist() == [5, 3, 9]
    assert load.sources.tolist() == store.targets.tolist() == slots.tolist()
    for order in copy.orders:
        assert order.sources.dtype == order.targets.dtype == np.int64
    assert len(empty.targets) == 0


def test_plans_do_not_share_their_lists() -> None:
    one, other = StepPlan(FINGERPRINT), StepPlan(FINGERPRINT)
    one.cancelled.append(1)
    assert other == StepPlan(FINGERPRINT)


def test_reports_and_facts_arrive_whole() -> None:
    report = WorkerReport({3: JobReport(2, 5, False, 0.25, 4096)})
    for message in (report, WorkerReport(), WorkerFacts(100, 4096, FINGERPRINT)):
        copy = pickle.loads(pickle.dumps(message))
        assert type(copy) is type(message)
        assert copy == message
