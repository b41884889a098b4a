"""How long does a request wait for a prefix that is already on its way up for another one?

    python -m benchmarks.shared_prefix [--connectors native offload] [--blocks-per-step 10] [--json FILE]

Some requests share a prefix that is in the CPU pool and not on the GPU. The first one's load of it is under
way when all the others arrive. Three scenarios:

- same: each asks the shared prefix and a few tokens of its own.
- longer: the first one's chain goes on after the prefix, and the pool has the rest as well.
- own: every follower has blocks of its own in the pool, after the prefix.

It runs on the virtual engine (`offload.testing.virtual`): vLLM's real scheduler and the real connectors, no
model, every byte attended to checked. Time is counted in engine steps. In each direction `--blocks-per-step`
blocks are copied per step, in order of submission, so nothing here depends on the machine.

Per scenario and connector: steps that each request waited from its arrival until its first token was
scheduled. Blocks copied up, and how many different ones the requests needed. Prompt tokens computed, and GPU
blocks in use at most.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.tables import Column, table
from offload.messages import LOAD, STORE
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.testing.virtual.engine import VOCABULARY
from offload.testing.virtual.settings import CONNECTORS

__all__ = ["main"]

_BLOCK = 4
"""Tokens per block; the number of blocks matters here, not their size."""
_TAIL = 3
"""Tokens of its own at the end of each prompt: less than a block, so never in a cache."""
_MAX_STEPS = 10_000
_COLUMNS = (
    Column("scenario", "scenario"),
    Column("connector", "connector"),
    Column("first waits", lambda row: row["steps_waited"][0]),
    Column("followers wait (steps)", lambda row: " ".join(map(str, row["steps_waited"][1:]))),
    Column("blocks up", "blocks_loaded"),
    Column("needed", "blocks_needed"),
    Column("prompt tokens computed", "prompt_tokens_computed"),
    Column("of", "prompt_tokens"),
    Column("GPU blocks", "peak_gpu_blocks"),
)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What all scenarios are made of, in blocks, steps and tokens.

    Attributes:
        requests: the first one and its followers.
        shared_blocks: of the prefix that all share.
        more_blocks: that the first one's chain goes on for, in `longer`.
        own_blocks: of each follower after the prefix, in `own`.
        head_start: steps from the first one's arrival to the others'.
        answer_tokens: generated for each, so that all are on the GPU together.
        blocks_per_step: copied at most, in each direction.
    """

    requests: int = 8
    shared_blocks: int = 100
    more_blocks: int = 300
    own_blocks: int = 50
    head_start: int = 3
    answer_tokens: int = 16
    blocks_per_step: int = 10


@dataclass(frozen=True, slots=True)
class _Scenario:
    """`pool`: chains that the pool holds; `prompts`: of the first request and its followers, as tokens."""

    name: str
    pool: list[list[int]]
    prompts: list[list[int]]


