"""The same requests through vLLM's real scheduler with our connector: does it do what the model does?

One request after the other, with one token behind its full blocks, answered by one token. So the last block
of each is never full, and vLLM takes it again for the next request. The engine has it, and the null block,
beside those of the model. Steps compute 8,192 tokens of prompts, or 16 blocks, and copies take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.engine_replay import ReplayEngine, ReplaySettings, TimeModel
from benchmarks.engine_replay.driver import replay
from benchmarks.engine_replay.workloads import ReplayRequest
from benchmarks.trace_replay.gpu_cache import Chain
from benchmarks.trace_replay.two_levels import Found

__all__ = ["replay_scheduler"]

_BESIDE = 2
"""Blocks beside those that the model has: vLLM's null block, and the last one of a prompt."""
_STEP_BLOCKS = 16


def replay_scheduler(
    chains: Sequence[Chain], gpu_blocks: int, pool_blocks: int, block_tokens: int, store: str = "eager"
) -> Found:
    """What the scheduler finds of these requests; ``store`` as in the connector's configuration.

    No pool: without a connector.
    """
    longest = max(map(len, chains))
    settings = ReplaySettings(
        connector="offload" if pool_blocks else "none",
        gpu_blocks=gpu_blocks + _BESIDE,
        cpu_blocks=max(1, pool_blocks),
        block_size=block_tokens,
        chunk=_STEP_BLOCKS * block_tokens,
        max_model_len=(longest + 1) * block_tokens,
        watch=False,
        store=store,
        time=TimeModel(link_bytes_per_second=1e18),
    )
    engine = ReplayEngine(settings)
    try:
        seen = replay(engine, _requests(chains, block_tokens))
        num_stored = _num_stored(engine) if pool_blocks else 0
    finally:
        engine.close()
    accessed = sum(map(len, chains))
    on_gpu, in_pool = seen.hit_tokens_gpu // block_tokens, seen.hit_tokens_cpu // block_tokens
    return Found(accessed, on_gpu, in_pool, num_stored)


def _num_stored(engine: ReplayEngine) -> int:
    side = engine.connector._scheduler
    return int(side.metrics.totals.get("stored_bytes", 0)) // int(side._common.slot_bytes)


def _requests(chains: Sequence[Chain], block_tokens: int) -> Iterator[ReplayRequest]:
    for number, each in enumerate(chains):
        wide = [prefix_hash + prefix_hash for prefix_hash in each]  # as long as vLLM's
        yield ReplayRequest(f"request-{number}", wide, len(each) * block_tokens + 1, 1)
