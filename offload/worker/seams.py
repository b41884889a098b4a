"""What tests and benchmarks put in the place of a worker's clock, threads and copies."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import torch

from offload.worker.checker import seal_thread
from offload.worker.copiers import Copier
from offload.worker.layout import BlockLayout
from offload.worker.resizing import PageThread
from offload.worker.transfer import LANDED_AT_ONCE


class Seams(NamedTuple):
    """What tests and benchmarks put in the place of the real thing.

    Attributes:
        make_copier: for a device, a layout, so many GPU blocks and so many slots.
        make_executor: runs checksums.
        clock: in seconds.
        seals_of_blocks: whether checksums are taken from the GPU's blocks; None: where these are host memory.
        make_page_executor: runs what takes the pool's memory and gives it back.
        unit_slots: of which a pool's memory is given back together; 0: what makes whole pages.
        shares_cores: whether the thread that calls the worker computes, on cores that copies take, too; None:
            where the engine computes on CPUs.
        landed_at_once: loads that are told as done in a step, at most.
    """

    make_copier: Callable[[torch.device, BlockLayout, int, int], Copier]
    make_executor: Callable[[], Executor] = seal_thread
    make_page_executor: Callable[[], Executor] = PageThread
    clock: Callable[[], float] = time.monotonic
    seals_of_blocks: bool | None = None
    shares_cores: bool | None = None
    landed_at_once: int = LANDED_AT_ONCE
    unit_slots: int = 0
