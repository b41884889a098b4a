"""vLLM's real scheduler with our real connector, on a virtual GPU whose every byte is checked.

No model runs: "computing" a token writes a tag that is a function of all tokens so far. A request that
attends to a position must read the right tag there. Thousands of steps a second, reproducible by seed.
"""

from offload.testing.virtual.drawing import draw_settings
from offload.testing.virtual.engine import VirtualEngine
from offload.testing.virtual.groups import MODELS, Group
from offload.testing.virtual.run import KINDS, RunFailedError, RunReport, draw_kind, run_seed
from offload.testing.virtual.settings import VirtualSettings
from offload.testing.virtual.workload import Workload

__all__ = [
    "KINDS",
    "MODELS",
    "Group",
    "RunFailedError",
    "RunReport",
    "VirtualEngine",
    "VirtualSettings",
    "Workload",
    "draw_kind",
    "draw_settings",
    "run_seed",
]
