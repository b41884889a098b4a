"""Steps that only decode: what a connector adds to each while many requests run."""

from __future__ import annotations

import random
import time

from benchmarks.common.prompts import fresh_hashes
from benchmarks.control_plane.asked_again import ENDS, groups_of
from benchmarks.control_plane.prompts import WrongRunError
from benchmarks.control_plane.sizes import BLOCK_TOKENS, DECODE_PROMPT_TOKENS, DECODE_REQUESTS
from benchmarks.engine_replay import ReplayEngine, ReplaySettings, TimeModel

__all__ = ["DecodeEngine"]

_LEAST_WARM_UP_STEPS = 24
_LINK = 100e9
"""Bytes per second: the stores of all prompts are over soon, and those of a step within the next."""


class DecodeEngine:
    """256 running requests whose lengths are staggered, so that 16 of them fill a block in every step.

    As many steps as are measured go before: a connector may collect what is generated before it stores it.
    ``shape`` and ``variant`` are as for ``AskedEngine``, whose
    time is that of a processor; none: a plain model.
    """

    def __init__(self, connector: str, num_steps: int, shape: str = "", variant: str = "") -> None:
        groups = groups_of(shape, variant) if shape else ()
        self._num_steps = num_steps
        self._num_warm_up = max(num_steps, _LEAST_WARM_UP_STEPS)
        self._lengths = [DECODE_PROMPT_TOKENS + index % BLOCK_TOKENS for index in range(DECODE_REQUESTS)]
        longest = DECODE_PROMPT_TOKENS + BLOCK_TOKENS + num_steps + self._num_warm_up + 8
        num_blocks = DECODE_REQUESTS * (longest // BLOCK_TOKENS + 1) * max(len(groups), 1)
        self._num_output = num_steps + self._num_warm_up + 8
        self.engine = ReplayEngine(
            ReplaySettings(
                connector=connector,
                gpu_blocks=num_blocks + num_blocks // 2,  # nobody is preempted
                cpu_blocks=num_blocks,  # nothing is evicted
                block_size=BLOCK_TOKENS,
                groups=groups,
                max_num_seqs=DECODE_REQUESTS,
                chunk=sum(self._lengths),
                max_model_len=longest,
                time=TimeModel(link_bytes_per_second=_LINK),
                inner_checkpoints=variant != ENDS,
                timer=time.thread_time_ns if shape else time.perf_counter_ns,
            )
        )

    def steps(self) -> list[dict[str, int]]:
        """Nanoseconds in the connector's hooks by phase, step by step once the prompts' stores have ended."""
        engine, rng = self.engine, random.Random("decode")
        for index, length in enumerate(self._lengths):
            engine.add(str(index), fresh_hashes(rng, length // BLOCK_TOKENS), length, self._num_output)
        model = engine.settings.time
        prompt_blocks = DECODE_REQUESTS * DECODE_PROMPT_TOKENS // BLOCK_TOKENS
        engine.step()
        store_seconds = prompt_blocks * model.block_bytes / _LINK
        stored_at = engine.clock.now + 2 * store_seconds  # they may not all be planned at once
        for _ in range(self._num_warm_up):
            engine.step()
        if engine.clock.now <= stored_at:
            raise WrongRunError(
                f"{self._num_warm_up} steps are too few for the stores of {prompt_blocks} blocks"
            )
        spent = []
        for _ in range(self._num_steps):
            step = engine.step()
            if step.output.total_num_scheduled_tokens != DECODE_REQUESTS:
                raise WrongRunError("a step that should only decode computed something else")
            spent.append(step.connector_ns)
        return spent

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()
