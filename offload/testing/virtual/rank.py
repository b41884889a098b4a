"""One rank: a GPU cache in host memory, the connector's worker side, and the copier between."""

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput

from offload.testing.copiers.inline import InlineExecutor
from offload.testing.copiers.seeded import SeededCopier
from offload.testing.virtual.cells import GARBAGE, make_cells
from offload.testing.virtual.groups import CELL_BYTES, FULL
from offload.testing.virtual.meeting import Meeting, registering
from offload.testing.virtual.native import use_copier, worker_jobs
from offload.testing.virtual.parts import make_cache, make_worker, on_network, tell_sizes
from offload.testing.virtual.settings import VirtualSettings, make_kv_cache_config
from offload.testing.virtual.tags import Words, mix
from offload.worker.copiers import Copier
from offload.worker.side import WorkerSide
from offload.worker.transfer import LANDED_AT_ONCE

_WORDS = CELL_BYTES // 8


class VirtualRank:
    """Holds the cells of each group, which are views of the same memory, and what stands around them."""

    def __init__(
        self,
        index: int,
        settings: VirtualSettings,
        vllm_config: VllmConfig,
        copier: SeededCopier,
        clock: Callable[[], float],
        meeting: Meeting,
    ) -> None:
        """Make its connector, which has no cache before ``register``."""
        self._settings = settings
        self._index = index
        kv_cache_config = self._kv_cache_config = make_kv_cache_config(settings, index)
        self._sizes = tell_sizes(kv_cache_config, vllm_config)
        self.copier = copier
        self.connector: Any = None
        self.side: WorkerSide | None = None
        """Our connector's; None with another one."""
        if settings.connector != "none":
            self.connector = make_worker(
                _of_rank(vllm_config, index) if settings.connector == "offload" else vllm_config,
                kv_cache_config,
                settings.places,
                meeting.join(index % settings.stage_ranks),
                make_copier=self.make_copier,
                clock=clock,
                make_page_executor=InlineExecutor,
                unit_slots=0 if settings.resizes is None else settings.resizes.unit_slots,
                seals_of_blocks=settings.seals_of_blocks,
                shares_cores=settings.shares_cores,
                landed_at_once=settings.step_landed or LANDED_AT_ONCE,
                **on_network(settings, clock),
            )
        if settings.connector == "native":
            use_copier(self.connector, copier)
        if settings.connector == "offload":
            self.side = self.connector._worker
            assert self.side is not None
            self.connector._samples_late = settings.samples_late

    def register(self) -> None:
        """Make the cache, and tell the connector. Ranks that share a pool wait for each other here."""
        settings, index, kv_cache_config = self._settings, self._index, self._kv_cache_config
        registering.rank = index
        words = make_cache(settings, kv_cache_config, self.connector).numpy().view(np.uint64)
        tensors, num_layers = kv_cache_config.kv_cache_tensors, settings.layers_of(index)
        block_layers, page_words = settings.block_layers(index), settings.page_bytes // 8
        kv = mix(2, settings.first_replica(index))
        masks = np.array(
            [[mix(kv, layer)] for layer in range(sum(num_layers) + len(settings.draft_reaches))],
            dtype=np.uint64,
        )
        strides = (tensors[0].layer_stride, tensors[0].block_stride)
        self._pages: Words = np.lib.stride_tricks.as_strided(
            words, (block_layers, settings.gpu_blocks, page_words), (*strides, 8)
        )
        self.groups = []
        """The cells of each group, without layers that draft."""
        first = 0
        for number, (group, layers) in enumerate(zip(settings.cache_groups, num_layers, strict=True)):
            cells: Words = np.lib.stride_tricks.as_strided(
                words, (block_layers, settings.gpu_blocks, group.places, _WORDS), (*strides, CELL_BYTES, 8)
            )
            own = slice(index % settings.dcp, None, settings.dcp) if group.kind == FULL else slice(0, None, 1)
            its_masks = masks[first : first + layers]
            self.groups.append(make_cells(number, group, its_masks, cells[:layers], own, self._sizes))
            first += layers
            if number == 0:
                self._draft_cells = cells[layers:]
        self._draft_masks = masks[first:]

    @property
    def cells(self) -> Words:
        """Of the first group, ``uint64[layers, blocks, tokens, words]``, without layers that draft."""
        return self.groups[0].cells

    @cells.setter
    def cells(self, cells: Words) -> None:
        self.groups[0].cells = cells

    @property
    def own(self) -> slice:
        """Of the token positions of a request, those that this rank holds in its first group."""
        return self.groups[0].own

    @property
    def is_native(self) -> bool:
        """Its connector is vLLM's own."""
        return self._settings.connector == "native"

    @property
    def num_layers(self) -> int:
        """Of the first group, without those that draft."""
        return len(self.groups[0].cells)

    def forget(self, block_ids: Sequence[int], step: int) -> None:
        """These GPU blocks were taken for something new in that step: what was in them is no more."""
        self._pages[:, block_ids, 0::_WORDS] = GARBAGE
        self._pages[:, block_ids, 1::_WORDS] = step << 24

    def clear(self, block_ids: Sequence[int]) -> None:
        """Write zeros over all of these GPU blocks."""
        self._pages[:, block_ids] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole GPU blocks, one after the other.

        vLLM's runners copy all at once. A request that shares in the same step what is a copy itself gets
        what was there before, which is a mistake of vLLM's and none of a connector's.
        """
        for source, target in zip(sources, targets, strict=True):
            self._pages[:, target] = self._pages[:, source]

    def make_copier(self, *_: Any) -> Copier:
        """For a connector of this rank."""
        return self.copier

    def expected(self, tags: Words, generation: int) -> Words:
        """``uint64[layers, tokens]``: what this rank's layers of the first group hold for these tags."""
        return self.groups[0].expected(tags, generation)

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

    def slot_words(self, slot: int, group: int = 0) -> Words:
        """What a slot of this rank's pool holds for a block of that group, ``uint64[layers, places, words]``.

        Behind its layers come those of larger groups, or those that draft.
        """
        slot_bytes, places = self.slot_bytes, self.groups[group].cells.shape[2]
        raw = ctypes.string_at(self.pool_address + slot * slot_bytes, slot_bytes)
        pages = np.frombuffer(raw, dtype=np.uint64).reshape(len(self._pages), -1)
        return pages[:, : places * _WORDS].reshape(len(pages), places, _WORDS)

    @property
    def pool_address(self) -> int:
        assert self.side is not None and self.side._memory is not None
        return self.side._memory.address

    @property
    def slot_bytes(self) -> int:
        """Of a block in this rank's pool."""
        return len(self._pages) * self._settings.page_bytes

    def rot(self, slot: int, offset: int) -> None:
        """One byte of that slot changes by itself."""
        address = self.pool_address + slot * self.slot_bytes + offset
        ctypes.c_uint8.from_address(address).value ^= 0xFF
        self.copier.corrupted.append(address)

    def share_with(self, other: "VirtualRank") -> None:
        """That one has the same pool."""
        self.copier.mirrors.append((other.copier, other.pool_address - self.pool_address))

    def rotten_slots(self) -> set[int]:
        """Slots with a wrong byte in them."""
        slot_bytes = self.slot_bytes
        addresses = self.copier.corrupted + [
            address - shift for copier, shift in self.copier.mirrors for address in copier.corrupted
        ]
        slots = {(address - self.pool_address) // slot_bytes for address in addresses}
        return {slot for slot in slots if 0 <= slot < self._settings.most_slots}

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


def _of_rank(vllm_config: VllmConfig, rank: int) -> VllmConfig:
    """As the worker of that rank has it."""
    own = copy.copy(vllm_config)
    own.parallel_config = copy.copy(vllm_config.parallel_config)
    own.parallel_config.rank = rank
    return own
