"""Millions of adversarial steps of vLLM's real scheduler over our whole connector.

    python -m tests.soak [--seed 0] --seconds 600 [--processes 2] [--kind window ...] [--json FILE]
    python -m tests.soak --tiers disk,store,several,pool,siblings --steps 250000 --seconds 3600
    python -m tests.soak --pairs --steps 500000 --seconds 3600

Each seed is an engine of its own: tiny pools, random mode, random faults (see ``offload.testing.virtual``).
Engines are of several kinds: as they come, with drafts, with other ranks, with a tier, with a store, with
both, with a pool that outlives them, with siblings, with a pool that is resized, with the groups of a hybrid
model, or in fleets that hand KV to each other. Without ``--kind`` all have their turn, each for so many
seconds. Without ``--seed`` the first seed is fresh, and printed.
The exit status is 1 if any seed failed; a failed seed is printed with its step and the history of the
block, and reproduces with ``--seed SEED --seeds 1`` and its kind.
"""

import argparse
import json
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

from benchmarks.common import report
from offload.testing.virtual import KINDS, RunFailedError, run_seed
from offload.testing.virtual.engine import StuckError
from offload.testing.virtual.history import WrongBytesError
from offload.testing.virtual.run import FLEET

TIERS = {"disk": "tier", "store": "store", "several": "several", "pool": "region", "siblings": "siblings"}
"""Kinds of engines by what is below their pool, or what it is."""


class Outcome(NamedTuple):
    """Of one seed; ``kind`` and ``message`` if it failed."""

    seed: int
    steps: int
    positions_checked: int
    counts: Counter[str]
    kind: str = ""
    message: str = ""


@dataclass(slots=True)
class Totals:
    """All seeds together."""

    seeds: int = 0
    steps: int = 0
    positions_checked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failed_seeds: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more seed."""
        self.seeds += 1
        self.steps += outcome.steps
        self.positions_checked += outcome.positions_checked
        self.counts += outcome.counts
        if outcome.kind:
            self.failures[outcome.kind] += 1
            self.failed_seeds.append(outcome.seed)

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """For printing and for JSON."""
        return {
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "steps_per_second": round(self.steps / seconds),
            "positions_checked": self.positions_checked,
            "wrong_tags": self.failures["wrong tags"],
            "stuck": self.failures["stuck"],
            "other_failures": self.failures["other"],
            "failed_seeds": self.failed_seeds,
            "counts": dict(sorted(self.counts.items())),
        }


def main() -> int:
    """Run seeds of each kind until its time is over; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, help="first seed (default: a fresh one)")
    parser.add_argument("--seeds", type=int, default=0, help="stop after so many seeds (0: by time alone)")
    parser.add_argument("--steps", type=int, default=0, help="begin no seed after so many (0: by time alone)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no seed after that time")
    parser.add_argument("--turns", type=int, default=1000, help="turns of the workload per seed")
    parser.add_argument("--processes", type=int, default=1, help="seeds that run at the same time")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of engines; each counts for itself")
    parser.add_argument("--pairs", action="store_true", help="engines that hand KV to each other")
    parser.add_argument("--tiers", type=_tiers, default=[], help=f"kinds below the pool: {','.join(TIERS)}")
    parser.add_argument("--json", metavar="FILE", help="write the totals there")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**9)
    kinds = [*(arguments.kind or ()), *arguments.tiers, *([FLEET] if arguments.pairs else ())] or KINDS
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    meta = report.meta(settings=settings)  # of the code that runs, whatever is changed meanwhile
    summaries = {}
    print(f"first seed: {arguments.seed}; up to {arguments.seconds:g} seconds of each kind", flush=True)
    for kind in kinds:
        summaries[kind] = _soak(kind, arguments)
        if arguments.json:
            found = summaries[kind] if len(kinds) == 1 else {"kinds": summaries}
            with open(arguments.json, "w") as file:
                json.dump({"meta": meta, **found}, file, indent=2)
                file.write("\n")
    return 1 if any(summary["failed_seeds"] for summary in summaries.values()) else 0


def _tiers(names: str) -> list[str]:
    """The kinds of engines with these below the pool."""
    unknown = [name for name in names.split(",") if name not in TIERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a tier: use some of {','.join(TIERS)}")
    return [TIERS[name] for name in names.split(",")]


def _soak(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run seeds of one kind; print and return what they came to."""
    print(f"{kind}:", flush=True)
    totals, began = Totals(), time.perf_counter()
    said = began
    for outcome in _outcomes(kind, totals, arguments):
        totals.add(outcome)
        if outcome.message:
            print(outcome.message, flush=True)
        if time.perf_counter() - said > 10:
            said = time.perf_counter()
            print(
                f"{totals.seeds} seeds, {totals.steps} steps, {totals.steps / (said - began):.0f} steps/s, "
                f"{totals.counts['loads']} restores, {len(totals.failed_seeds)} failures",
                flush=True,
            )
    summary = totals.as_dict(time.perf_counter() - began)
    for name, value in summary.items():
        print(f"{name:>18}  {value}", flush=True)
    return summary


def _outcomes(kind: str, totals: Totals, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Those of as many seeds as the time allows, in the order in which they end; ``totals`` has them."""
    until = time.perf_counter() + arguments.seconds
    seeds = islice(count(arguments.seed), arguments.seeds or None)
    running: set[Future[Outcome]] = set()
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.processes, mp_context=fork) as pool:
        while True:
            while len(running) < arguments.processes and time.perf_counter() < until:
                if arguments.steps and totals.steps >= arguments.steps:
                    break
                seed = next(seeds, None)
                if seed is None:
                    break
                running.add(pool.submit(_run, seed, arguments.turns, kind))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def _run(seed: int, turns: int, kind: str) -> Outcome:
    logging.disable(logging.WARNING)  # faults made on purpose are not worth a line each
    try:
        ran = run_seed(seed, turns, kind=kind)
    except RunFailedError as failure:
        kinds = {WrongBytesError: "wrong tags", StuckError: "stuck"}
        kind = kinds.get(type(failure.cause), "other")
        return Outcome(seed, failure.step, 0, Counter(), kind, str(failure))
    return Outcome(seed, ran.steps, ran.positions_checked, ran.counts)


if __name__ == "__main__":
    sys.exit(main())
