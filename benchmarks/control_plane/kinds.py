"""What the scheduler's side takes on models with windows or states, against plain ones and against vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import methodcaller
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.tables import Column, table
from benchmarks.control_plane.figures import OURS, Row
from benchmarks.control_plane.process import child_of
from benchmarks.control_plane.sizes import BLOCK_TOKENS
from offload.testing.engines.process import EngineError

if TYPE_CHECKING:
    from benchmarks.control_plane.asked_again import Asked

__all__ = ["KINDS", "measure", "ratios", "show"]

KINDS: Mapping[str, Mapping[str, int]] = {
    "window": {"gpt-oss": 16, "gemma-3": 16},
    "mamba": {"small states": 16, "qwen3-next": 544},
}
"""By kind: shapes of `benchmarks.common.shapes`, and how many tokens a position of each has."""

_NATIVE, _PLAIN, _ENDS = "native", "plain", "ends only"
_CONNECTORS = {OURS: (OURS, ""), _NATIVE: (_NATIVE, ""), _PLAIN: (OURS, "plain"), _ENDS: (OURS, "ends")}
"""By name: the connector, and which variant of it."""
_STATES = ("cold", "warm")
_DECODE = "decode"
_PHASES = ("lookup", "plan", "complete", "finish", "other")
_BARS = {
    (_PLAIN, "cold", "total"): ("at most", 2),
    (_PLAIN, "warm", "total"): ("at most", 2),
    (_NATIVE, "cold", "total"): ("at least", 10),
    (_NATIVE, "warm", "total"): ("at least", 10),
    (_ENDS, "cold", "longest"): ("at most", 1.05),
    (_PLAIN, _DECODE, "total"): ("at most", None),
    (_NATIVE, _DECODE, "total"): ("at least", 10),
    (_ENDS, _DECODE, "total"): ("at most", 1.05),
}
"""Ours / the other, or the other / ours where it is to be larger; None: only told."""


def measure(
    kinds: Sequence[str], lengths: Sequence[int], chunk: int, runs: int, decode_steps: int
) -> list[Row]:
    """A row for each run of each connector, for documents of these lengths in tokens. Times are microseconds.

    Raises:
        EngineError: a process failed, or native did not restore as much as ours.
    """
    rows: list[Row] = []
    for kind in kinds:
        for shape, block in KINDS[kind].items():
            for tokens in lengths:
                about = {"kind": kind, "shape": shape, "tokens": tokens, "positions": tokens // block}
                rows += [about | row for row in _asked(shape, tokens, chunk, runs)]
            if block == BLOCK_TOKENS:
                about = {"kind": kind, "shape": shape, "tokens": None, "positions": None}
                rows += [about | row for row in _decoded(shape, runs, decode_steps)]
    return rows


def _asked(shape: str, tokens: int, chunk: int, runs: int) -> Iterator[Row]:
    with ExitStack() as stack:
        children = {}
        for name, (connector, variant) in _CONNECTORS.items():
            _tell(f"{shape}, {tokens:,} tokens: {name}")
            sizes = (shape, tokens, chunk, runs + 1, variant)
            children[name] = stack.enter_context(child_of("asked_again", connector, *sizes))
        for run in range(-1, runs):  # the first one warms up
            computed = {}
            for name in _rotated(run):
                for state in _STATES:
                    asked = children[name].run(methodcaller("ask", f"document {run}", f"{state} {run}"))
                    computed[name] = asked.computed
                    if run >= 0:
                        yield _row(name, state, run, asked)
            if computed[_NATIVE] > computed[OURS]:
                raise EngineError(
                    f"{shape}: native computed {computed[_NATIVE]} tokens, ours {computed[OURS]}: its time "
                    "is not for the same"
                )


def _row(name: str, state: str, run: int, asked: Asked) -> Row:
    return {
        "connector": name,
        "state": state,
        "run": run,
        "steps": asked.steps,
        "computed_tokens": asked.computed,
        **{phase: asked.phases.get(phase, 0) / 1e3 for phase in _PHASES},
        "total": asked.total / 1e3,
        "handed_over": asked.handed_over / 1e3,
        "scheduler": asked.scheduler / 1e3,
        "longest": asked.longest / 1e3,
    }


def _decoded(shape: str, runs: int, num_steps: int) -> Iterator[Row]:
    """Steps that only decode: the median of them."""
    for run in range(runs):
        _tell(f"{shape}, decode: run {run + 1} of {runs}")
        for name in _rotated(run):
            connector, variant = _CONNECTORS[name]
            with child_of("decode", connector, num_steps, shape, variant) as child:
                steps = [sum(step.values()) / 1e3 for step in child.run(methodcaller("steps"))]
            about = {"connector": name, "state": _DECODE, "run": run, "steps": num_steps}
            yield {**about, "total": median(steps), "longest": max(steps)}


def _rotated(run: int) -> list[str]:
    """All connectors; everybody is first in one run."""
    names = list(_CONNECTORS)
    by = run % len(names)
    return [*names[by:], *names[:by]]


def _tell(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """The median of what runs side by side took, with its bar."""
    runs: dict[tuple[Any, ...], dict[int, dict[str, Row]]] = {}
    for row in rows:
        setting = (row["kind"], row["shape"], row["tokens"], row["state"])
        runs.setdefault(setting, {}).setdefault(row["run"], {})[row["connector"]] = row
    found = []
    for (kind, shape, tokens, state), by_run in runs.items():
        for (other, when, what), (sense, bar) in _BARS.items():
            if when != state:
                continue
            each = [names[OURS][what] / names[other][what] for names in by_run.values()]
            each = sorted(1 / ratio for ratio in each) if sense == "at least" else sorted(each)
            ratio = round(median(each), 2)
            found.append(
                {
                    "kind": kind,
                    "shape": shape,
                    "tokens": tokens,
                    "state": state,
                    "what": what,
                    "ratio_of": f"{other} / ours" if sense == "at least" else f"ours / {other}",
                    "ratio": ratio,
                    "from": round(each[0], 2),
                    "to": round(each[-1], 2),
                    "bar": bar and f"{sense} {bar:g}",
                    "is_met": bar and (ratio >= bar if sense == "at least" else ratio <= bar),
                }
            )
    return found


def show(rows: Sequence[Row], found: Sequence[Row]) -> str:
    """Medians of all runs, and the ratios."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        setting = (row["shape"], row["tokens"], row["state"], row["connector"])
        lines.setdefault(setting, []).append(row)
    names = (*_PHASES, "total", "handed_over", "scheduler", "longest")
    medians = [
        {**same[0], **{name: median(row[name] for row in same) for name in names if name in same[0]}}
        for same in lines.values()
    ]
    for row in medians:
        row["each"] = row["positions"] and row["total"] / row["positions"]
    told = "microseconds of a processor in the connector; in all of the scheduler, and in the longest step\n"
    return f"{told}{table(_COLUMNS, medians)}\n\nside by side\n{table(_RATIOS, found)}"


_COLUMNS = (
    Column("shape", "shape"),
    Column("tokens", "tokens", ","),
    Column("state", "state"),
    Column("connector", "connector"),
    Column("computed", "computed_tokens", ","),
    Column("steps", "steps"),
    *(Column(phase, phase, ",.0f") for phase in _PHASES),
    Column("total", "total", ",.0f"),
    Column("per position", "each", ".3f"),
    Column("handed over", "handed_over", ",.0f"),
    Column("scheduler", "scheduler", ",.0f"),
    Column("longest step", "longest", ",.0f"),
)
_RATIOS = (
    Column("shape", "shape"),
    Column("tokens", "tokens", ","),
    Column("state", "state"),
    Column("what", "what"),
    Column("ratio of", "ratio_of"),
    Column("median", "ratio", ".2f"),
    Column("from", "from", ".2f"),
    Column("to", "to", ".2f"),
    Column("bar", lambda row: row["bar"] and row["bar"] + ("" if row["is_met"] else " (!)")),
)
