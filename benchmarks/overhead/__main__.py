"""What does a connector cost where it cannot help? Two engines alive at once, taking turns.

    python -m benchmarks.overhead [--mode offload] [--rounds 12] [--starts 2] [--json FILE]

One engine has prefix caching and no connector, the other has the connector of `--mode`. Both get the same
prompts in short alternating rounds, so that what disturbs the machine disturbs both alike:

- no reuse: every document new (rounds of `--round-documents`); the connector only stores, and once its
  pool is full it evicts as well.
- fits: as many documents as the GPU holds, asked again and again; the connector has nothing to do.
- cold passes: all caches are emptied before each round (of as many documents as in "no reuse"). So nothing is
  found, and the pool has room for all.

Two engines that are alike still differ by a few percent for as long as they live. That comes from their place
in memory and on the machine. So both are started anew `--starts` times, in alternating order. Per case and
start: the median over the rounds of (seconds with / seconds without). Per case: the geometric mean of these
medians with its 95% interval (Student's t over the logarithms of the starts' medians), and the quartiles and
extremes of all rounds. The same for CPU seconds of all an engine's processes. `--mode prefix` compares the
engine with a second one like it: the noise of the measurement itself. `--mode bare` has a connector whose
hooks do nothing: what vLLM spends on having any. The waiting engine's share of a core is measured too; it
must be near 0 for turns to be fair.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, at_least, parser_of
from benchmarks.common.tables import Column, grouped, table
from benchmarks.long_document_qa.arguments import (
    add_engine_arguments,
    add_prompt_arguments,
    check_memory,
    make_settings,
)
from benchmarks.long_document_qa.engine_process import EngineProcess
from benchmarks.long_document_qa.measure import RoundResult
from benchmarks.long_document_qa.settings import BARE, MODES, Settings
from benchmarks.long_document_qa.summary import Row, notes
from benchmarks.long_document_qa.workload import Prompt, rounds
from offload.testing.engines.process import EngineError

__all__ = ["main"]

_BASE = "prefix"
_CASES = ("no reuse", "fits", "cold passes")
# Quantiles 0.975 of Student's t for 1, 2, ... degrees of freedom; the last one also for more, which is wider.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_LOOK_SECONDS = 0.1
_REST_SECONDS = 15.0


class _Turn(NamedTuple):
    """One engine's round: its result and CPU seconds, and what share of a core the other used meanwhile."""

    result: RoundResult
    cpu_seconds: float
    idle_share: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 0, or 1 if an engine failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    try:
        settings = make_settings(given)
        check_memory(settings, [options.mode], engines=2)
    except ValueError as error:
        parser.error(str(error))
    remarks = report.load_note() + notes([options.mode], settings)
    rows: list[Row] = []
    try:
        for start in range(1, options.starts + 1):
            rows += _compare(settings, options.mode, start, options.rounds, options.round_documents)
    except EngineError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    print("\n" + _format(rows, options.mode))
    for remark in remarks:
        print(remark)
    told = {"mode": options.mode, "base": _BASE, "starts": options.starts, "rounds": options.rounds}
    report.write(options.json, rows, settings={**told, **asdict(settings)}, notes=remarks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("overhead", __doc__)
    add = parser.add_argument
    add("--mode", choices=[*MODES, BARE], default="offload", help="of the second engine (default: offload)")
    add_numbers(
        parser,
        ("starts", 2, "fresh pairs of engines"),
        ("rounds", 12, "pairs per case and start", at_least(2)),
        ("round-documents", 4, "new ones per round"),
    )
    add_prompt_arguments(parser.add_argument_group("workload"))
    add_engine_arguments(parser.add_argument_group("engines"))
    return parser


def _compare(settings: Settings, mode: str, start: int, count: int, round_documents: int) -> list[Row]:
    """Start both engines, base first at odd starts, and let them take `count` turns per case."""
    rows: list[Row] = []
    base, other = EngineProcess(settings, _BASE), EngineProcess(settings, mode)
    with ExitStack() as stack:
        for engine in (base, other) if start % 2 else (other, base):
            stack.enter_context(engine).warm_up()
        for case in _CASES:
            every_round = _no_reuse(settings, count, round_documents)
            if case == "fits":
                every_round = _fits(settings, count)
                for engine in (base, other):
                    engine.reset()
                    engine.run_round(next(_fits(settings, 1)))
            bar = tqdm(
                every_round, desc=f"start {start}, {case}", total=count, unit="round", dynamic_ncols=True
            )
            for number, prompts in enumerate(bar, 1):
                if case == "cold passes":
                    base.reset()
                    other.reset()
                turns = _pair(base, other, prompts, number % 2 == 0)
                rows.append({"case": case, "start": start, "round": number, "mode": mode, **_row(*turns)})
    return rows


def _pair(
    base: EngineProcess, other: EngineProcess, prompts: list[Prompt], other_first: bool
) -> tuple[_Turn, _Turn]:
    """Let both engines ask the same prompts, one after the other; returns the turns of base and other."""
    if other_first:
        other_turn = _turn(other, base, prompts)
        return _turn(base, other, prompts), other_turn
    return _turn(base, other, prompts), _turn(other, base, prompts)


def _turn(engine: EngineProcess, idle: EngineProcess, prompts: list[Prompt]) -> _Turn:
    """Let `engine` ask the prompts as soon as `idle` is at rest; a worker spins for a second after work."""
    deadline = time.monotonic() + _REST_SECONDS
    while True:
        before = _cpu_seconds(idle.pid)
        time.sleep(_LOOK_SECONDS)
        if _cpu_seconds(idle.pid) - before <= 0.1 * _LOOK_SECONDS:
            break
        if time.monotonic() > deadline:
            raise EngineError(
                f"mode {idle.mode!r}: the engine still computes {_REST_SECONDS:g} s after its turn"
            )
    before, own = _cpu_seconds(idle.pid), _cpu_seconds(engine.pid)
    result = engine.run_round(prompts)
    own = _cpu_seconds(engine.pid) - own
    return _Turn(result, own, (_cpu_seconds(idle.pid) - before) / result.seconds)


def _cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its descendants have used."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _no_reuse(settings: Settings, count: int, documents: int) -> Iterator[list[Prompt]]:
    workload = replace(settings.workload, passes=1, order="tile")
    for number in range(count):
        (only,) = rounds(replace(workload, seed=workload.seed + 1000 + number), documents)
        yield only.prompts


def _fits(settings: Settings, count: int) -> Iterator[list[Prompt]]:
    """Yield the same documents in each round, with new questions."""
    workload = replace(settings.workload, passes=count, order="tile")
    for each in rounds(workload, settings.gpu_documents):
        yield each.prompts


def _row(base: _Turn, other: _Turn) -> Row:
    counters = other.result.counters
    return {
        "seconds_without": round(base.result.seconds, 4),
        "seconds": round(other.result.seconds, 4),
        "ratio": round(other.result.seconds / base.result.seconds, 4),
        "cpu_seconds_without": round(base.cpu_seconds, 3),
        "cpu_seconds": round(other.cpu_seconds, 3),
        "cpu_ratio": round(other.cpu_seconds / base.cpu_seconds, 4),
        "prompt_tokens": other.result.prompt_tokens,
        "cached_gpu_tokens": counters.cached_gpu_tokens,
        "cached_gpu_tokens_without": base.result.counters.cached_gpu_tokens,
        "cached_cpu_tokens": counters.cached_cpu_tokens,
        "bytes_stored": counters.bytes_stored,
        "bytes_loaded": counters.bytes_loaded,
        "evicted_blocks": counters.evicted_blocks,
        "idle_share": round(max(base.idle_share, other.idle_share), 3),
    }


def _format(rows: Sequence[Row], mode: str) -> str:
    columns = (
        Column("case", lambda group: group[0]["case"]),
        Column("rounds", len),
        Column("s without", _median_of("seconds_without"), ".3f"),
        Column(f"s with {mode}", _median_of("seconds"), ".3f"),
        Column("ratio", lambda group: statistics.geometric_mean(_by_start(group)), ".4f"),
        Column("95%", lambda group: _told(interval(_by_start(group)))),
        Column("CPU", lambda group: statistics.geometric_mean(_by_start(group, "cpu_ratio")), ".4f"),
        Column("95%", lambda group: _told(interval(_by_start(group, "cpu_ratio")))),
        Column("by start", lambda group: " ".join(f"{each:.4f}" for each in _by_start(group))),
        Column(
            "quartiles", lambda group: "{:.4f} to {:.4f}".format(*np.percentile(_ratios(group), [25, 75]))
        ),
        Column("extremes", lambda group: f"{min(_ratios(group)):.4f} to {max(_ratios(group)):.4f}"),
        Column(
            "GPU hits", lambda group: _sum(group, "cached_gpu_tokens") / _sum(group, "prompt_tokens"), ".1%"
        ),
        Column("stored MiB", lambda group: _sum(group, "bytes_stored") / 2**20, ".0f"),
        Column("idle engine", lambda group: f"{_median_of('idle_share')(group):.1%} of a core"),
    )
    return table(columns, grouped(rows, "case").values())


def _median_of(name: str) -> Callable[[Sequence[Row]], float]:
    return lambda group: statistics.median(row[name] for row in group)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the geometric mean of ratios that are independent; of a single one: anything.

    Their logarithms are taken to be of a normal distribution.
    """
    if len(ratios) < 2:
        return 0.0, math.inf
    logs = np.log(ratios)
    half = _T[min(len(logs) - 1, len(_T)) - 1] * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    middle = float(np.mean(logs))
    return math.exp(middle - half), math.exp(middle + half)


def _told(ends: tuple[float, float]) -> str:
    return "{:.4f} to {:.4f}".format(*ends)


def _by_start(group: Sequence[Row], name: str = "ratio") -> list[float]:
    """The median ratio of each start."""
    return [_median_of(name)(rows) for rows in grouped(group, "start").values()]


def _ratios(group: Sequence[Row]) -> list[float]:
    return [row["ratio"] for row in group]


def _sum(group: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in group)


if __name__ == "__main__":
    sys.exit(main())
