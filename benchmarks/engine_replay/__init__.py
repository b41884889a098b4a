"""vLLM's real scheduler with one of several connectors, replaying requests on a virtual clock.

No bytes move and no model runs: a step, and a copy, take the time that a simple model of a GPU gives them.
What is real is everything that runs in the scheduler's process, and every worker side but the copies.
"""

from benchmarks.engine_replay.engine import CONNECTORS, ReplayEngine, ReplaySettings, Step, TimeModel

__all__ = ["CONNECTORS", "ReplayEngine", "ReplaySettings", "Step", "TimeModel"]
