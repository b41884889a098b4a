"""The GPU's side of the copy benchmark and vLLM's own worker in it, on streams and events of our own.

Copies are made at once, in host memory. What a GPU does with them: the tests marked gpu.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.v1.kv_offload.cpu import gpu_worker

from benchmarks.common import report
from benchmarks.copy_bandwidth import __main__ as copy_bandwidth
from benchmarks.copy_bandwidth import devices, native
from benchmarks.copy_bandwidth.arena import arenas
from benchmarks.copy_bandwidth.devices import CudaDevice
from benchmarks.copy_bandwidth.measure import Bench
from benchmarks.copy_bandwidth.moves import Moves, Pattern
from benchmarks.copy_bandwidth.shapes import Shape
from benchmarks.copy_bandwidth.verify import WrongBytesError
from benchmarks.copy_bandwidth.ways import PeakWay

SHAPES = [Shape("one", 1, 96), Shape("layers", 3, 32)]


class OnGpu(torch.Tensor):
    """Host memory that says it is the GPU's."""

    is_cuda = True


class FakeCuda:
    """Streams on which everything has ended as soon as it is enqueued; each event is a millisecond later."""

    def __init__(self) -> None:
        self.clock = itertools.count()
        self.current = self.stream_class()()
        self.engine = self.current
        self.calls: list[tuple[Any, int, bool]] = []
        """Stream, number of copies and whether in any order, of every batch."""
        self.left_out = 0
        """Bytes that no copy brings."""

    def event_class(self) -> type:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.has_time = enable_timing

            def record(self, stream: Any) -> None:
                self.at = next(cuda.clock)

            def query(self) -> bool:
                return True

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                assert self.has_time and end.has_time
                return float(end.at - self.at)

        return Event

    def stream_class(self) -> type:
        class Stream:
            def __init__(self, *_: Any, **__: Any) -> None: ...

            def wait_stream(self, stream: Any) -> None: ...

            def synchronize(self) -> None: ...

        return Stream

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool
    ) -> None:
        assert self.current is not self.engine
        self.calls.append((self.current, len(sizes), is_src_access_order_any))
        columns = [column.tolist() for column in (targets, sources, sizes)]
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size - self.left_out)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    event, stream = fake.event_class(), fake.stream_class()
    for name, value in {
        "Event": event,
        "Stream": stream,
        "stream": fake.use,
        "current_stream": lambda *_: fake.current,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (1000, 2000),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(devices, "pci_address", lambda device: None)
    monkeypatch.setattr(_custom_ops, "swap_blocks_batch", fake.swap_blocks_batch)
    platform = SimpleNamespace(
        Stream=stream, stream=fake.use, current_stream=lambda: fake.current, is_xpu=lambda: False
    )
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "HAS_TRITON", False)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False)
    monkeypatch.setattr(
        CudaDevice,
        "make_cache",
        lambda _, nbytes: torch.ones(nbytes, dtype=torch.uint8).as_subclass(OnGpu),
    )
    return fake


def rows_of(shape: Shape, num_blocks: int, rounds: int = 2) -> list[dict[str, Any]]:
    device = CudaDevice(torch.device("cpu"))
    with PeakWay.opened(device, 1000) as peak, arenas(device, [shape], 2 * num_blocks) as [arena]:
        bench = Bench(device, peak, rounds, torch_pieces=1000)
        return [*bench.rows(arena, [num_blocks]), *bench.peak_rows()]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_ways_bring_the_right_bytes_and_are_timed_by_events(cuda: FakeCuda, shape: Shape) -> None:
    rows = rows_of(shape, 20)
    assert {(row["way"], row["ids"], row["direction"]) for row in rows} == {
        *(
            (way, ids.value, direction)
            for way in ("ours", "vllm", "torch")
            for ids in Pattern
            for direction in ("down", "up", "both")
        ),
        *(("peak", "contiguous", direction) for direction in ("down", "up", "both")),
    }
    for row in rows:
        # One direction lies between two events; two have four, and vLLM's own two are in between.
        assert row["seconds"] in ([0.003, 0.005, 0.006] if row["direction"] == "both" else [0.001])
        assert row["host_seconds"] != row["seconds"]
        if row["way"] in ("ours", "torch"):
            assert row["times_vllm"] is not None


def test_vllm_copies_block_by_block_and_says_which_order(cuda: FakeCuda) -> None:
    rows_of(SHAPES[1], 20)
    assert {(number, any_order) for _, number, any_order in cuda.calls} == {
        (number, any_order)
        for number in (16, 17, 20 * 3)  # 16 and 17: of our own trial at start
        for any_order in (False, True)
    }


def test_wrong_bytes_of_vllm_end_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoilt(native.NativeWay):
        def prepare(self, moves: Moves) -> Callable[[], None]:
            begin = super().prepare(moves)

            def spoil() -> None:
                cuda.left_out = 1
                begin()
                cuda.left_out = 0

            return spoil

    monkeypatch.setattr(native, "NativeWay", Spoilt)
    with pytest.raises(WrongBytesError, match="one, vllm, contiguous: wrong bytes in 20 of 20 slots"):
        rows_of(SHAPES[0], 20)


def test_the_whole_script(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "load_note", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(copy_bandwidth, "_make_device", lambda _: CudaDevice(torch.device("cpu")))
    monkeypatch.setattr(CudaDevice, "limit_bytes", lambda _: 6 << 20)
    arguments = ["--shapes", "deepseek-v2-lite", "--rounds", "1", "--peak-mib", "1"]
    assert copy_bandwidth.main(arguments) == 0
    said = capsys.readouterr().out
    note = "deepseek-v2-lite, 8, 64, 512, 8192 blocks each way: more than fits in 0.00586 GiB, 4 instead"
    assert note in said
    assert "dry run" not in said


def test_memory_of_a_gpu_is_the_limit(cuda: FakeCuda) -> None:
    assert CudaDevice(torch.device("cpu")).limit_bytes() == 900
