"""Millions of adversarial steps of vLLM's real scheduler over our whole connector.

    python -m tests.soak --seed 0 --seconds 600 --json soak.json

Each seed is an engine of its own: tiny pools, random mode, random faults (see ``offload.vllm.virtual``).
The exit status is 1 if any seed failed; a failed seed is printed with its step and the history of the
block, and reproduces with ``--seed SEED --seeds 1``.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from offload.vllm.virtual import RunFailedError, run_seed
from offload.vllm.virtual.engine import StuckError
from offload.vllm.virtual.history import WrongBytesError


@dataclass(slots=True)
class Totals:
    """All seeds together."""

    seeds: int = 0
    steps: int = 0
    positions_checked: int = 0
    wrong_tags: int = 0
    stuck: int = 0
    other_failures: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed_seeds: list[int] = field(default_factory=list)

    def add_failure(self, failure: RunFailedError) -> None:
        """A seed went wrong, one way or another."""
        self.failed_seeds.append(failure.seed)
        self.steps += failure.step
        if isinstance(failure.cause, WrongBytesError):
            self.wrong_tags += 1
        elif isinstance(failure.cause, StuckError):
            self.stuck += 1
        else:
            self.other_failures += 1

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """For printing and for JSON."""
        return {
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "steps_per_second": round(self.steps / seconds),
            "positions_checked": self.positions_checked,
            "wrong_tags": self.wrong_tags,
            "stuck": self.stuck,
            "other_failures": self.other_failures,
            "failed_seeds": self.failed_seeds,
            "counts": dict(sorted(self.counts.items())),
        }


def main() -> int:
    """Run seeds until the time is over; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=0, help="stop after so many seeds (0: by time alone)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=1000, help="turns of the workload per seed")
    parser.add_argument("--json", metavar="FILE", help="write the totals there")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # faults made on purpose are not worth a line each
    totals, began = Totals(), time.perf_counter()
    said = began
    seed = arguments.seed
    while time.perf_counter() - began < arguments.seconds:
        if arguments.seeds and totals.seeds == arguments.seeds:
            break
        try:
            report = run_seed(seed, arguments.turns)
        except RunFailedError as failure:
            totals.add_failure(failure)
            print(failure, flush=True)
        else:
            totals.steps += report.steps
            totals.positions_checked += report.positions_checked
            totals.counts += report.counts
        totals.seeds += 1
        seed += 1
        if time.perf_counter() - said > 10:
            said = time.perf_counter()
            print(
                f"{totals.seeds} seeds, {totals.steps} steps, {totals.steps / (said - began):.0f} steps/s, "
                f"{totals.counts['loads']} restores, {len(totals.failed_seeds)} failures",
                flush=True,
            )
    summary = totals.as_dict(time.perf_counter() - began)
    for name, value in summary.items():
        print(f"{name:>18}  {value}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(summary, file, indent=2)
    return 1 if totals.failed_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
