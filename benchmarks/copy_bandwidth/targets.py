"""What the copies were to reach, and which rows do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.copy_bandwidth.measure import Row
from benchmarks.copy_bandwidth.ways import OurWay

__all__ = ["TARGETS", "Target", "Verdict", "judge"]

_FROM_BLOCKS = 64
"""Below, what a call costs at all is spread over too few blocks to tell anything about the copies."""
_SMALL_PIECE_BYTES = 64 << 10


class Target(NamedTuple):
    """A goal for our rows.

    Attributes:
        name: short.
        text: what is to hold.
        applies: to which of our rows; False for one that lacks the figure.
        figure: the name of what is compared.
        holds: whether it is good enough.
    """

    name: str
    text: str
    applies: Callable[[Row], bool]
    figure: str
    holds: Callable[[float], bool]


class Verdict(NamedTuple):
    """A target, to how many rows it applies, and those that miss it."""

    target: Target
    num_rows: int
    missed: list[Row]

    @property
    def answer(self) -> str:
        """`holds`, `missed`, or `not measured` where it applies to no row."""
        if not self.num_rows:
            return "not measured"
        return "missed" if self.missed else "holds"


def _is_large(row: Row) -> bool:
    return bool(row["blocks"] >= _FROM_BLOCKS)


def _is_one_way(row: Row) -> bool:
    return _is_large(row) and row["direction"] != "both"


TARGETS = (
    Target(
        "one piece",
        f"one piece per block, from {_FROM_BLOCKS} blocks on, each direction: at least 95% of the peak",
        lambda row: _is_one_way(row) and row["pieces"] == 1,
        "share_of_peak",
        lambda share: share >= 0.95,
    ),
    Target(
        "pieces of 64 KiB",
        f"pieces of 64 KiB, from {_FROM_BLOCKS} blocks on, each direction: at least 85% of the peak",
        lambda row: _is_one_way(row) and row["pieces"] > 1 and row["piece_bytes"] == _SMALL_PIECE_BYTES,
        "share_of_peak",
        lambda share: share >= 0.85,
    ),
    Target(
        "both at once",
        f"both directions at once, from {_FROM_BLOCKS} blocks on: at least 80% of the sum of both peaks",
        lambda row: _is_large(row) and row["direction"] == "both",
        "share_of_peak",
        lambda share: share >= 0.80,
    ),
    Target(
        "vLLM",
        "everywhere: at least what vLLM's own worker reaches",
        lambda row: row["times_vllm"] is not None,
        "times_vllm",
        lambda times: times >= 1,
    ),
    Target(
        "submission",
        f"from {_FROM_BLOCKS} blocks on: submission takes at most 1 us per block",
        _is_large,
        "submit_us_per_block",
        lambda microseconds: microseconds <= 1,
    ),
)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Hold our rows against every target."""
    verdicts = []
    for target in TARGETS:
        ours = [row for row in rows if row["way"] == OurWay.name and target.applies(row)]
        verdicts.append(
            Verdict(target, len(ours), [row for row in ours if not target.holds(row[target.figure])])
        )
    return verdicts
