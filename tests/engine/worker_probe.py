"""What tests do inside a worker, through vLLM's ``worker_extension_cls``."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from offload.config import Verify
from offload.messages import Ids, Route
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.worker.copiers import CopyEnd, cpu

_CORRUPTED_BYTE = 4 * 32 * 32 + 3
"""In a slot, the byte of a float32 that holds its sign and most of its exponent."""


_LAYER_BYTES = 32 << 10
"""Of a block, in each layer of the tiny model."""

_POSITION_BYTES = 64 * 4
"""Of a token position, in one head's keys or values."""


class WorkerProbe:
    """Methods for ``collective_rpc``; mixed into vLLM's worker class."""

    def process_id(self) -> int:
        return os.getpid()

    def cpus(self) -> tuple[list[int], dict[str, list[int]]]:
        """Those that this thread, which computes, may use, and those of our threads by their names."""
        ours = [each for each in threading.enumerate() if each.name.startswith("kv-offload")]
        of_ours = {each.name: sorted(os.sched_getaffinity(each.native_id or 0)) for each in ours}
        return sorted(os.sched_getaffinity(0)), of_ours

    def corrupt_next_load(self, position: int) -> None:
        """Before the next load starts, the slot of its block ``position`` gets another block's bytes.

        Its checksum too, so that nobody notices.
        """

        def corrupt(slots: Ids, fills: Ids) -> tuple[Ids, Ids]:
            for column in (_pool(), _engine()._seals._sums):
                column[slots[position]] = column[slots[position - 1]]
            return slots, fills

        _change_next_load(corrupt)

    def swap_in_next_load(self, position: int, other: int) -> None:
        """The next load fills these two of its blocks from each other's slots."""

        def swap(slots: Ids, fills: Ids) -> tuple[Ids, Ids]:
            order = np.arange(len(slots))
            order[[position, other]] = other, position
            return slots[order], fills[order]

        _change_next_load(swap)

    def shift_next_load(self, num_layers: int) -> None:
        """Layers behind the first so many get, in the slots of the next load, KV of one position before."""

        def shift(slots: Ids, fills: Ids) -> tuple[Ids, Ids]:
            rows = _pool()[slots]
            behind = rows[:, num_layers * _LAYER_BYTES :]
            behind[:] = np.roll(behind, _POSITION_BYTES, axis=1)
            _pool()[slots] = rows
            return slots, fills

        _change_next_load(shift)

    def negate_loads_into(self, block_ids: list[int]) -> None:
        """Before a load fills one of these GPU blocks, all numbers in its slot change their signs.

        Until ``end_negating`` is called.
        """
        engine = _engine()
        submit = engine.submit
        self._negated: list[int] = []

        def negated(
            job_id: int, route: Route, sources: Ids, targets: Ids, fills: Ids | None = None, *rest: Any
        ) -> None:
            if fills is not None:
                slots = sources[np.isin(targets, block_ids)].tolist()
                self.negate_slots(slots)
                self._negated += slots
            submit(job_id, route, sources, targets, fills, *rest)

        engine.submit = negated

    def end_negating(self) -> list[int]:
        """Returns the slots whose numbers have changed their signs; no others will."""
        vars(_engine()).pop("submit", None)
        return self._negated

    def negate_slots(self, slots: list[int]) -> None:
        """All numbers in these slots change their signs."""
        size = self.model_config.dtype.itemsize  # type: ignore[attr-defined]
        _pool()[slots, size - 1 :: size] ^= 0x80

    def corrupt_slot(self, slot: int) -> None:
        """One number in the slot becomes another one, as memory that decays would have it."""
        _pool()[slot, _CORRUPTED_BYTE] ^= 0xFF

    def heal(self) -> None:
        """Nothing fails any more, nothing is stuck, and all that is loaded is checked."""
        self.set_verify("always")
        _faulty_copier()._choose = lambda job_id, way: Fault.NONE
        self.let_go()

    def set_verify(self, verify: str) -> None:
        """As the option ``verify_loads``, from now on."""
        _engine()._seals.verify = Verify(verify)

    def fail_next(self, direction: str, *faults: str) -> None:
        """The next jobs of that direction end as ``Fault`` says, by their names; all others well."""
        left = [Fault[fault] for fault in faults]

        def choose(job_id: int, way: Route) -> Fault:
            return left.pop(0) if left and way.verb == direction.lower() else Fault.NONE

        _faulty_copier()._choose = choose

    def fail_all(self, direction: str, fault: str) -> None:
        """All jobs of that direction end so, until ``heal``."""
        _faulty_copier()._choose = lambda job_id, way: (
            Fault[fault] if way.verb == direction.lower() else Fault.NONE
        )

    def fail_next_on_rank(self, rank: int, direction: str, *faults: str) -> None:
        """``fail_next`` for one of several workers."""
        if self.rank == rank:  # type: ignore[attr-defined]
            self.fail_next(direction, *faults)

    def let_go(self) -> None:
        """What is stuck is copied now, and what died lives again."""
        _faulty_copier().let_go()
        _faulty_copier().drain()

    def pass_time(self, seconds: float) -> None:
        """For the deadlines of copies, so many seconds pass at once."""
        engine = _engine()
        engine._clock = ahead(engine._clock, seconds)

    def stop_time(self) -> None:
        """No deadline passes any more, but by ``pass_time``."""
        engine = _engine()
        now = engine._clock()
        engine._clock = lambda: now

    def block_copies(self) -> None:
        """The copier's threads stop for ever in the next copy they make."""
        cpu._copy = lambda task: threading.Event().wait()

    def hold_ends(self, holding: bool) -> None:
        """While True, no copy ends as far as the engine can tell."""
        _faulty_copier().holding = holding

    def hold_ends_for(self, num_polls: int) -> None:
        """No copy ends in the next so many steps."""
        copier = _faulty_copier()
        poll, held = copier.poll, iter(range(num_polls))

        def poll_later() -> list[CopyEnd]:
            copier.holding = next(held, None) is not None
            return poll()

        copier.poll = poll_later  # type: ignore[method-assign]

    def read_blocks(self, block_ids: list[int]) -> list[bytes]:
        """The KV bytes of GPU blocks, all layers, read without help from the connector."""
        caches = self.model_runner.kv_caches  # type: ignore[attr-defined]
        num_blocks = self.cache_config.num_gpu_blocks  # type: ignore[attr-defined]
        planes = [cache.unflatten(0, (num_blocks, -1)) for cache in caches]
        return [
            b"".join(plane[block].contiguous().cpu().view(torch.uint8).numpy().tobytes() for plane in planes)
            for block in block_ids
        ]

    def read_slots(self, slots: list[int]) -> list[bytes]:
        """The bytes of slots of the pool."""
        return [_pool()[slot].tobytes() for slot in slots]


