"""How batches are copied on a GPU: by the copy engine, or where blocks come in small pieces by a kernel.

The copy engine needs some time for every piece and none of the model's processors; a kernel is the other way
round. Which is faster depends on piece, GPU and link, so both are tried when the cache is registered.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from offload.errors import UnsupportedError
from offload.messages import LOAD, STORE, Ids, Route
from offload.worker.copiers import Copier, CpuCopier, CudaCopier
from offload.worker.copiers.cuda import BatchedCopy
from offload.worker.layout import BlockLayout, CopyBatch

logger = logging.getLogger(__name__)

# 40 microseconds of PCIe or so: the copy engine's own time per copy is lost in that
_LARGE_COPY_BYTES = 1 << 20
_MOST_COPIES = 4096  # in one call to the driver, which has crashed on batches of 50,000 (vLLM issue 49276)
_FEWEST_COPIES = 16  # for a kernel; of fewer vLLM makes no use of it either
_KERNEL_FROM = (16, 64, 256, 1024)  # pieces that a kernel may be worth its launch from
_TRIAL_BYTES = 64 << 20
_TRIALS = 3
_KERNEL_GAIN = 0.8  # of the copy engine's time at most: a kernel takes processors from the model
_CHUNK_BYTES = 8192  # at most, that one program of the kernel moves at a time
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

COPY_ENGINE, KERNEL = "copy engine", "kernel"


def pick_paths(
    device: torch.device, layout: BlockLayout, num_blocks: int, num_slots: int
) -> dict[Route, BatchedCopy]:
    """The faster path for each route, tried between cache and pool while nothing is in either.

    Args:
        device: of the cache.
        layout: of both.
        num_blocks: GPU blocks.
        num_slots: in the pool.

    Returns:
        Functions that enqueue a batch; the copy engine's wherever the kernel is not possible.

    Raises:
        UnsupportedError: nothing can be copied at all.
    """
    paths = possible_paths(device, layout)
    blocks, slots = trial_ids(num_blocks, num_slots, layout.slot_bytes)
    # loads first: the pool is all zeros still, while the cache may hold anything
    batches = {LOAD: layout.load(slots, blocks), STORE: layout.store(blocks, slots)}
    picked = {}
    for route, batch in batches.items():
        picked[route] = _picked(paths, partial(_milliseconds, device, route, batch), len(batch.sizes), route)
    return picked


def _picked(
    paths: Mapping[str, BatchedCopy],
    milliseconds: Callable[[int, BatchedCopy], float],
    most: int,
    route: Route,
) -> BatchedCopy:
    """The path for one route, by trials of up to ``most`` pieces.

    A kernel's launch and its descriptors take about 0.3 ms, however few the pieces. How many of them the copy
    engine brings in that time depends on their size and the route.
    """
    for number in (most, *(number for number in _KERNEL_FROM if number < most)):
        name = faster_path(paths, partial(milliseconds, number), route, number)
        if number == most and name == COPY_ENGINE:
            return paths[COPY_ENGINE]
        if number < most and name == KERNEL:
            return _by_number(number, paths[KERNEL], paths[COPY_ENGINE])
    return _by_number(most, paths[KERNEL], paths[COPY_ENGINE])


def possible_paths(device: torch.device, layout: BlockLayout) -> dict[str, BatchedCopy]:
    """Those that can copy the pieces of such blocks, by name."""
    engine = copy_engine()
    paths = {COPY_ENGINE: engine}
    batch = layout.load(np.array([0, 2]), np.array([0, 2]))  # two blocks that are no neighbours
    is_of_words = not any((column % 8).any() for column in batch)
    largest = max(layout.piece_sizes)
    is_small = largest < _LARGE_COPY_BYTES
    if is_small and is_of_words and torch.version.cuda is not None and _can_use_host_pointers(device):
        try:
            from vllm.v1.kv_offload.cpu.swap_blocks_triton import swap_blocks_batch
        except ImportError as error:  # an older vLLM, or no Triton
            logger.info("copies of small pieces by a kernel are not possible here: %s", error)
        else:
            chunk = min(1 << (largest - 1).bit_length(), _CHUNK_BYTES)
            paths[KERNEL] = _kernel(partial(swap_blocks_batch, bytes_per_chunk=chunk), engine)
    return paths


def copy_engine() -> BatchedCopy:
    """vLLM's batched copy by the driver, in calls that are not too large for it."""
    from vllm import _custom_ops

    def copy(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool
    ) -> None:
        for first in range(0, len(sizes), _MOST_COPIES):
            columns = (sources, targets, sizes)
            if len(sizes) > _MOST_COPIES:
                columns = tuple(each[first : first + _MOST_COPIES] for each in columns)
            _custom_ops.swap_blocks_batch(*columns, is_src_access_order_any=is_src_access_order_any)

    return copy


