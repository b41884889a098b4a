"""One number that gives every randomised test other seeds: ``KV_OFFLOAD_SEED``.

Without it, or with 0, every run of every test draws the same. With another number ``random.Random(seed)``
draws otherwise in tests and in what they call, and so does Hypothesis: for `make soak`, and to see that no
test passes by luck.

With ``KV_OFFLOAD_FEWER_SEEDS`` long random runs take every fourth of their seeds, and one hybrid model goes
on from disk instead of three. `make test` does that on the oldest and the newest vLLM, beside all of it on
the one in between.
"""

import os
import random
from typing import Any

from hypothesis.internal.conjecture import providers

OTHER_SEEDS = int(os.environ.get("KV_OFFLOAD_SEED") or 0)
FEWER_SEEDS = bool(int(os.environ.get("KV_OFFLOAD_FEWER_SEEDS") or 0))


def seeds_of_runs(start: int, stop: int) -> range:
    """Of random runs that take seconds each: all of these, or every fourth."""
    return range(start, stop, 4 if FEWER_SEEDS else 1)


class OtherRandom(random.Random):
    """Draws what no other seed, and no other ``OTHER_SEEDS``, draws. Without a seed it is ``Random``."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(None if a is None else f"{OTHER_SEEDS} {a!r}", version)


def use_other_seeds() -> None:
    """Have ``random.Random`` draw otherwise in this process from now on."""
    random.Random = OtherRandom  # type: ignore[misc]


def draw_the_same_beside_any_modules() -> None:
    """Have Hypothesis draw none of the constants in whatever modules of ours a process has loaded.

    It mixes them in, so a test would draw otherwise when it runs alone, or after others.
    """
    none = providers._local_constants
    assert not len(none), "Hypothesis has read modules before"
    providers._get_local_constants = lambda: none
