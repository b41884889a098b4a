"""The path of copies on a GPU: what is possible, what is tried, what is taken."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm import _custom_ops

from offload.errors import UnsupportedError
from offload.messages import LOAD, STORE, Route
from offload.vllm import copy_paths
from offload.vllm.copy_paths import COPY_ENGINE, KERNEL, faster_path, pick_paths, possible_paths, trial_ids
from offload.worker.copiers.cuda import BatchedCopy
from offload.worker.layout import BlockLayout, CopyBatch, Region

GPU = torch.device("cuda", 0)


def path(*_: object, is_src_access_order_any: bool) -> None:
    raise AssertionError("nothing is copied here")


def other_path(*_: object, is_src_access_order_any: bool) -> None:
    raise AssertionError("nothing is copied here")


PATHS: dict[str, BatchedCopy] = {COPY_ENGINE: path, KERNEL: other_path}


def times(engine: float, kernel: float) -> Callable[[BatchedCopy], float]:
    return lambda copy: engine if copy is path else kernel


@pytest.mark.parametrize(
    ("engine", "kernel", "taken"), [(10, 7.9, KERNEL), (10, 8.1, COPY_ENGINE), (10, 20, COPY_ENGINE)]
)
def test_a_kernel_must_be_clearly_faster(engine: float, kernel: float, taken: str) -> None:
    assert faster_path(PATHS, times(engine, kernel), LOAD, 1) == taken


def test_where_nothing_can_be_copied_the_start_fails(caplog: pytest.LogCaptureFixture) -> None:
    def milliseconds(copy: BatchedCopy) -> float:
        raise AttributeError("no swap_blocks_batch")

    with pytest.raises(UnsupportedError, match=r"stores by copy engine; the log says why\. Install a vLLM"):
        faster_path({COPY_ENGINE: path}, milliseconds, STORE, 1)
    assert "no swap_blocks_batch" in caplog.text


@pytest.mark.parametrize(("broken", "taken"), [(path, KERNEL), (other_path, COPY_ENGINE)])
def test_a_path_that_raises_is_not_taken(
    broken: BatchedCopy, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def milliseconds(copy: BatchedCopy) -> float:
        if copy is broken:
            raise RuntimeError("no such kernel")
        return 1.0

    assert faster_path(PATHS, milliseconds, STORE, 1) == taken
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(2, 1), (9, 100), (5000, 40), (100_000, 100_000)])
def test_a_trial_leaves_the_null_block_alone_and_merges_nothing(num_blocks: int, num_slots: int) -> None:
    blocks, slots = trial_ids(num_blocks, num_slots, 32_768)
    assert len(blocks) == len(slots) == min(num_blocks // 2, num_slots, 2048)
    assert len(set(blocks.tolist())) == len(blocks) and blocks.min() > 0 and blocks.max() < num_blocks
    assert len(set(slots.tolist())) == len(slots) and slots.min() >= 0 and slots.max() < num_slots
    assert not (np.abs(np.diff(blocks)) == 1).any()


def test_a_trial_copies_one_block_however_large() -> None:
    assert [len(ids) for ids in trial_ids(100, 100, 1 << 30)] == [1, 1]


def layout_of(*sizes: int, address: int = 1 << 20) -> BlockLayout:
    return BlockLayout(
        [Region(address + (number << 40), size, size) for number, size in enumerate(sizes)], 1 << 30
    )


@pytest.mark.parametrize(
    ("layout", "can_use_host_pointers", "names"),
    [
        (layout_of(16_384), True, {COPY_ENGINE, KERNEL}),
        (layout_of(16_384, 512), True, {COPY_ENGINE, KERNEL}),
        (layout_of(16_384), False, {COPY_ENGINE}),
        (layout_of(16_384, 12), True, {COPY_ENGINE}),
        (layout_of(16_384, address=(1 << 20) + 4), True, {COPY_ENGINE}),
        (layout_of(2 << 20), True, {COPY_ENGINE}),
    ],
)
def test_a_kernel_is_for_small_pieces_of_whole_words(
    layout: BlockLayout, can_use_host_pointers: bool, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(copy_paths, "_can_use_host_pointers", lambda device: can_use_host_pointers)
    assert set(possible_paths(GPU, layout)) == names


def test_without_cuda_there_is_no_kernel() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA")
    assert set(possible_paths(GPU, layout_of(512))) == {COPY_ENGINE}
    assert not copy_paths._can_use_host_pointers(GPU)


def memory_of(column: torch.Tensor) -> int:
    return column.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("number", "largest", "taken"),
    [(16, 1 << 19, "kernel"), (16, 1 << 20, "engine"), (15, 1 << 19, "engine"), (0, 0, "engine")],
)
def test_few_copies_and_runs_that_became_a_large_one_go_by_the_copy_engine(
    number: int, largest: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, bool]] = []
    pinned: set[int] = set()

    def path(name: str) -> BatchedCopy:
        def copy(
            sources: torch.Tensor,
            targets: torch.Tensor,
            sizes: torch.Tensor,
            /,
            *,
            is_src_access_order_any: bool,
        ) -> None:
            columns = (sources, targets, sizes)
            assert [column.tolist() for column in columns] == [told.tolist()] * 3
            assert all(memory_of(column) in pinned for column in columns) == (name == "kernel")
            calls.append((name, len(sizes), is_src_access_order_any))

        return copy

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.add(memory_of(self))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    copy = copy_paths._kernel(path("kernel"), path("engine"))
    told = torch.tensor(([512] * number)[1:] + [largest] * (number > 0))
    copy(told, told, told, is_src_access_order_any=True)
    assert calls == [(taken, number, True)]


@pytest.mark.parametrize(("number", "calls"), [(0, []), (4096, [4096]), (10_000, [4096, 4096, 1808])])
def test_a_call_to_the_driver_has_so_many_copies_at_most(
    number: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[list[torch.Tensor]] = []

    def swap(*columns: torch.Tensor, is_src_access_order_any: bool) -> None:
        assert is_src_access_order_any
        copied.append(list(columns))

    monkeypatch.setattr(_custom_ops, "swap_blocks_batch", swap)
    columns = [torch.arange(number) + first for first in (0, 7, 9)]
    copy_paths.copy_engine()(*columns, is_src_access_order_any=True)
    assert [[len(each) for each in call] for call in copied] == [[size] * 3 for size in calls]
    for column, parts in zip(columns, zip(*copied, strict=True), strict=bool(calls)):
        assert torch.equal(torch.cat(parts), column)


@pytest.mark.parametrize(
    ("launch", "by_engine", "by_kernel"),
    [
        (0.3, [1, 15, 16, 17, 63, 64, 255, 256, 257, 1023], [1024, 1025, 4000]),
        (0.03, [1, 16, 64, 255], [256, 257, 3000]),
        (0.001, [1, 15], [16, 17, 3000]),
        (0.85, [16, 64, 256, 1024, 2999], [3000, 4000]),
        (2.0, [16, 1024, 3000, 9000], []),
    ],
)
def test_a_kernel_is_taken_from_so_many_pieces_on(
    launch: float, by_engine: list[int], by_kernel: list[int]
) -> None:
    """The kernel takes its launch and half of what the copy engine takes for each piece."""
    taken: list[str] = []

    def named(name: str) -> BatchedCopy:
        return lambda *_, is_src_access_order_any: taken.append(name)

    paths = {COPY_ENGINE: named(COPY_ENGINE), KERNEL: named(KERNEL)}

    def milliseconds(number: int, copy: BatchedCopy) -> float:
        assert number <= 3000, "no more pieces than there are"
        return number / 1000 if copy is paths[COPY_ENGINE] else launch + number / 2000

    picked = copy_paths._picked(paths, milliseconds, 3000, LOAD)
    for names, numbers in ((COPY_ENGINE, by_engine), (KERNEL, by_kernel)):
        for number in numbers:
            taken.clear()
            picked(*(torch.arange(number) for _ in range(3)), is_src_access_order_any=True)
            assert taken == [names], number


def test_each_direction_takes_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def milliseconds(
        device: torch.device, direction: Route, batch: CopyBatch, number: int, copy: BatchedCopy
    ) -> float:
        tried.append(direction)
        assert number in (16, len(batch.sizes))
        return 1.0 if (copy is path) == (direction == STORE) else 2.0

    monkeypatch.setattr(copy_paths, "possible_paths", lambda device, layout: PATHS)
    monkeypatch.setattr(copy_paths, "_milliseconds", milliseconds)
    layout = BlockLayout([Region(0, 512, 512), Region(1 << 20, 512, 512)], 1 << 30)
    picked = pick_paths(GPU, layout, 100, 100)
    assert picked[STORE] is path
    assert inspect.getclosurevars(picked[LOAD]).nonlocals == {
        "fewest": 16,
        "kernel": other_path,
        "engine": path,
    }
    assert tried == [LOAD] * 4 + [STORE] * 2, "loads first, out of a pool of zeros"
