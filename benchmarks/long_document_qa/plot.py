"""The plot: seconds against documents, for the repeat pass and for all passes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import panels
from benchmarks.long_document_qa.summary import LABELS, Row, passes_total

__all__ = ["write_plot"]

_STYLES = {
    "plain": ("#8c8c8c", "s"),
    "prefix": ("#1f77b4", "o"),
    "native": ("#e08a1e", "^"),
    "offload": ("#2a9d4a", "D"),
}


def write_plot(path: Path, rows: Sequence[Row], title: str, marks: Mapping[str, int]) -> None:
    """Write a PNG with one line per mode: left the last pass, right the sum over all passes.

    Args:
        path: of the PNG; its directory is made.
        rows: of one run.
        title: above the plot.
        marks: text and document count of vertical lines (what fits where).
    """
    last = max(row["pass"] for row in rows)
    passes = [(f"pass {last} of {last}", [row for row in rows if row["pass"] == last])]
    if last > 1:
        passes.append((f"all {last} passes", passes_total(rows)))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": len({row["mode"] for row in rows})}
    with panels(path, len(passes), (6, 4.6), title, **below) as axes:
        for axis, (name, selected) in zip(axes, passes, strict=True):
            _draw(axis, name, selected)
            _mark(axis, marks, max(row["documents"] for row in rows))


def _draw(axis: Any, name: str, rows: Sequence[Row]) -> None:
    counts = sorted({row["documents"] for row in rows})
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = sorted((row["documents"], row["seconds"]) for row in rows if row["mode"] == mode)
        color, marker = _STYLES.get(mode, (None, "o"))
        x, y = zip(*points, strict=True)
        axis.plot(x, y, color=color, marker=marker, label=LABELS.get(mode, mode))
        axis.annotate(
            f"{y[-1]:.1f} s", (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", va="center"
        )
    axis.set_title(name)
    axis.set_xlabel("documents")
    axis.set_ylabel("seconds (less is better)")
    axis.set_xticks(counts)
    axis.margins(x=0.14)


def _mark(axis: Any, marks: Mapping[str, int], most: int) -> None:
    for text, documents in marks.items():
        if documents <= most:
            axis.axvline(documents, color="black", linewidth=0.8, linestyle=":")
            top = axis.get_xaxis_transform()  # x in documents, y as a share of the height
            axis.text(
                documents, 0.98, f"{text} ", transform=top, rotation=90, ha="right", va="top", fontsize=8
            )
