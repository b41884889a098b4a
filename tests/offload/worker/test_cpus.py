"""Threads of a worker whose compute is bound to a CPU."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from offload.worker import cpus
from offload.worker.checker import seal_thread
from offload.worker.cpus import beside_compute, free_cpus, stay_on

ALL = os.sched_getaffinity(0)
ONE = {min(ALL)}

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="there is one CPU only")


def in_child(work: Callable[[], Any]) -> Any:
    """What that returns in a child process, whose thread is bound to one CPU."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        stay_on(ONE)
        there.send(work())

    child = context.Process(target=run)
    child.start()
    try:
        assert here.poll(30), "the child says nothing"
        return here.recv()
    finally:
        child.join(30)


def of_thread() -> set[int]:
    """CPUs of a thread that is started now."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(os.sched_getaffinity, 0).result()


@pytest.mark.parametrize(("is_on_cpu", "expected"), [(True, ALL), (False, ONE)])
def test_threads_that_are_started_within(is_on_cpu: bool, expected: set[int]) -> None:
    def work() -> tuple[set[int], ...]:
        with beside_compute(is_on_cpu=is_on_cpu):
            within = of_thread()
        return within, of_thread(), os.sched_getaffinity(0)

    assert in_child(work) == (expected, ONE, ONE)


def test_a_thread_that_begins_later_runs_where_its_maker_might() -> None:
    def work() -> set[int]:
        with beside_compute(is_on_cpu=True):
            executor = seal_thread()
        with executor:
            return executor.submit(os.sched_getaffinity, 0).result()

    assert in_child(work) == ALL


def test_the_thread_that_computes_is_bound_again_after_an_error() -> None:
    def work() -> set[int]:
        with pytest.raises(ValueError, match="no pool"), beside_compute(is_on_cpu=True):
            raise ValueError("no pool")
        return os.sched_getaffinity(0)

    assert in_child(work) == ONE


def test_nothing_is_freed_where_nothing_is_bound() -> None:
    assert free_cpus() == ALL
    with beside_compute(is_on_cpu=True):
        assert os.sched_getaffinity(0) == ALL


def test_threads_stay_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs of other NUMA nodes are left alone."""
    monkeypatch.setattr(cpus, "cpus_near", lambda own: own)
    assert in_child(free_cpus) == ONE


def test_a_refusal_changes_nothing() -> None:
    thread = threading.Thread(target=stay_on, args=({100_000},))
    thread.start()
    thread.join()
    assert os.sched_getaffinity(0) == ALL
