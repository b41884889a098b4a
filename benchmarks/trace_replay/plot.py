"""The plot: hit rate against capacity, or pass by pass where the capacity is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import panels
from benchmarks.trace_replay.policies import DEFAULT, NATIVE, OPTIMA
from benchmarks.trace_replay.rows import Row

__all__ = ["write_plot"]

_VLLM = "vllm-"


def write_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Write a PNG with a panel for each trace and a line for each policy.

    The optimum is dashed, vLLM's own policies are dotted and have the colours of ours of that name.

    Args:
        path: of the PNG; its directory is made.
        rows: of the traces to show.
        title: above the plot.
    """
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    styles = _styles(rows)
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    with panels(path, len(traces), (6.4, 5), title, **beside) as axes:
        for axis, trace in zip(axes, traces, strict=True):
            _draw(axis, trace, [row for row in rows if row["trace"] == trace], styles)


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How to draw each policy; the default only if it is not there by its own name."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    default = next((row["policy_name"] for row in rows if row["policy"] == DEFAULT), None)
    styles: dict[str, dict[str, Any]] = {}
    families: list[str] = []
    for policy in policies:
        if policy == DEFAULT and default in policies:
            continue
        if policy in OPTIMA:
            styles[policy] = {"color": "black" if OPTIMA[policy] else "gray", "linestyle": "--"}
            continue
        family = policy.removeprefix(_VLLM) if policy in NATIVE else policy
        if family not in families:
            families.append(family)
        styles[policy] = {"color": f"C{families.index(family)}", "marker": "o", "markersize": 3.5}
        if policy.startswith(_VLLM):
            styles[policy] |= {"linestyle": ":", "marker": "^"}
        if policy == default:
            styles[policy] |= {"linewidth": 2.6, "label": f"{policy} (default)"}
    return styles


def _draw(axis: Any, trace: str, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    by_pass = any(row["pass"] is not None for row in rows)
    x_name = "pass" if by_pass else "capacity_fraction"
    for policy, style in styles.items():
        shown = [row for row in rows if row["policy"] == policy and row[x_name] is not None]
        points = sorted(
            (row[x_name] if by_pass else 100 * row[x_name], 100 * row["hit_rate"]) for row in shown
        )
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, **{"label": policy, **style})
    if by_pass:
        axis.set_xlabel("pass")
        axis.xaxis.get_major_locator().set_params(integer=True)
    else:
        ticks = sorted({100 * row["capacity_fraction"] for row in rows})
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("capacity, % of the distinct blocks")
    axis.set_ylabel("hit rate, % of tokens in full blocks")
    axis.set_title(trace)
