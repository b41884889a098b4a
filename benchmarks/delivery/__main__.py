"""How much of a burst of prompts a prefill engine stores, and what new prompts wait for that.

    python -m benchmarks.delivery [--quick] [--json FILE]

It runs on the virtual engine (`offload.testing.virtual`): vLLM's real scheduler and the whole connector, no
model. 32 prompts of 24 blocks come at once, one token is generated for each, and the GPU cache has 400
blocks. They fit `lease_share` of the pool. Per row: what a step can compute, in tokens, of which a prompt has
96; steps of a copy, of which it takes so many at most from its order to the bytes, and again from there to
its report. Once with the role `both`, where nobody asks for a hand-off and stores are a cache's best effort,
once with `prefill`. Nothing depends on the machine.

Per role: the share of the prompts' blocks that is in the pool once the engine is at rest; how many prompts
clients were told to find there; steps to the first token, mean and longest.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import parser_of
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.tables import Column, table
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.testing.virtual.engine import VOCABULARY
from offload.testing.virtual.scheduler_audit import SchedulerAudit

__all__ = ["deliver", "main"]

PROMPTS, BLOCKS, BLOCK = 32, 24, 4
"""A burst: prompts, blocks of each, tokens of a block."""
CHUNKS = (96, 192, 384, 768, 4096)
COPIES = (1, 4, 12)
_CACHE = 400
_MAX_STEPS = 10_000
_ROLES = ("both", "prefill")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a burst; ``told``: prompts that clients were told to find."""

    stored: float
    told: int
    mean: float
    longest: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON if asked; return the exit status."""
    parser = parser_of("delivery", __doc__)
    parser.add_argument("--quick", action="store_true", help="the corners only")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    chunks, copies = ((96, 4096), (1, 12)) if options.quick else (CHUNKS, COPIES)
    rows: list[dict[str, Any]] = []
    for chunk in chunks:
        for copy in copies:
            row: dict[str, Any] = {"chunk": chunk, "copy": copy}
            for role in _ROLES:
                row |= {f"{name}_{role}": value for name, value in asdict(deliver(role, chunk, copy)).items()}
            rows.append(row)
    report.write(options.json, rows, settings={"quick": options.quick})
    print(table(_COLUMNS, rows))
    whole = sum(row["stored_prefill"] == 1.0 for row in rows)
    print(f"role prefill: all blocks of the burst are stored in {whole} of {len(rows)} rows")
    return 0 if whole == len(rows) else 1


def deliver(role: str, chunk: int, copy: int) -> Outcome:
    """A burst through an engine of that role."""
    rng = random.Random(1)
    settings = VirtualSettings(
        gpu_blocks=_CACHE,
        cpu_slots=2 * PROMPTS * BLOCKS,
        block_size=BLOCK,
        chunk=chunk,
        max_num_seqs=PROMPTS,
        verify_loads="never",
        answer_run=4,
        answer_interval=16,
        step_seconds=0.05,
        copies=CopySchedule(longest_delay=copy),
        fleet={"role": role, "listen": "127.0.0.1:7100", "lease_share": 0.5},
    )
    engine = VirtualEngine(settings, rng)
    engine.audit = SchedulerAudit(engine)  # the tests' business is to look at every byte
    try:
        prompts = [draw_tokens(rng, BLOCKS * BLOCK, VOCABULARY) for _ in range(PROMPTS)]
        began = engine.num_steps
        requests = [engine.add(prompt, 1) for prompt in prompts]
        first: dict[str, int] = {}
        for _ in range(_MAX_STEPS):
            if engine.is_idle():
                break
            engine.step()
            for request in requests:
                if request.is_finished():
                    first.setdefault(request.request_id, engine.num_steps - began)
        else:
            raise RuntimeError(f"{role}, {chunk}, {copy}: no end after {_MAX_STEPS} steps")
        depth = engine.side.allocator.resident_depth
        resident = sum(depth(request.block_hashes[:BLOCKS]) for request in requests)
        told = [params for params in engine.told.values() if params.tokens == BLOCKS * BLOCK]
        steps = list(first.values())
        return Outcome(resident / (PROMPTS * BLOCKS), len(told), sum(steps) / len(steps), max(steps))
    finally:
        engine.close()


_COLUMNS = (
    Column("tokens per step", "chunk"),
    Column("copy steps", "copy"),
    *(Column(f"stored, {role}", f"stored_{role}", ".0%") for role in _ROLES),
    Column("told of", "told_prefill"),
    *(Column(f"first token, {role}", f"mean_{role}", ".1f") for role in _ROLES),
    *(Column(f"longest, {role}", f"longest_{role}") for role in _ROLES),
)


if __name__ == "__main__":
    raise SystemExit(main())
