"""One rank: a GPU cache in host memory, the connector's worker side, and the copier between."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput

from offload.testing.copiers.seeded import SeededCopier
from offload.testing.virtual.native import use_copier, worker_jobs
from offload.testing.virtual.parts import make_cache, make_worker
from offload.testing.virtual.settings import CELL_BYTES, VirtualSettings, make_kv_cache_config
from offload.testing.virtual.tags import Words, mix
from offload.worker.copiers import Copier
from offload.worker.side import WorkerSide
from offload.worker.transfer import LANDED_AT_ONCE

_WORDS = CELL_BYTES // 8


class VirtualRank:
    """Holds ``cells[layer, block, token, word]``: word 0 is the tag, word 1 says who wrote it when.

    Under decode context parallelism ranks have every so many tokens, as vLLM deals them out one by one.
    """

    def __init__(
        self,
        index: int,
        settings: VirtualSettings,
        vllm_config: VllmConfig,
        copier: SeededCopier,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self.own = slice(index % settings.dcp, None, settings.dcp)
        """Of the token positions of a request, those that this rank holds."""
        kv_cache_config = make_kv_cache_config(settings, index)
        self.num_layers = settings.layers_of(index)
        """Without those that draft."""
        self.copier = copier
        self.connector: Any = None
        self.side: WorkerSide | None = None
        """Our connector's; None with another one."""
        if settings.connector != "none":
            self.connector = make_worker(
                vllm_config,
                kv_cache_config,
                settings.places,
                make_copier=self.make_copier,
                clock=clock,
                seals_of_blocks=settings.seals_of_blocks,
                landed_at_once=settings.step_landed or LANDED_AT_ONCE,
            )
        if settings.connector == "native":
            use_copier(self.connector, copier)
        if settings.connector == "offload":
            self.side = self.connector._worker
            assert self.side is not None
            self.connector._samples_late = settings.samples_late
        tensor = kv_cache_config.kv_cache_tensors[0]
        backing = make_cache(settings, kv_cache_config, self.connector)
        num_all = len(tensor.layers)
        shape = (num_all, settings.gpu_blocks, settings.block_size, _WORDS)
        strides = (tensor.layer_stride, tensor.block_stride, CELL_BYTES, 8)
        words = backing.numpy().view(np.uint64)
        cells: Words = np.lib.stride_tricks.as_strided(words, shape, strides)
        self.cells, self._draft_cells = cells[: self.num_layers], cells[self.num_layers :]
        masks = np.array([[mix(mix(2, index), layer)] for layer in range(num_all)], dtype=np.uint64)
        self._masks, self._draft_masks = masks[: self.num_layers], masks[self.num_layers :]

    def make_copier(self, *_: Any) -> Copier:
        """For a connector of this rank."""
        return self.copier

    def expected(self, tags: Words, generation: int) -> Words:
        """``uint64[layers, tokens]``: what this rank's layers hold for these tags."""
        masked: Words = tags[None, :] ^ self._masks ^ np.uint64(mix(3, generation))
        return masked

    def write(self, table: list[int], start: int, words: Words, writer: int) -> None:
        """Store what is this rank's of ``words[layers, n]``, for token positions from ``start`` on."""
        own, span = (
            slice((self.own.start - start) % self.own.step, None, self.own.step),
            self._settings.block_tokens,
        )
        positions = np.arange(start, start + words.shape[1])[own]
        blocks = np.asarray(table)[positions // span]
        offsets = positions % span // self.own.step
        self.cells[:, blocks, offsets, 0] = words[:, own]
        self.cells[:, blocks, offsets, 1] = writer

    def read(self, table: list[int], stop: int) -> Words:
        """Tags of this rank's among token positions ``0 .. stop - 1``, as ``uint64[layers, these]``."""
        num_blocks = -(-stop // self._settings.block_tokens)
        pages = self.cells[..., 0][:, table[:num_blocks]]
        read: Words = pages.reshape(self.num_layers, -1)[:, : len(range(stop)[self.own])]
        return read

    def drafted(self, tags: Words, layer: int, generation: int) -> Words:
        """``uint64[tokens]``: what a draft layer of this rank holds for these tags; or the reverse."""
        words: Words = tags ^ self._draft_masks[layer] ^ np.uint64(mix(3, generation))
        return words

    def write_drafted(self, table: list[int], start: int, words: Words, layer: int) -> None:
        """Store ``words[n]`` in a draft layer for token positions from ``start`` on."""
        positions = np.arange(start, start + len(words))
        blocks = np.asarray(table)[positions // self._settings.block_size]
        self._draft_cells[layer, blocks, positions % self._settings.block_size, 0] = words

    def read_drafted(self, table: list[int], stop: int, layer: int, generation: int) -> Words:
        """Tags that a draft layer holds for token positions ``0 .. stop - 1``, as ``uint64[stop]``."""
        num_blocks = -(-stop // self._settings.block_size)
        pages = self._draft_cells[layer, table[:num_blocks], :, 0]
        return self.drafted(pages.reshape(-1)[:stop], layer, generation)

    def begin(self, metadata: Any) -> None:
        """Everything vLLM calls before the forward pass."""
        if self.connector is not None:
            self.connector.handle_preemptions(metadata)
            self.connector.bind_connector_metadata(metadata)

    def end(self, finished_req_ids: set[str]) -> KVConnectorOutput | None:
        """Everything vLLM calls after it, in its order."""
        if self.connector is None:
            return None
        self.connector.start_load_kv(None)
        return end_step(self.connector, finished_req_ids)

    def slot_words(self, slot: int) -> Words:
        """What a slot of this rank's pool holds, ``uint64[layers, tokens, words]``, draft layers last."""
        slot_bytes = self._slot_bytes
        raw = ctypes.string_at(self._pool_address + slot * slot_bytes, slot_bytes)
        shape = (len(self.cells) + len(self._draft_cells), self._settings.block_size, _WORDS)
        return np.frombuffer(raw, dtype=np.uint64).reshape(shape)

    @property
    def _pool_address(self) -> int:
        assert self.side is not None and self.side._memory is not None
        return self.side._memory.address

    @property
    def _slot_bytes(self) -> int:
        num_all = len(self.cells) + len(self._draft_cells)
        return num_all * self._settings.block_size * CELL_BYTES

    def rot(self, slot: int, offset: int) -> None:
        """One byte of that slot changes by itself."""
        address = self._pool_address + slot * self._slot_bytes + offset
        ctypes.c_uint8.from_address(address).value ^= 0xFF
        self.copier.corrupted.append(address)

    def rotten_slots(self) -> set[int]:
        """Slots with a wrong byte in them."""
        slot_bytes = self._slot_bytes
        slots = {(address - self._pool_address) // slot_bytes for address in self.copier.corrupted}
        return {slot for slot in slots if 0 <= slot < self._settings.cpu_slots}

    def check_drained(self) -> None:
        """No job is left on this rank."""
        if self.side is not None:
            self.side.check_invariants()
            assert self.side.is_idle, f"{self.side} has jobs or restores left"
        elif self.connector is not None:
            left = worker_jobs(self.connector)
            assert not left, f"jobs {left} are left on a worker"

    def close(self) -> None:
        """Release threads and memory."""
        if self.connector is not None:
            self.connector.shutdown()


def end_step(connector: Any, finished_req_ids: set[str]) -> KVConnectorOutput:
    """What vLLM's model runner asks of a connector of worker role at the end of a step, in its order."""
    connector.wait_for_save()
    results = connector.get_transfer_results(finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_cache_events=connector.get_kv_connector_kv_cache_events(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
    connector.clear_connector_metadata()
    return output
