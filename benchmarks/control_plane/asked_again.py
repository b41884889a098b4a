"""A document through a replay engine, in chunks: computed and stored, then restored for another question."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import NamedTuple

from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.shapes import SHAPES, SMALL_STATES
from benchmarks.control_plane.prompts import WrongRunError
from benchmarks.engine_replay import ReplayEngine, ReplaySettings
from offload.testing.virtual.groups import Group

__all__ = ["ENDS", "PLAIN", "Asked", "AskedEngine", "groups_of"]

PLAIN, ENDS = "plain", "ends"
"""Variants of our connector: on the group of full attention alone; without inner checkpoints."""

_QUESTION_TOKENS = 800
_HANDED_OVER = "handed over"


class Asked(NamedTuple):
    """What a request took of the scheduler's thread, in nanoseconds of a processor, and what it computed.

    Attributes:
        phases: in the connector's hooks, without ``handed_over``.
        handed_over: in ours, for what is restored to be known to the GPU's cache. That is vLLM's own loop
            over blocks. For other connectors it is in vLLM's next step, and for ours it is not there again.
        scheduler: in ``schedule`` and ``update_from_output``, the connector included.
        longest: of one step of these.
        steps: that computed something.
        computed: tokens.
    """

    phases: dict[str, int]
    handed_over: int
    scheduler: int
    longest: int
    steps: int
    computed: int

    @property
    def total(self) -> int:
        """In the connector's hooks, without what is handed over."""
        return sum(self.phases.values())


class AskedEngine:
    """An engine of one shape, which has room on the GPU for two such requests, and below for all of them."""

    def __init__(
        self, connector: str, shape: str, tokens: int, chunk: int, runs: int, variant: str = ""
    ) -> None:
        """Make it.

        Args:
            connector: with `native`, vLLM keeps windows and states wherever a chunk ends, so that it restores
                what ours does.
            shape: one of ``SHAPES``, or another word for ``SMALL_STATES``.
            tokens: of a document.
            chunk: tokens computed in a step, at most.
            runs: how many documents there will be.
            variant: ``PLAIN``, with as many positions; ``ENDS``; or neither.
        """
        groups = groups_of(shape, variant)
        self._block = groups[0].block_size
        self._tokens = tokens
        of_one = _most_blocks(groups, tokens + _QUESTION_TOKENS, chunk)
        is_spaced = connector == "native" and len(groups) > 1
        self.engine = ReplayEngine(
            ReplaySettings(
                connector=connector,
                groups=groups,
                retention=chunk // self._block * self._block if is_spaced else 0,
                gpu_blocks=3 * of_one + 8,
                cpu_blocks=2 * runs * of_one,
                block_size=self._block,
                chunk=chunk,
                max_model_len=tokens + _QUESTION_TOKENS + 2,
                eviction_policy="lru",
                inner_checkpoints=variant != ENDS,
                timer=time.thread_time_ns,
            )
        )
        self._num_asked = 0
        if connector == "offload":
            self.engine.watch(self.engine.connector._scheduler._engine, {"share": _HANDED_OVER})

    def ask(self, document: str, question: str) -> Asked:
        """One request, from its arrival until all transfers have ended and the GPU's cache is empty.

        Both names stand for tokens, the same ones for the same name.
        """
        num_blocks = self._tokens // self._block
        num_prompt = self._tokens + _QUESTION_TOKENS
        hashes = fresh_hashes(random.Random(document), num_blocks)
        hashes += fresh_hashes(random.Random(question), num_prompt // self._block - num_blocks)
        self._num_asked += 1
        self.engine.add(str(self._num_asked), hashes, num_prompt, 1)
        phases: Counter[str] = Counter()
        spent, num_steps, num_computed = [], 0, 0
        while not self.engine.is_idle():
            step = self.engine.step()
            phases.update(step.connector_ns)
            spent.append(step.schedule_ns + step.update_ns)
            num_steps += step.output.total_num_scheduled_tokens > 0
            num_computed += step.output.total_num_scheduled_tokens
        if not self.engine.scheduler.kv_cache_manager.reset_prefix_cache():
            raise WrongRunError("idle, but some GPU blocks are still held")
        handed_over = phases.pop(_HANDED_OVER, 0)
        phases["complete"] -= handed_over
        return Asked(dict(phases), handed_over, sum(spent), max(spent), num_steps, num_computed)

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()


def groups_of(shape: str, variant: str) -> tuple[Group, ...]:
    """The cache groups of a shape, or the first one only."""
    return SHAPES.get(shape, SMALL_STATES)[: 1 if variant == PLAIN else None]


def _most_blocks(groups: tuple[Group, ...], num_tokens: int, chunk: int) -> int:
    """Blocks of a request on the GPU, or in the pool with a bag at each end of a chunk, at most."""
    bags = sum(group.blocks_for(num_tokens, 1, 1) for group in groups[1:])
    on_gpu = sum(group.blocks_for(num_tokens, 1, chunk) for group in groups)
    return max(on_gpu, groups[0].blocks_for(num_tokens, 1, chunk) + bags * (num_tokens // chunk + 3))
