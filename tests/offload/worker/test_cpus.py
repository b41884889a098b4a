"""Threads of a worker whose compute is bound to a CPU."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch

from offload.messages import Resize
from offload.worker import cpus
from offload.worker.checker import seal_thread
from offload.worker.cpus import beside_compute, free_cpus, stay_on
from offload.worker.pool.memory import HostMemory
from offload.worker.pool.numa import cpus_near
from offload.worker.resizing import PageThread, WorkerResizing

ALL = os.sched_getaffinity(0)
ONE = {min(ALL)}
NEAR = ALL & cpus_near(ONE)

pytestmark = pytest.mark.skipif(NEAR == ONE, reason="there is one CPU only, on its NUMA node")


def in_child(work: Callable[[], Any]) -> Any:
    """What that returns in a child process, whose thread is bound to one CPU."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        stay_on(ONE)
        there.send(work())

    child = context.Process(target=run, daemon=True)
    child.start()
    there.close()
    try:
        assert here.poll(30), "the child says nothing"
        return here.recv()
    finally:
        child.join(30)


def of_thread() -> set[int]:
    """CPUs of a thread that is started now."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(os.sched_getaffinity, 0).result()


@pytest.mark.parametrize(("is_on_cpu", "expected"), [(True, NEAR), (False, ONE)])
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

    assert in_child(work) == NEAR


def test_so_does_the_one_that_resizes() -> None:
    """It is started by a step, after all others."""

    class Memory:
        def take(self, runs: Sequence[tuple[int, int]]) -> None:
            self.cpus = os.sched_getaffinity(0)

    def work() -> set[int]:
        memory = Memory()
        with beside_compute(is_on_cpu=True):
            resizing = WorkerResizing(cast(HostMemory, memory), PageThread, torch.device("cpu"))
        resizing.begin([Resize(1, np.array([0]), np.array([8]), takes=True)])
        while not resizing.take_ended():
            time.sleep(0.001)
        assert resizing.close(30)
        return memory.cpus

    assert in_child(work) == NEAR


def test_nothing_is_said_where_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel remembers what it is told, also when the process is given more CPUs later."""
    told: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: told.append(cpus))
    stay_on(ALL)
    with beside_compute(is_on_cpu=True), beside_compute(is_on_cpu=False):
        assert not told
    assert not told
    stay_on(ONE)
    assert told == [ONE]


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
