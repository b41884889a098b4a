"""How much of what requests compute is stored, and what held GPU blocks cost the next request.

    python -m benchmarks.stored_share [--quick] [--processes N] [--json FILE]

It runs on the virtual engine (`offload.testing.virtual`): vLLM's real scheduler and the whole connector, no
model. Time is counted in engine steps, one of which is `--step-seconds`. The pool is larger than all prompts
together, and no prompt is like another. So all full blocks of all requests should be in it at the end.

The whole product of five things: prompt length and what a step can compute, both as a share of the GPU cache,
tokens to generate, requests at once, steps of a copy. A copy takes so many at most from its order to the
bytes, and again from there to its report. Each twice:

- waves: so many requests come together, and the next ones after all copies have ended.
- closed: a request comes whenever another one has ended.

Per row: the share of full blocks stored; blocks not stored, by reason; steps in all, and to the first token
(mean and longest). Closed ones beside the same engine without a connector.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from statistics import median_high
from typing import Any

from tqdm import tqdm
from vllm.v1.request import Request

from benchmarks.common import report
from benchmarks.common.arguments import parser_of
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.tables import Column, grouped, table
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.testing.virtual.engine import VOCABULARY
from offload.testing.virtual.scheduler_audit import SchedulerAudit

__all__ = ["main"]

_BLOCK = 4
"""Tokens per block; the number of blocks matters here, not their size."""
_CACHE = 256
"""Blocks of the GPU cache that requests can use."""
_MAX_STEPS = 100_000
_UNSTORED = "unstored_blocks_"


@dataclass(frozen=True, slots=True)
class Scene:
    """One point of the product; `is_waves`: as explained above."""

    prompt_sixteenths: int
    step_sixteenths: int
    answer_tokens: int
    at_once: int
    copy_steps: int
    is_waves: bool

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt."""
        return self.prompt_sixteenths * _CACHE * _BLOCK // 16

    @property
    def comes_after_copies(self) -> bool:
        """Whether no request comes while others are copied: those that come together fit the cache."""
        blocks = (self.prompt_tokens + self.answer_tokens) // _BLOCK + 1
        return self.is_waves and self.at_once * blocks <= _CACHE

    @property
    def num_requests(self) -> int:
        """In all: eight at least, and some that come when others have ended."""
        return max(8, self.at_once + 8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a scene; steps to the first token are `mean` and `longest`."""

    share: float
    unstored: dict[str, int]
    steps: int
    mean: float
    longest: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON if asked; return the exit status."""
    parser = parser_of("stored_share", __doc__)
    parser.add_argument("--quick", action="store_true", help="the corners of the product only")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="what a step takes")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per core")
    options = parser.parse_args(arguments)
    scenes = list(_scenes(options.quick))
    rows = []
    with ProcessPoolExecutor(options.processes, get_context("spawn"), _be_quiet) as pool:
        found = pool.map(partial(_row, step_seconds=options.step_seconds), scenes, chunksize=6)
        for row in tqdm(found, total=len(scenes), unit="row"):
            rows.append(row)
    report.write(options.json, rows, settings={"quick": options.quick, "step_seconds": options.step_seconds})
    print(_table(rows))
    after = [row["share"] for row in rows if row["comes_after_copies"]]
    whole = sum(share == 1.0 for share in after)
    print(f"where requests come after the copies, all is stored in {whole} of {len(after)} rows")
    return 0


def _scenes(is_quick: bool) -> Iterator[Scene]:
    lengths = (1, 15) if is_quick else (1, 4, 8, 15)
    at_once = (1, 8) if is_quick else (1, 2, 4, 8, 16, 32)
    steps = (2, 16)
    answers = (1,) if is_quick else (1, 4, 64)
    copies = (4,) if is_quick else (1, 4, 12)
    for length, step, answer, many, copy, is_waves in product(
        lengths, steps, answers, at_once, copies, (True, False)
    ):
        yield Scene(length, step, answer, many, copy, is_waves)


def _be_quiet() -> None:
    logging.disable(logging.WARNING)


def _row(scene: Scene, step_seconds: float) -> dict[str, Any]:
    ours = run(scene, "offload", step_seconds)
    row = {**asdict(scene), "comes_after_copies": scene.comes_after_copies, **asdict(ours)}
    if not scene.is_waves:
        alone = _alone(replace(scene, copy_steps=0), step_seconds)
        row |= {f"{name}_without": getattr(alone, name) for name in ("steps", "mean", "longest")}
    return row


@cache
def _alone(scene: Scene, step_seconds: float) -> Outcome:
    """The same without a connector; several scenes are compared with it."""
    return run(scene, "none", step_seconds)


