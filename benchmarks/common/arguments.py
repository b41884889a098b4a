"""Types of command-line arguments that several scripts take."""

from __future__ import annotations

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """A whole number, at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return value
