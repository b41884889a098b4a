"""One request at a time through a replay engine: cold, warm, and into a pool that is full."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from benchmarks.common.prompts import fresh_hashes
from benchmarks.control_plane.sizes import BLOCK_TOKENS, TAIL_TOKENS
from benchmarks.engine_replay import ReplayEngine, ReplaySettings
from offload.vllm.places import Place

__all__ = ["PromptEngine", "WrongRunError"]

_FILLER_BLOCKS = (2048, 1024, 512, 256)
"""Lengths of the chains that make blocks resident beforehand, in turn."""


class WrongRunError(RuntimeError):
    """A run did not do what its time is to be reported for."""


class PromptEngine:
    """A replay engine: ``num_slots`` blocks below, and GPU blocks for two of the longest prompts.

    Stores in flight may not hold all of a GPU cache, so with less the end of a prompt would not be stored.
    The policy is LRU, as it is for vLLM's connectors. One that keeps newcomers out would leave nothing to
    measure where they are to evict others.
    """

    def __init__(
        self,
        connector: str,
        longest: int,
        num_slots: int,
        eviction_policy: str = "lru",
        places: tuple[Place, ...] = (),
        timer: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        longest = max(longest, max(_FILLER_BLOCKS) * BLOCK_TOKENS)
        null_block = connector == "simple"  # takes one block of its pool for itself
        self.engine = ReplayEngine(
            ReplaySettings(
                connector=connector,
                gpu_blocks=2 * longest // BLOCK_TOKENS + 8,
                cpu_blocks=num_slots + null_block,
                block_size=BLOCK_TOKENS,
                chunk=longest + TAIL_TOKENS,
                max_model_len=longest + TAIL_TOKENS + 1,
                eviction_policy=eviction_policy,
                places=places,
                timer=timer,
            )
        )
        self._connector = connector
        self._num_runs = 0

    def fill(self, num_blocks: int) -> None:
        """Make that many blocks resident, of many chains, none of them used again."""
        for hashes in _fillers(num_blocks):
            self._serve(hashes, is_warm=False)

    def cold(self, seed: str, tokens: int) -> dict[str, int]:
        """Store the chain that ``seed`` names. Returns nanoseconds in the connector's hooks, by phase."""
        return self._serve(fresh_hashes(random.Random(seed), tokens // BLOCK_TOKENS), is_warm=False)

    def warm(self, seed: str, tokens: int) -> dict[str, int]:
        """Restore it. Returns nanoseconds by phase."""
        return self._serve(fresh_hashes(random.Random(seed), tokens // BLOCK_TOKENS), is_warm=True)

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    def _serve(self, hashes: Sequence[bytes], *, is_warm: bool) -> dict[str, int]:
        """One request, from its arrival until all transfers have ended and the GPU's cache is empty."""
        engine = self.engine
        num_prompt = len(hashes) * BLOCK_TOKENS + TAIL_TOKENS
        self._num_runs += 1
        engine.add(str(self._num_runs), list(hashes), num_prompt, 1)
        spent: Counter[str] = Counter()
        num_computed = 0
        while not engine.is_idle():
            step = engine.step()
            spent.update(step.connector_ns)
            num_computed += step.output.total_num_scheduled_tokens
        expected = TAIL_TOKENS if is_warm else num_prompt
        if num_computed != expected:
            raise WrongRunError(
                f"{self._connector}: a {'warm' if is_warm else 'cold'} request of {num_prompt} tokens had "
                f"{num_computed} computed, {expected} expected"
            )
        if not engine.scheduler.kv_cache_manager.reset_prefix_cache():
            raise WrongRunError(f"{self._connector}: idle, but some GPU blocks are still held")
        return dict(spent)


def _fillers(num_blocks: int) -> Iterator[list[bytes]]:
    rng = random.Random("fillers")
    for length in cycle(_FILLER_BLOCKS):
        if num_blocks <= 0:
            return
        yield fresh_hashes(rng, min(length, num_blocks))
        num_blocks -= length
