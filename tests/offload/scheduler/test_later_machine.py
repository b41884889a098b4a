"""The scheduler's side in any history, as in `test_side_machine`, where blocks are stored late."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from offload.config import StoreWhen
from tests.offload.scheduler.serving import Serving, Sizes
from tests.offload.scheduler.test_side_machine import SIZES, SideMachine
from tests.strategies import thorough


class LateSideMachine(SideMachine):
    """Nothing is calm: what the GPU has need not be in the pool."""

    @initialize(sizes=SIZES, num_blocks=st.sampled_from([18, 40, 90]))
    def make(self, sizes: Sizes, num_blocks: int) -> None:
        self.is_calm = False
        self.sent: list[list[int]] = []
        self.serving = Serving(replace(sizes, num_blocks=num_blocks, store=StoreWhen.LAZY))


TestLateSideMachine = LateSideMachine.TestCase
TestLateSideMachine.settings = thorough(60, steps=40)
