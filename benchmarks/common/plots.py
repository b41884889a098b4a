"""Plots: panels side by side in one PNG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["panels"]


@contextmanager
def panels(path: Path, count: int, size: tuple[float, float], title: str, **legend: Any) -> Iterator[Any]:
    """Give so many axes; what is drawn on them goes to a PNG, with the labels of the first as legend.

    Args:
        path: of the PNG; its directory is made.
        count: panels.
        size: of a panel, in inches.
        title: above all.
        legend: where it is, as matplotlib's `Figure.legend` takes it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((*axes,),) = pyplot.subplots(1, count, figsize=(size[0] * count, size[1]), squeeze=False)
    yield axes
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, **legend)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png", bbox_inches="tight")
    pyplot.close(figure)
