"""On which CPUs threads run that work beside an engine which computes on CPUs."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from offload.worker.pool.numa import cpus_near


def stay_on(cpus: set[int]) -> None:
    """This thread runs there from now on, and so do those that it starts; as before if that is refused.

    Nothing is said where it does already: what is said once holds also when the process is given more CPUs.
    """
    if cpus != os.sched_getaffinity(0):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def free_cpus() -> set[int]:
    """CPUs of this thread, and those near them that only the process's parent may use."""
    own, parent = os.sched_getaffinity(0), multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        with suppress(OSError):  # it has ended
            return own | (os.sched_getaffinity(parent.pid) & cpus_near(own))
    return own


@contextmanager
def beside_compute(*, is_on_cpu: bool) -> Iterator[None]:
    """Threads that are started within do not share the one CPU of this thread, which computes.

    OpenMP binds the thread of a CPU engine's worker to a CPU, and threads inherit that: the engine would wait
    whenever one of them copies. ``is_on_cpu``: whether it is such an engine. Where another one is bound, that
    is its user's wish.
    """
    if not is_on_cpu:
        yield
        return
    own = os.sched_getaffinity(0)
    stay_on(free_cpus())
    try:
        yield
    finally:
        stay_on(own)