def ahead(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """A clock that is so many seconds ahead of another."""
    return lambda: clock() + seconds


def _worker_side() -> Any:
    return get_kv_transfer_group()._worker


def _engine() -> Any:
    return _worker_side()._engine


def _pool() -> npt.NDArray[np.uint8]:
    """``[slots, bytes of a slot]``"""
    side = _worker_side()
    pool: npt.NDArray[np.uint8] = side._memory._bytes.reshape(-1, side.facts.slot_bytes)
    return pool


def _change_next_load(change: Callable[[Ids, Ids], tuple[Ids, Ids]]) -> None:
    """Let ``change`` see the slots of the next load and who filled them, and give others."""
    engine = _engine()
    submit = engine.submit

    def changed(
        job_id: int, route: Route, sources: Ids, targets: Ids, fills: Ids | None = None, *rest: Any
    ) -> None:
        if fills is not None:
            engine.submit = submit
            sources, fills = change(sources, fills)
        submit(job_id, route, sources, targets, fills, *rest)

    engine.submit = changed


def _faulty_copier() -> FaultyCopier:
    """The engine's copier, which misbehaves from the first call of this on, when told to."""
    engine = _engine()
    (copier,) = engine._copiers
    if not isinstance(copier, FaultyCopier):
        copier = FaultyCopier(copier)
        engine._copiers = [copier]
        for lane in engine._lanes.values():
            lane.copier = copier
    return copier