class _Probe:
    """Looks at every step of an engine between scheduling and execution."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.scheduled_in: dict[str, int] = {}
        """Step in which each request's first token was scheduled."""
        self.prompt_tokens = 0
        """Prompt tokens computed."""
        self.peak_blocks = 0
        """GPU blocks in use at most."""
        self._engine = engine
        self._execute = engine.runner.execute
        engine.runner.execute = self._watched  # type: ignore[method-assign]

    def _watched(self, output: SchedulerOutput, generation: int) -> Any:
        engine = self._engine
        pool = engine.scheduler.kv_cache_manager.block_pool
        self.peak_blocks = max(self.peak_blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            self.scheduled_in.setdefault(req_id, engine.num_steps)
            request = engine.scheduler.requests[req_id]
            start = request.num_computed_tokens - num_scheduled
            self.prompt_tokens += max(0, min(num_scheduled, request.num_prompt_tokens - start))
        return self._execute(output, generation)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all scenarios with all connectors; returns 0."""
    options = vars(_parser().parse_args(arguments))
    json_path, connectors, seed = (options.pop(name) for name in ("json", "connectors", "seed"))
    sizes = _Sizes(**options)
    logging.disable(logging.WARNING)
    rows = [
        _run(scenario, connector, sizes)
        for scenario in _scenarios(sizes, random.Random(seed))
        for connector in connectors
    ]
    print("\n" + table(_COLUMNS, rows))
    told = {"block_tokens": _BLOCK, "tail_tokens": _TAIL, "seed": seed, **asdict(sizes)}
    report.write(json_path, rows, settings=told)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("shared_prefix", __doc__)
    add = parser.add_argument
    add("--connectors", nargs="+", choices=CONNECTORS, default=["native", "offload"], help="to compare")
    sizes = _Sizes()
    add_numbers(
        parser,
        ("requests", sizes.requests, "the first one and its followers"),
        ("shared-blocks", sizes.shared_blocks, "of the prefix that all share"),
        ("more-blocks", sizes.more_blocks, "of the first one's chain after it, in `longer`"),
        ("own-blocks", sizes.own_blocks, "of each follower after it, in `own`"),
        ("head-start", sizes.head_start, "steps from the first one's arrival to the others'"),
        ("answer-tokens", sizes.answer_tokens, "generated for each request"),
        ("blocks-per-step", sizes.blocks_per_step, "copied at most, in each direction"),
    )
    add("--seed", type=int, default=0, metavar="N", help="decides the tokens (default: 0)")
    return parser


def _scenarios(sizes: _Sizes, rng: random.Random) -> list[_Scenario]:
    def blocks(count: int) -> list[int]:
        return draw_tokens(rng, count * _BLOCK, VOCABULARY)

    def asked(chains: list[list[int]]) -> list[list[int]]:
        return [chain + blocks(1)[:_TAIL] for chain in chains]

    shared = blocks(sizes.shared_blocks)
    longer = shared + blocks(sizes.more_blocks)
    own = [shared + blocks(sizes.own_blocks) for _ in range(1, sizes.requests)]
    return [
        _Scenario("same", [shared], asked([shared] * sizes.requests)),
        _Scenario("longer", [longer], asked([longer, *[shared] * (sizes.requests - 1)])),
        _Scenario("own", own or [shared], asked([shared, *own])),
    ]


def _distinct_blocks(chains: Sequence[Sequence[int]]) -> int:
    """Full blocks of these chains that differ, a common prefix counted once."""
    return len(
        {
            tuple(chain[:stop])
            for chain in chains
            for stop in range(_BLOCK, len(chain) // _BLOCK * _BLOCK + 1, _BLOCK)
        }
    )


def _run(scenario: _Scenario, connector: str, sizes: _Sizes) -> dict[str, Any]:
    """Fill the pool, empty the GPU cache, let the first request go ahead and the others follow."""
    longest = max(map(len, scenario.prompts)) + sizes.answer_tokens
    room = sizes.requests * (longest // _BLOCK + 1)
    block_bytes = VirtualSettings(block_size=_BLOCK).slot_bytes
    settings = VirtualSettings(
        step_seconds=0.01,
        connector=connector,
        gpu_blocks=room + 1,
        cpu_slots=room,
        block_size=_BLOCK,
        max_num_seqs=sizes.requests,
        max_model_len=longest,
        chunk=longest,
        copies=CopySchedule(bytes_per_poll=sizes.blocks_per_step * block_bytes),
    )
    engine = VirtualEngine(settings, random.Random(0))
    try:
        for chain in scenario.pool:
            engine.add(chain, 1)
            engine.drain(_MAX_STEPS)
        (copier,) = engine.copiers
        num_stored = copier.copied[STORE] // block_bytes
        assert connector == "none" or num_stored == _distinct_blocks(scenario.pool)
        assert engine.reset(connector=False) and not copier.copied[LOAD]
        probe = _Probe(engine)
        arrivals: list[tuple[Request, int]] = []
        for prompt in scenario.prompts:
            if len(arrivals) == 1:
                for _ in range(sizes.head_start):
                    engine.step()
            arrivals.append((engine.add(prompt, sizes.answer_tokens), engine.num_steps))
        engine.drain(_MAX_STEPS)
        engine.audit.check_drained()
        return {
            "scenario": scenario.name,
            "connector": connector,
            "steps_waited": [
                probe.scheduled_in[request.request_id] - arrived - 1 for request, arrived in arrivals
            ],
            "blocks_loaded": copier.copied[LOAD] // block_bytes,
            "blocks_needed": _distinct_blocks(scenario.prompts),
            "prompt_tokens_computed": probe.prompt_tokens,
            "prompt_tokens": sum(map(len, scenario.prompts)),
            "peak_gpu_blocks": probe.peak_blocks,
        }
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
