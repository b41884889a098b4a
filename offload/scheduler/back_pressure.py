"""Back-pressure of a busy link: a restore waits for it without GPU blocks, so the GPU's cache keeps more."""

from offload.scheduler.choices import Choices
from offload.scheduler.common import Common

_MOST_FILLING = 1 / 3
"""Of the GPU's blocks: restores under way fill so many whatever is on the link."""
_STEPS = 4
"""Full steps, beside what is computed already: for so long the link has something to do in any case."""
_MOST_BLOCKS = 4096
"""That vLLM looks up in one step for requests that wait here. It takes about 1.6 µs for each."""
_EACH = 32
"""What vLLM does beside for each of these requests takes as long as so many blocks."""


class BackPressure:
    """Whether a restore waits for those under way, before its request is given GPU blocks.

    From then on these blocks are of no use until its load has its turn on the link, and the GPU's prefix
    cache lacks them. So none begins while those under way fill a third of the GPU's blocks, and keep the link
    busy for longer than those that are computed keep the GPU busy, and four full steps. For prompts may take
    all tokens of a step, and then vLLM asks nobody. One that begins in this very step is not known here: the
    link may be free before it has ended.

    In a step there is one limit for all who ask, so their order is vLLM's. Who is to compute goes on.

    Who waits is asked in each step, and vLLM looks up what the GPU has of it. If that takes too long in a
    step, nobody waits here until the link is less busy. Then requests wait for GPU blocks, and vLLM asks none
    behind the first that finds too few.

    Not with checkpoints: there requests may have GPU blocks kept for them.
    """

    def __init__(self, common: Common, choices: Choices, step_tokens: int) -> None:
        """Nothing is under way. ``choices``: of restores. ``step_tokens``: a step computes at most."""
        self._common = common
        self._choices = choices
        self._step_tokens = step_tokens
        self._num_filling = 0  # GPU blocks
        self._limit: float | None = None  # seconds of the link, in this step; None: nobody has asked
        self._num_looked_up = 0  # blocks, in this step
        self._is_crowded = False

    def began(self, num_blocks: int) -> None:
        """A restore begins to fill so many GPU blocks."""
        self._num_filling += num_blocks

    def ended(self, num_blocks: int) -> None:
        """It has ended, or was given up."""
        self._num_filling -= num_blocks

    def must_wait(self, num_local: int) -> bool:
        """Whether a request that could be restored asks again in the next step. O(1), the first of a step
        O(those that are computed).

        ``num_local``: leading tokens that the GPU has of it.
        """
        if not self._is_busy():
            self._is_crowded = False
        elif not self._is_crowded:
            self._num_looked_up += num_local // self._common.block_size + _EACH
            return True
        return False

    def end_step(self) -> None:
        """All who could be admitted in a step were asked."""
        self._is_crowded |= self._num_looked_up > _MOST_BLOCKS
        self._limit, self._num_looked_up = None, 0

    def check_invariants(self, num_filling: int) -> None:
        """So many GPU blocks are being filled."""
        assert self._num_filling == num_filling, f"{num_filling} are filled, {self._num_filling} counted"

    def _is_busy(self) -> bool:
        engine = self._common.engine
        if engine.groups.has_bags or self._num_filling <= _MOST_FILLING * engine.num_blocks:
            return False
        if self._limit is None:
            step = self._common.costs.prefill.seconds(0, self._step_tokens)
            self._limit = _STEPS * step + self._choices.computing_seconds
        return self._choices.queue.seconds > self._limit
