"""vLLM's own offloading worker on the same blocks and slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

from benchmarks.copy_bandwidth.arena import Arena
from benchmarks.copy_bandwidth.devices import Device
from benchmarks.copy_bandwidth.moves import Moves
from offload.messages import GPU_ROUTES, STORE, Route

__all__ = ["NativeWay"]


class NativeWay:
    """The handlers that vLLM 0.32's `CPUOffloadingWorker` makes, one per direction, unmodified.

    So the descriptors, streams, events, flags and the choice between `swap_blocks_batch` and the Triton
    kernel for small pieces are theirs. They see our pool. Its slots hold all pieces of a block side by side,
    as rows of their region do, but for its padding to whole pages. Added is the clock around the copy
    function. Their load specs and store specs are made before the clock starts, as the ids of the others.
    """

    name = "vllm"

    def __init__(self, arena: Arena, device: Device) -> None:
        size = arena.shape.piece_bytes
        gpu = [piece.view(torch.int8) for piece in arena.blocks]
        host = [arena.slots[:, number].view(torch.int8) for number in range(arena.shape.num_pieces)]
        references = [CanonicalKVCacheRef(number, size) for number in range(arena.shape.num_pieces)]
        self._handlers = {
            way: SingleDirectionOffloadingHandler(gpu, host, 1, [references], way == STORE)
            for way in GPU_ROUTES
        }
        for handler in self._handlers.values():
            handler._swap_blocks_batch = device.timed(handler._swap_blocks_batch)
        self._job_ids = itertools.count(1)
        self._begun: list[tuple[Route, int]] = []

    def prepare(self, moves: Moves) -> Callable[[], None]:
        specs = []
        for direction, (block_ids, slots) in moves.items():
            gpu = GPULoadStoreSpec(block_ids.tolist(), group_sizes=[len(block_ids)], block_indices=[0])
            host = CPULoadStoreSpec(slots.tolist())
            pair = (gpu, host) if direction == STORE else (host, gpu)
            specs.append((direction, next(self._job_ids), pair))

        def begin() -> None:
            for direction, job_id, pair in specs:
                self._handlers[direction].transfer_async(job_id, *pair)
                self._begun.append((direction, job_id))

        return begin

    def wait(self) -> None:
        for direction, job_id in self._begun:
            handler = self._handlers[direction]
            handler.wait({job_id})
            if [result.success for result in handler.get_finished()] != [True]:
                raise RuntimeError(f"vLLM's {direction.verb} failed")
        self._begun.clear()

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.shutdown()
