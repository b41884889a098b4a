"""A virtual engine's pool is made larger and smaller, as an operator would."""

from contextlib import suppress
from typing import Any, NamedTuple

from offload.errors import OperatorError
from offload.scheduler.pool_target import PoolTarget
from offload.worker.pool.pressure import SHARE


class Resizes(NamedTuple):
    """How the pool of a virtual engine is resized.

    Attributes:
        most_slots: that it may have.
        unit_slots: of which memory is given back together; 0: what makes whole pages.
        rate: how often, per step, somebody asks for another size.
    """

    most_slots: int
    unit_slots: int = 1
    rate: float = 0.0


def shrink(engine: Any) -> None:
    """Memory is short, as far as the engine knows."""
    if engine.scheduler.connector._target.yield_memory(SHARE):
        engine.counts["yields"] += 1


def resize(engine: Any, share: float) -> None:
    """Ask for that share of the most that an engine's pool may have. It may be refused."""
    target: PoolTarget = engine.scheduler.connector._target
    most_gib = target.told["most_gib"]
    if isinstance(most_gib, float):
        with suppress(OperatorError):
            target.ask(most_gib * share)
            engine.counts["resizes"] += 1


def note_size(engine: Any) -> None:
    """Count how far the pool has come."""
    allocator, counts = engine.side.allocator, engine.counts
    counts["slots withdrawn"] = max(counts["slots withdrawn"], allocator.resizing.num_withdrawn)
    counts["steps of a larger pool"] += allocator.capacity > engine.settings.cpu_slots
