"""What engines in memory hand to each other: which prompts one has, and who may ask for them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Handoffs"]


class Handoffs:
    """Prompts that an engine has, by their full blocks; other engines of the same process fetch from it.

    Attributes:
        epoch: of this life of the engine.
        num_fetched: tokens that were fetched from others.
        num_unknown: references to engines that this one does not know.
    """

    def __init__(self, peer: str, block_size: int, num_refused: int) -> None:
        self.peer = peer
        self.epoch = f"{0:016x}"
        self.num_fetched = self.num_unknown = 0
        self.num_refused = num_refused
        self._block_size = block_size
        self._kept: set[tuple[int, ...]] = set()
        self._changed = asyncio.Condition()
        self._is_up = True

    async def keep(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Has a prompt from now on. Returns what is told of it."""
        if self.num_refused:
            self.num_refused -= 1
            return {"cpu_offload_refused": "lease_share"}
        full = self._full(prompt)
        async with self._changed:
            self._kept.add(full)
            self._changed.notify_all()
        return {
            "cpu_offload_from_v": 1,
            "cpu_offload_from_peer": self.peer,
            "cpu_offload_from_epoch": self.epoch,
            "cpu_offload_from_tokens": len(full),
            "cpu_offload_from_tip": f"{abs(hash(full)):032x}"[-32:],
        }

    async def fetch(
        self, prompt: Sequence[int], params: Mapping[str, Any], peers: Sequence["Handoffs"], patience: float
    ) -> int:
        """Tokens of a prompt that come from where a reference points; 0: it points nowhere, or too late."""
        source = next((each for each in peers if each.peer == params.get("cpu_offload_from_peer")), None)
        self.num_unknown += source is None and "cpu_offload_from_peer" in params
        if source is None or params.get("cpu_offload_from_epoch") != source.epoch:
            return 0
        full = self._full(prompt)
        async with source._changed:
            try:
                async with asyncio.timeout(patience):
                    await source._changed.wait_for(lambda: full in source._kept or not source._is_up)
            except TimeoutError:
                return 0
        if not source._is_up:
            return 0
        self.num_fetched += len(full)
        return len(full)

    async def restart(self, is_up: bool) -> None:
        """It has nothing any more; another epoch begins."""
        async with self._changed:
            self._is_up = is_up
            self._kept.clear()
            self.epoch = f"{int(self.epoch, 16) + 1:016x}"
            self._changed.notify_all()

    def _full(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple(prompt[: len(prompt) // self._block_size * self._block_size])
