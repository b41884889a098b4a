"""What only the copier for host memory does: threads of its own, and copies that fail on the way."""

import ctypes
import threading
from unittest import mock

import numpy as np
import pytest

from offload.messages import GPU_ROUTES, LOAD, STORE
from offload.worker.copiers import CopyEnd, CpuCopier
from offload.worker.layout import CopyBatch

pytestmark = pytest.mark.timeout(30)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-offload-")]


def test_closing_ends_the_threads() -> None:
    before = threads()
    copier = CpuCopier()
    assert len(threads()) == len(before) + len(GPU_ROUTES)
    copier.close(seconds=30)
    assert threads() == before


def test_threads_do_not_keep_the_process_alive() -> None:
    copier = CpuCopier()
    assert all(thread.daemon for thread in threads())
    copier.close(seconds=30)


def test_copies_run_beside_the_caller() -> None:
    here = threading.get_ident()
    movers: list[int] = []
    copier = CpuCopier()
    with mock.patch.object(ctypes, "memmove", side_effect=lambda *_: movers.append(threading.get_ident())):
        for direction in GPU_ROUTES:
            copier.submit(1, direction, batch([1], [2], [3]))
        copier.drain()
    copier.close(seconds=30)
    assert len(set(movers)) == 2
    assert here not in movers


def test_a_copy_that_fails_ends_its_batch_and_no_other() -> None:
    def move(target: int, source: int, size: int) -> None:
        if source == 666:
            raise OSError("bad address")

    copier = CpuCopier()
    with mock.patch.object(ctypes, "memmove", move):
        copier.submit(1, STORE, batch([1, 2, 666, 3], [5, 6, 7, 8], [1, 1, 1, 1]))
        copier.submit(2, STORE, batch([1], [5], [1]))
        copier.drain()
    assert sorted(copier.poll()) == [CopyEnd(1, 2, "OSError: bad address"), CopyEnd(2, 1, None)]
    copier.close(seconds=30)


def test_a_malformed_batch_ends_as_failed_and_later_ones_are_served() -> None:
    copier = CpuCopier()
    with mock.patch.object(ctypes, "memmove"):
        copier.submit(1, LOAD, batch([1, 2], [5], [1, 1]))
        copier.submit(2, LOAD, batch([1], [5], [1]))
        copier.drain()
    bad, good = sorted(copier.poll())
    assert (bad.job_id, bad.num_copied) == (1, 1)
    assert bad.error is not None
    assert good == CopyEnd(2, 1, None)
    copier.close(seconds=30)


def batch(sources: list[int], targets: list[int], sizes: list[int]) -> CopyBatch:
    return CopyBatch(*(np.array(column, dtype=np.int64) for column in (sources, targets, sizes)))
