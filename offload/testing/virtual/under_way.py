"""A step of a virtual engine on its way: what was scheduled, and what came of it."""

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


@dataclass(slots=True)
class StepUnderWay:
    """A step on its way: what was scheduled, under which weights and pool, and what came of it.

    ``taken``: GPU blocks that were taken for something new.
    """

    output: SchedulerOutput
    generation: int
    pool_epoch: int
    adapters: dict[int, int]
    taken: list[int]
    result: ModelRunnerOutput | None = None
