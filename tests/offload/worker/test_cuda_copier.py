"""The bookkeeping of the CUDA copier, with streams and events of our own. Its copies: tests/gpu."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.worker.copiers import CopyEnd, CudaCopier
from offload.worker.copiers.cuda import pci_address, register_host_memory, unregister_host_memory
from offload.worker.layout import CopyBatch

MILLISECONDS = 250.0


class FakeCuda:
    """Enough of ``torch.cuda`` to say what was enqueued where, and to finish it when told to."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.num_events = 0
        self.current = self.Stream("cuda:0", name="engine")
        self.error = 0
        self.no_events = self.no_times = False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.done = False
                self.stream: FakeCuda.Stream | None = None
                cuda.num_events += 1

            def record(self, stream: FakeCuda.Stream) -> None:
                if cuda.no_events:
                    raise RuntimeError("out of memory")
                if self.stream is not None:  # recorded again: the later one counts
                    self.stream.events.remove(self)
                self.stream = stream
                self.done = False
                stream.events.append(self)

            def query(self) -> bool:
                return self.done

            def elapsed_time(self, end: Any) -> float:
                assert self.done and end.done, "both have to be over"
                if cuda.no_times:
                    raise RuntimeError("device is broken")
                return MILLISECONDS

        class Stream(FakeCuda.Stream):
            def wait_stream(self, stream: FakeCuda.Stream) -> None:
                cuda.log.append(("wait", self, stream))

            def synchronize(self) -> None:
                self.finish(len(self.events))

        self.patches = {"Event": Event, "Stream": Stream, "stream": self.use}
        self.patches["current_stream"] = lambda device: self.current
        self.patches["cudart"] = lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: self._status("register", address, nbytes, flags),
            cudaHostUnregister=lambda address: self._status("unregister", address),
            cudaGetErrorString=lambda status: f"error string {status.value}",
        )

    class Stream:
        def __init__(self, device: Any, name: str = "") -> None:
            self.device, self.name = device, name
            self.events: list[Any] = []

        def finish(self, num_batches: int = 1) -> None:
            """What was enqueued up to the ends of the next ``num_batches`` is done; each has two events."""
            for event in [each for each in self.events if not each.done][: 2 * num_batches]:
                event.done = True

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, *descriptors: torch.Tensor, is_src_access_order_any: bool) -> None:
        """A ``BatchedCopy``."""
        columns = [column.tolist() for column in descriptors]
        self.log.append(("copy", self.current, *columns, is_src_access_order_any))

    def _status(self, *call: Any) -> Any:
        self.log.append(call)
        return SimpleNamespace(value=self.error)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, value in fake.patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


@pytest.fixture
def copier(cuda: FakeCuda) -> CudaCopier:
    return CudaCopier(torch.device("cuda", 0), cuda.copy)


BATCH = CopyBatch(np.array([10, 20]), np.array([30, 40]), np.array([5, 6]))


def test_each_direction_has_a_stream_of_its_own(cuda: FakeCuda, copier: CudaCopier) -> None:
    for direction in GPU_ROUTES:
        copier.submit(1, direction, BATCH)
    streams = [entry[1] for entry in cuda.log]
    assert len(set(map(id, [*streams, cuda.current]))) == 3


@pytest.mark.parametrize(("direction", "any_order"), [(STORE, False), (LOAD, True)])
def test_a_batch_is_one_call_on_its_stream(
    cuda: FakeCuda, copier: CudaCopier, direction: Route, any_order: bool
) -> None:
    engine = cuda.current
    copier.submit(1, direction, BATCH)
    assert [(entry[0], *entry[2:]) for entry in cuda.log] == [("copy", [10, 20], [30, 40], [5, 6], any_order)]
    assert cuda.log[0][1] is not engine
    assert cuda.current is engine


def test_a_fence_makes_its_direction_wait_for_the_engine(cuda: FakeCuda, copier: CudaCopier) -> None:
    copier.fence(STORE)
    copier.submit(1, STORE, BATCH)
    copier.submit(2, LOAD, BATCH)
    wait, store, load = cuda.log
    assert wait == ("wait", store[1], cuda.current)
    assert load[1] is not wait[1]


