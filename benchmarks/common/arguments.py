"""Command lines of benchmarks: what all have, and types of arguments that several take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

__all__ = [
    *("above_zero", "add_numbers", "at_least", "none_below_zero", "one_of", "parser_of", "positive"),
    "settings_of",
]


def parser_of(benchmark: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.NAME`, described by its module's docstring, with `--json FILE`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, but for the files to write."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "plot")}


def at_least(least: int) -> Callable[[str], int]:
    """A whole number, at least that."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
        return int(text)

    return parse


positive = at_least(1)


def above_zero(text: str) -> float:
    """A number above 0, not infinite."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def none_below_zero(text: str) -> float:
    """A number, 0 or more, not infinite."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, at least 0")
    return value


def add_numbers(target: Any, *options: tuple[Any, ...]) -> None:
    """Add `--NAME N` for each: its name, its default, what it is, and its type if that is no guess.

    The guess: a number above 0, whole if the default is. ``target``: a parser, or a group of one.
    """
    for name, default, what, *kind in options:
        guess = above_zero if isinstance(default, float) else positive
        told = f"{what} (default: {default:,.10g})"
        target.add_argument(f"--{name}", type=[*kind, guess][0], default=default, metavar="N", help=told)


def one_of(names: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Names, with commas between, each one of these; none of them twice. None at all for nothing."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r}: must be one of {', '.join(names)}")
        return found

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
