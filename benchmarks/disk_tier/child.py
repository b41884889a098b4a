"""What runs in the processes of the benchmark: our connector, with an idle tier or without one."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from offload.testing.engines.process import EngineProcess

__all__ = ["POSITIONS", "child_of"]

POSITIONS = 16
"""Of an extent, where blocks of 16 tokens have 64 KiB."""


def child_of(has_tier: bool, num_tokens: int, num_slots: int) -> EngineProcess[Any]:
    """A process with a ``PromptEngine``, forked from one that has only imported vLLM."""
    made = partial(_make, has_tier, num_tokens, num_slots)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    name = "with a tier" if has_tier else "without"
    return EngineProcess(made, name, variables=quiet, fork_from=["benchmarks.control_plane.child"])


def _make(has_tier: bool, num_tokens: int, num_slots: int) -> Any:
    from vllm.utils.gc_utils import freeze_gc_heap

    from benchmarks.control_plane.prompts import PromptEngine  # not over here: it imports vLLM
    from offload.scheduler.tiers.tier import TierLimits
    from offload.settings import Admit
    from offload.testing.media.faulty import MediumFault
    from offload.testing.virtual.tier import VirtualTier

    logging.disable(logging.WARNING)
    places = ()
    if has_tier:  # it is asked, and nothing is ever asked for a second time
        nothing = TierLimits(admit=Admit.SECOND_USE)
        tier = VirtualTier(
            num_slots, positions=POSITIONS, limits=nothing, choose=lambda job: MediumFault.LOSE
        )
        places = (tier.place,)
    engine = PromptEngine("offload", num_tokens, num_slots, places=places, timer=time.thread_time_ns)
    # workers make checksums in processes of their own, and here they would take the scheduler's caches
    engine.engine._worker._worker._engine._seals.has_sums = False
    freeze_gc_heap()
    return engine