def test_batches_end_with_their_events(cuda: FakeCuda, copier: CudaCopier) -> None:
    for job_id in (1, 2):
        copier.submit(job_id, STORE, BATCH)
    copier.submit(3, LOAD, BATCH)
    stores, loads = cuda.log[0][1], cuda.log[2][1]
    assert copier.poll() == []
    loads.finish()
    (end,) = copier.poll()
    assert (end, end.seconds) == (CopyEnd(3, 2, None), 0.25)
    stores.finish()
    assert copier.poll() == [CopyEnd(1, 2, None)]
    assert not copier.close(seconds=0), "a batch is still under way"
    copier.drain()
    assert copier.close(seconds=0)
    assert copier.poll() == [CopyEnd(2, 2, None)]
    assert copier.poll() == []


def test_events_of_batches_that_have_ended_are_used_again(cuda: FakeCuda, copier: CudaCopier) -> None:
    for job_id, route in enumerate([STORE, LOAD, STORE]):
        copier.submit(job_id, route, BATCH)
        assert copier.poll() == [], "what an event said of the batch before does not count"
        copier.drain()
        assert copier.poll() == [CopyEnd(job_id, 2, None)]
    assert cuda.num_events == 2
    for job_id in (4, 5):
        copier.submit(job_id, STORE, BATCH)
    assert cuda.num_events == 4


def test_a_refused_batch_ends_only_when_what_was_taken_of_it_is_done(cuda: FakeCuda) -> None:
    def refuse(*descriptors: torch.Tensor, is_src_access_order_any: bool) -> None:
        cuda.copy(*descriptors, is_src_access_order_any=is_src_access_order_any)
        raise RuntimeError("failed at index 1")

    copier = CudaCopier(torch.device("cuda", 0), refuse)
    engine = cuda.current
    copier.submit(1, STORE, BATCH)
    assert copier.poll() == []
    assert cuda.current is engine
    cuda.log[0][1].finish()
    assert copier.poll() == [CopyEnd(1, 0, "RuntimeError: failed at index 1")]


def test_without_an_event_nothing_is_copied(cuda: FakeCuda, copier: CudaCopier) -> None:
    """Nobody could tell when such copies have ended."""
    cuda.no_events = True
    with pytest.raises(RuntimeError, match="out of memory"):
        copier.submit(1, STORE, BATCH)
    assert cuda.log == []
    assert copier.poll() == []
    assert copier.close(seconds=0)


def test_a_batch_whose_time_cannot_be_told_is_not_lost(cuda: FakeCuda, copier: CudaCopier) -> None:
    copier.submit(1, STORE, BATCH)
    copier.drain()
    cuda.no_times = True
    with pytest.raises(RuntimeError, match="device is broken"):
        copier.poll()
    cuda.no_times = False
    assert copier.poll() == [CopyEnd(1, 2, None)]


def test_pointers_outlive_the_call(cuda: FakeCuda) -> None:
    taken: list[int] = []

    def copy(*descriptors: torch.Tensor, is_src_access_order_any: bool) -> None:
        taken.extend(column.data_ptr() for column in descriptors)

    copier = CudaCopier(torch.device("cuda", 0), copy)
    strided = CopyBatch(*np.arange(1, 7).reshape(2, 3).T)
    copier.submit(1, STORE, strided)
    (flight,) = copier._in_flight[STORE]
    assert [column.data_ptr() for column in flight.descriptors] == taken
    assert [column.tolist() for column in flight.descriptors] == [[1, 4], [2, 5], [3, 6]]


def test_memory_is_registered_and_unregistered(cuda: FakeCuda) -> None:
    register_host_memory(4096, 8192)
    unregister_host_memory(4096)
    assert cuda.log == [("register", 4096, 8192, 0), ("unregister", 4096)]


def test_a_refusal_tells_cudas_reason(cuda: FakeCuda) -> None:
    cuda.error = 2
    with pytest.raises(OSError, match=r"cudaHostRegister returned CUDA error 2 \(error string 2\)"):
        register_host_memory(4096, 8192)
    with pytest.raises(OSError, match=r"cudaHostUnregister returned CUDA error 2 \(error string 2\)"):
        unregister_host_memory(4096)


@pytest.mark.parametrize(
    ("numbers", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}, "0000:3b:00.0"),
        ({"pci_domain_id": 0x1A, "pci_bus_id": 7, "pci_device_id": 0x1F}, "001a:07:1f.0"),
        ({}, None),
    ],
    ids=["one", "another", "older torch"],
)
def test_where_a_gpu_sits(
    numbers: dict[str, int], address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**numbers))
    assert pci_address(torch.device("cuda", 0)) == address