def _kernel(kernel: BatchedCopy, engine: BatchedCopy) -> BatchedCopy:
    """The kernel for many small copies; few, and neighbours merged to a large one, are the copy engine's.

    It sends the descriptors to the GPU first. They are pinned for that: of pageable memory the caller would
    wait until all that the stream waits for is over.
    """

    def copy(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool
    ) -> None:
        if len(sizes) >= _FEWEST_COPIES and int(sizes.max()) < _LARGE_COPY_BYTES:
            pinned = torch.stack((sources, targets, sizes)).pin_memory()
            kernel(*pinned, is_src_access_order_any=is_src_access_order_any)
        else:
            engine(sources, targets, sizes, is_src_access_order_any=is_src_access_order_any)

    return copy


def trial_ids(num_blocks: int, num_slots: int, slot_bytes: int) -> tuple[Ids, Ids]:
    """Scattered blocks and slots, ``int64[n]`` each, for a trial; without block 0, vLLM's null block."""
    count = min(num_blocks // 2, num_slots, max(1, _TRIAL_BYTES // slot_bytes))
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, num_blocks, 2, dtype=np.int64))[:count]
    slots = rng.permutation(np.arange(num_slots, dtype=np.int64))[:count]
    return blocks, slots


def faster_path(
    paths: Mapping[str, BatchedCopy], milliseconds: Callable[[BatchedCopy], float], route: Route, number: int
) -> str:
    """The name of the path for so many pieces; one that raises is not taken. UnsupportedError if all do."""
    times = {}
    for name, path in paths.items():
        try:
            times[name] = milliseconds(path)
        except Exception as error:
            logger.warning(
                "%ss by %s are not possible: %s: %s", route.verb, name, type(error).__name__, error
            )
    if not times:
        raise UnsupportedError(
            f"KV blocks cannot be copied on this GPU, {route.verb}s by {' or '.join(paths)}; the log "
            f"says why. Install a vLLM that is built for this driver and this torch, {torch.__version__}"
        )
    is_kernel_faster = KERNEL in times and times[KERNEL] <= _KERNEL_GAIN * times.get(COPY_ENGINE, np.inf)
    name = KERNEL if is_kernel_faster else COPY_ENGINE
    logger.info("%ss of %d pieces go by %s; milliseconds of a trial: %s", route.verb, number, name, times)
    return name


def _by_number(fewest: int, kernel: BatchedCopy, engine: BatchedCopy) -> BatchedCopy:
    """The kernel for so many pieces and more, else the copy engine."""

    def copy(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, /, *, is_src_access_order_any: bool
    ) -> None:
        path = kernel if len(sizes) >= fewest else engine
        path(sources, targets, sizes, is_src_access_order_any=is_src_access_order_any)

    return copy


def _milliseconds(
    device: torch.device, route: Route, batch: CopyBatch, number: int, copy: BatchedCopy
) -> float:
    """The best of some trials, of the first ``number`` pieces.

    Waits for the GPU, which is idle while the cache is registered.
    """
    descriptors = [torch.from_numpy(np.ascontiguousarray(column[:number])) for column in batch]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the cache is being filled with zeros, perhaps
    is_any = route == LOAD
    times: list[float] = []
    with torch.cuda.stream(stream):
        for number in (16, 17):  # Triton compiles one kernel for multiples of 16 and one for others
            copy(*(each[:number] for each in descriptors), is_src_access_order_any=is_any)
        for _ in range(_TRIALS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            copy(*descriptors, is_src_access_order_any=is_any)
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return min(times)


def _can_use_host_pointers(device: torch.device) -> bool:
    """Whether a kernel may use the addresses of registered host memory as they are."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        value = ctypes.c_int()
        error = driver.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, device.index or 0)
    except (OSError, AttributeError):
        return False
    return error == 0 and value.value == 1


def make_copier(device: torch.device, layout: BlockLayout, num_blocks: int, num_slots: int) -> Copier:
    """What copies between that device and the pool: for a GPU, each route by its faster path."""
    if device.type == "cuda":
        paths = pick_paths(device, layout, num_blocks, num_slots)
        return CudaCopier(device, paths[STORE], paths[LOAD])
    assert device.type == "cpu", f"the start should have refused {device}"
    return CpuCopier()
