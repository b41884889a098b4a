"""Is the scheduler's time that of another commit?

    git worktree add /tmp/before COMMIT
    python -m benchmarks.control_plane.against /tmp/before [--pairs 20] [--json FILE]

Our connector alone, of that tree and of this one, each in a process of its own and in alternation. A pair is
one run of each, and its ratio is here / there. A prompt is stored (cold), restored (warm), and stored into a
pool that is full (evicting). At last come steps that only decode for 256 requests, with the default policy:
the mean of each run. Told are the median of the ratios and its 95% interval, from order statistics.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import comb
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import at_least, parser_of, settings_of
from benchmarks.common.tables import Column, table

__all__ = ["main"]

_CHILD = """
import json, random, sys
try:
    from benchmarks.control_plane import decode, prompts
    scale = 1
except ImportError:  # before benchmarks were packages: by blocks, not by tokens
    from benchmarks.control import decode, prompts
    from benchmarks.control.sizes import BLOCK_TOKENS as scale
from vllm.utils.gc_utils import freeze_gc_heap

engines = {}
for line in sys.stdin:
    what, *arguments = json.loads(line)
    if what == "open":
        longest, slots, resident = arguments
        engine = engines[resident] = prompts.PromptEngine("offload", longest, slots)
        freeze_gc_heap()
        engine.fill(resident)
        told = None
    elif what == "decode":
        engine = decode.DecodeEngine("offload", *arguments)
        freeze_gc_heap()
        steps = [sum(step.values()) for step in engine.steps()]
        engine.engine.close()
        told = sum(steps) / len(steps)
    else:
        resident, seed, tokens = arguments
        told = sum(getattr(engines[resident], what)(seed, tokens // scale).values())
    print("TOLD " + json.dumps(told), flush=True)
"""
_HERE = Path(__file__).resolve().parents[2]
_BLOCK_TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write rows."""
    options = _parser().parse_args(arguments)
    runs: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        there, here = (stack.enter_context(_Child.of(tree)) for tree in (options.tree, _HERE))
        capacity = options.pairs * options.tokens // _BLOCK_TOKENS
        for resident in (0, options.resident):
            for child in (there, here):
                child.ask("open", options.tokens, capacity + resident, resident)
            for state in ("cold", "evicting") if resident else ("cold",):
                for pair in range(options.pairs):
                    print(f"  {resident:,} blocks, {state}: pair {pair + 1}", file=sys.stderr, flush=True)
                    seed = f"{state} {pair}"
                    for what in ("cold", "warm"):
                        told = _pair(there, here, pair, what, resident, seed, options.tokens)
                        if what == "cold" or state == "cold":
                            name = what if state == "cold" else state
                            runs.setdefault(f"{name}, {resident:,} resident", []).append(told)
        for pair in range(options.pairs):
            print(f"  decode: pair {pair + 1}", file=sys.stderr, flush=True)
            runs.setdefault("decode step", []).append(
                _pair(there, here, pair, "decode", options.decode_steps)
            )
    rows = [_row(state, pairs) for state, pairs in runs.items()]
    print(table(_COLUMNS, rows))
    settings = {**settings_of(options), "tree": _commit(options.tree)}
    report.write(options.json, rows, settings=settings)
    return 0


class _Child:
    """Our connector of one tree."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def of(cls, tree: Path) -> Iterator[_Child]:
        """A process that imports what is in ``tree``."""
        variables = {**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            cwd=tree,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            process.wait()

    def ask(self, *question: object) -> Any:
        """Its answer: nanoseconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("TOLD "):
                return json.loads(line.removeprefix("TOLD "))
        raise RuntimeError(f"{self._process.args!r} has ended: its errors are above")


def _pair(there: _Child, here: _Child, number: int, *question: object) -> tuple[float, float]:
    """One run of each, who begins alternates."""
    children = (there, here) if number % 2 else (here, there)
    told = {id(child): child.ask(*question) for child in children}
    return told[id(there)], told[id(here)]


def _row(state: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(here / there for there, here in pairs)
    low = _rank(len(ratios))
    return {
        "state": state,
        "pairs": len(pairs),
        "there_us": statistics.median(there for there, _ in pairs) / 1000,
        "here_us": statistics.median(here for _, here in pairs) / 1000,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[low],
        "ratio_high": ratios[-1 - low],
    }


def _rank(count: int) -> int:
    """Which order statistics, from either end, bound the median with 95% confidence."""
    tail, rank = 0.0, 0
    while rank < count // 2 and tail + comb(count, rank) / 2**count <= 0.025:
        tail += comb(count, rank) / 2**count
        rank += 1
    return max(rank - 1, 0)


def _commit(tree: Path) -> str:
    asked = subprocess.run(
        ["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


_COLUMNS = [
    Column("state", "state"),
    Column("pairs", "pairs"),
    Column("there, us", "there_us", ".1f"),
    Column("here, us", "here_us", ".1f"),
    Column("ratio", "ratio", ".3f"),
    Column("from", "ratio_low", ".3f"),
    Column("to", "ratio_high", ".3f"),
]


def _parser() -> Any:
    parser = parser_of("control_plane.against", __doc__)
    parser.add_argument("tree", type=Path, metavar="TREE", help="a checkout of the other commit")
    for name, default, least, what in (
        ("pairs", 20, 6, "of each state"),
        ("tokens", 131_072, 16, "of a prompt"),
        ("resident", 100_000, 1, "blocks in the pool of the second part"),
        ("decode-steps", 256, 24, "that are measured, after as many others"),
    ):
        told = f"{what} (default: {default})"
        parser.add_argument(f"--{name}", type=at_least(least), default=default, metavar="N", help=told)
    return parser


if __name__ == "__main__":
    sys.exit(main())
