"""Are answers stored where they come back, and only there?

    python -m benchmarks.answers [--scene "NAME;..."] [--requests N] [--processes N] [--trace FILE...]
                                 [--json FILE]

Conversations go through vLLM's real scheduler and the whole connector (`benchmarks.engine_replay`), with
`store_decode_blocks` true, false and "auto", and with a pool that holds all of them, or about half of what
the users' conversations take; there rows are sums of three runs, with other seeds, because what the policy
evicts is much up to chance. No model runs and no bytes move. Per row: prompt tokens found on GPU or in the
pool; blocks of answers stored, in all and by requests that began after the first 200 answers, or after the
first 200 since templates changed; and these two beside the same traffic with `true`.

- chat: each answer is in the next prompt as it was. chat, 400 users: the same, and so long between two turns.
- stripped: a quarter of the answer is, without its thinking.
- one-shot: nobody asks twice. sparse 30%, sparse 10%: so many answers are followed by another turn.
- to stripped, to chat: all templates change in the middle.
- mixed: every other conversation is stripped. Its templates begin with other blocks; mixed, alike: with
  blocks that no other conversation has. Saved is told of the half that is stripped.

`--trace` replays a trace of prefix hashes (`benchmarks.trace_replay.turns`) through the allocator, with the
policy, in pools of several sizes: a trace has no answers, so they are made of what the next turn's prompt
has there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, positive
from benchmarks.common.tables import Column, table
from benchmarks.engine_replay import ReplayEngine, ReplaySettings
from benchmarks.engine_replay.conversations import Conversations, Template
from benchmarks.engine_replay.driver import replay
from benchmarks.trace_replay.turns import replay_turns
from benchmarks.trace_replay.workloads import Workload, read_workload
from offload.observe.trace import TraceError

__all__ = ["SCENES", "Scene", "main", "run", "scenes"]

AFTER = 200
"""Answers after which blocks are counted."""

_CHAT = Template("chat", returns=True)
_STRIPPED = Template("stripped", returns=False)
_COLUMNS = (
    Column("traffic", "scene"),
    Column("pool", "pool"),
    Column("store", lambda row: str(row["store_decode_blocks"]).lower()),
    Column("hit tokens", "hit_tokens", ","),
    Column("of true", "hits_of_true", ".2%"),
    Column("answer blocks", "answer_blocks", ","),
    Column("after 200", "answer_blocks_after", ","),
    Column("saved", "saved_of_true", ".1%"),
)
_LARGE, _SMALL = "large", "small"
_CONCURRENCY = 16
_REQUESTS = 1_000


@dataclass(frozen=True, slots=True)
class Scene:
    """Traffic, and from which request on blocks count; ``counted``: only those of templates so named."""

    name: str
    traffic: Conversations
    count_from: int = AFTER
    counted: str = ""


def scenes(requests: int) -> dict[str, Scene]:
    """By name; with so many requests each."""
    half = requests // 2

    def talk(*templates: Template, **more: Any) -> Conversations:
        return Conversations(templates=templates, requests=requests, **more)

    def sparse(share: float) -> Conversations:
        return talk(Template("sparse", returns=True, continues=share))

    alike = Template("chat", True, is_shared=False), Template("stripped", False, is_shared=False)
    found = [
        Scene("chat", talk(_CHAT)),
        Scene("chat, 400 users", talk(_CHAT, users=400)),
        Scene("stripped", talk(_STRIPPED)),
        Scene("one-shot", talk(Template("one-shot", returns=True, continues=0.0))),
        Scene("sparse 30%", sparse(0.3)),
        Scene("sparse 10%", sparse(0.1)),
        Scene("to stripped", talk(_CHAT, later=(_STRIPPED,), switch_at=half), half + AFTER),
        Scene("to chat", talk(_STRIPPED, later=(_CHAT,), switch_at=half), half + AFTER),
        Scene("mixed", talk(_CHAT, _STRIPPED), counted="stripped"),
        Scene("mixed, alike", talk(*alike), counted="stripped"),
    ]
    return {scene.name: scene for scene in found}


SCENES = scenes(_REQUESTS)


def run(scene: Scene, store: bool | str, *, is_small: bool = False, seed: int = 0) -> dict[str, int]:
    """One engine, one mode: prompt tokens and those found, answers, and blocks of them that were stored."""
    traffic = scene.traffic
    longest = traffic.turns * (traffic.prompt_tokens[1] + traffic.answer_tokens[1]) + 256
    settings = ReplaySettings(
        connector="offload",
        gpu_blocks=1_500,
        cpu_blocks=32 * traffic.users if is_small else 100 * traffic.requests,
        block_size=traffic.block_size,
        max_num_seqs=_CONCURRENCY,
        max_model_len=longest,
        watch=False,
        store_decode_blocks=store,
    )
    engine = ReplayEngine(settings)
    try:
        counts = _count_stores(engine, scene)
        measured = replay(engine, traffic.ask(seed), _CONCURRENCY)
    finally:
        engine.close()
    return {
        "prompt_tokens": measured.prompt_tokens,
        "hit_tokens": measured.hit_tokens_gpu + measured.hit_tokens_cpu,
        **counts,
    }


def _count_stores(engine: ReplayEngine, scene: Scene) -> dict[str, int]:
    """Blocks of answers whose store has begun from now on."""
    stores = engine.connector._scheduler.stores
    counts = {"answer_blocks": 0, "answer_blocks_after": 0}
    begin = stores._begin

    def counted(pending: Any, plan: Any, blocks: list[Any]) -> Any:
        num_blocks = len(plan.hashes) - max(0, pending.num_prompt_blocks - plan.start)
        if num_blocks > 0:
            template, _, index = pending.request_id.rpartition("-")
            counts["answer_blocks"] += num_blocks
            if int(index) >= scene.count_from and template.startswith(scene.counted):
                counts["answer_blocks_after"] += num_blocks
        return begin(pending, plan, blocks)

    stores._begin = stores.ended._begin = counted
    return counts


def compare(scene: Scene, is_small: bool) -> list[dict[str, Any]]:
    """A row per mode, each beside that of `true`."""
    rows = []
    with_all: dict[str, int] = {}
    for store in (True, False, "auto"):
        runs = [run(scene, store, is_small=is_small, seed=seed) for seed in range(3 if is_small else 1)]
        found = {name: sum(each[name] for each in runs) for name in runs[0]}
        with_all = with_all or found
        after = with_all["answer_blocks_after"]
        rows.append(
            {
                "scene": scene.name,
                "pool": _SMALL if is_small else _LARGE,
                "store_decode_blocks": store,
                **found,
                "hits_of_true": round(found["hit_tokens"] / max(1, with_all["hit_tokens"]), 4),
                "saved_of_true": round(1 - found["answer_blocks_after"] / after, 4) if after else None,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON if asked; return the exit status."""
    parser = parser_of("answers", __doc__)
    names = "; ".join(SCENES).replace("%", "%%")
    parser.add_argument("--scene", metavar="NAME;...", help=f"of {names} (default: all)")
    parser.add_argument("--requests", type=positive, default=_REQUESTS, help="of each scene (default: 1000)")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="default: one per core")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="traces, instead of the scenes")
    options = parser.parse_args(arguments)
    known = scenes(options.requests)
    names = options.scene.split(";") if options.scene else list(known)
    unknown = set(names) - known.keys()
    if unknown:
        parser.error(f"--scene: {', '.join(sorted(unknown))}: use {'; '.join(known)}")
    work = [(known[name], is_small) for name in names for is_small in (False, True)]
    try:
        traces = [read_workload(path) for path in options.trace]
    except (TraceError, OSError) as error:
        parser.error(f"--trace: {error}")
    rows = list(_trace_rows(traces)) if traces else _engine_rows(work, options.processes)
    print(table(_COLUMNS, rows))
    settings = {"requests": options.requests, "trace": [path.stem for path in options.trace]}
    report.write(options.json, rows, settings=settings)
    return 0


def _engine_rows(work: Sequence[tuple[Scene, bool]], processes: int) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_be_quiet) as pool:
        return [row for rows in pool.map(compare, *zip(*work, strict=True)) for row in rows]


def _trace_rows(traces: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        yield from replay_turns(trace.name, trace.requests, AFTER)


def _be_quiet() -> None:
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