def run(scene: Scene, connector: str, step_seconds: float) -> Outcome:
    """Drive one engine through a scene."""
    rng = random.Random(1)
    tokens_in_all = scene.num_requests * (scene.prompt_tokens + scene.answer_tokens)
    settings = VirtualSettings(
        connector=connector,
        gpu_blocks=_CACHE + 1,
        cpu_slots=2 * tokens_in_all // _BLOCK,
        block_size=_BLOCK,
        chunk=scene.step_sixteenths * _CACHE * _BLOCK // 16,
        max_num_seqs=32,
        verify_loads="never",
        answer_run=4,
        answer_interval=16,
        step_seconds=step_seconds,
        copies=CopySchedule(longest_delay=scene.copy_steps),
    )
    engine = VirtualEngine(settings, rng)
    engine.audit = SchedulerAudit(engine)  # the tests' business is to look at every byte
    prompts = [draw_tokens(rng, scene.prompt_tokens, VOCABULARY) for _ in range(scene.num_requests)]
    unstored = _count_unstored(engine)
    try:
        requests, first = _drive(engine, scene, prompts)
        steps = engine.num_steps
        _rest(engine)
        share = _share(engine, requests)
        return Outcome(share, dict(unstored), steps, sum(first) / len(first), max(first))
    finally:
        engine.close()


def _drive(engine: VirtualEngine, scene: Scene, prompts: list[list[int]]) -> tuple[list[Request], list[int]]:
    """Serve all prompts; returns the requests and the steps from each one's arrival to its first token."""
    requests: list[Request] = []
    live: dict[str, tuple[Request, int]] = {}
    first: dict[str, int] = {}
    while prompts or live:
        if scene.is_waves and not live:
            _rest(engine)
        num_missing = scene.at_once - len(live) if not (scene.is_waves and live) else 0
        for _ in range(min(num_missing, len(prompts))):
            request = engine.add(prompts.pop(), scene.answer_tokens)
            requests.append(request)
            live[request.request_id] = request, engine.num_steps
        engine.step()
        for name, (request, began) in list(live.items()):
            if request.num_output_tokens:
                first.setdefault(name, engine.num_steps - began)
            if request.is_finished():
                del live[name]
        if engine.num_steps > _MAX_STEPS:
            raise RuntimeError(f"{scene}: no end after {_MAX_STEPS} steps")
    return requests, list(first.values())


def _rest(engine: VirtualEngine) -> None:
    for _ in range(_MAX_STEPS):
        if engine.is_idle():
            return
        engine.step()
    raise RuntimeError(f"the engine does not come to rest within {_MAX_STEPS} steps")


def _share(engine: VirtualEngine, requests: list[Request]) -> float:
    if engine.settings.connector != "offload":
        return 0.0
    full = sum((request.num_tokens - 1) // _BLOCK for request in requests)
    resident = engine.side.allocator.resident_depth
    return sum(resident(request.block_hashes) for request in requests) / full


def _count_unstored(engine: VirtualEngine) -> Counter[str]:
    """Blocks not stored from now on, by reason, as the metrics tell."""
    unstored: Counter[str] = Counter()
    if engine.settings.connector != "offload":
        return unstored
    take = engine.side.take_metrics

    def counted() -> dict[str, float]:
        values = take()
        for name, value in values.items():
            if name.startswith(_UNSTORED) and value:
                unstored[name.removeprefix(_UNSTORED)] += int(value)
        return values

    engine.side.take_metrics = counted  # type: ignore[method-assign]
    return unstored


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """The least share and the greatest cost, by what decides them."""
    kinds = "is_waves", "prompt_sixteenths", "step_sixteenths", "copy_steps"
    return table(_COLUMNS, grouped(rows, *kinds).values())


def _greatest(rows: Sequence[dict[str, Any]], name: str) -> str | None:
    if rows[0]["is_waves"]:
        return None
    return f"{max(row[name] / row[f'{name}_without'] for row in rows):.2f}x"


_COLUMNS = (
    Column("requests", lambda rows: "waves" if rows[0]["is_waves"] else "closed"),
    Column("prompt", lambda rows: f"{rows[0]['prompt_sixteenths']}/16"),
    Column("step", lambda rows: f"{rows[0]['step_sixteenths']}/16"),
    Column("copy steps", lambda rows: rows[0]["copy_steps"]),
    Column("least share", lambda rows: min(row["share"] for row in rows), ".1%"),
    Column("median share", lambda rows: median_high(row["share"] for row in rows), ".1%"),
    Column("steps", lambda rows: _greatest(rows, "steps")),
    Column("first token", lambda rows: _greatest(rows, "mean")),
)


if __name__ == "__main__":
    raise SystemExit(main())
