"""Back-pressure of a busy link: restores wait without GPU blocks, so that the GPU's own cache keeps more."""

from offload.scheduler.choices import Choices
from offload.scheduler.common import Common

_MOST_FILLING = 1 / 3
"""Of the GPU's blocks: until restores under way fill so many, others begin whatever is on the link."""
_STEPS = 5
"""Full steps: for so long the link has something to do in any case, beside the prefills that run."""
_MOST_BLOCKS = 4096
"""That vLLM looks up in a step for requests that wait here. It takes about 1.6 µs for each."""
_EACH = 40
"""What else is done for each of these requests takes as long as so many blocks. So does the look at as many
prefills that run."""
_FADES = 15 / 16
"""What is left in each step of what was seen of all that wait, while only the first of them are seen."""


class BackPressure:
    """Whether a restore waits for those under way, before its request is given GPU blocks.

    From then on these blocks are of no use until its load has its turn on the link, and the GPU's prefix
    cache lacks them. So none begins while those under way fill a third of the GPU's blocks, and keep the link
    busy for longer than five full steps and what the prefills that run take. Running prefills may take all
    tokens of a step; then vLLM asks nobody, and the link could run dry. One that begins in the same step is
    not known yet: the link may be free before it has ended.

    In a step there is one limit for all, and once one waits, all who ask later do. So nobody who waits here
    overtakes another. Who is to compute goes on, and so does what is still on its way from below the pool.

    Who waits is asked in each step, and vLLM looks up what the GPU has of it. Where that would take too long
    for all that wait, nobody waits here: they wait for GPU blocks, and vLLM asks none behind the first that
    finds too few.

    Not with checkpoints: there requests may have GPU blocks kept for them.
    """

    def __init__(self, common: Common, choices: Choices, step_tokens: int) -> None:
        """Nothing is under way. ``choices``: of restores. ``step_tokens``: a step computes at most."""
        self._common = common
        self._choices = choices
        self._step_tokens = step_tokens
        self._num_filling = 0  # GPU blocks
        self._limit: float | None = None  # seconds of the link, in this step; None: nobody has asked
        self._is_crowded = self._has_held = False  # in this step
        self._num_asked = self._num_local = 0  # in this step: requests, and blocks that the GPU has of them
        self._mean_local = 0.0  # of such a request, in the last step that had any

    def began(self, num_blocks: int) -> None:
        """A restore begins to fill so many GPU blocks."""
        self._num_filling += num_blocks

    def ended(self, num_blocks: int) -> None:
        """It has ended, or was given up."""
        self._num_filling -= num_blocks

    def must_wait(self, request_id: str, num_local: int, num_external: int) -> bool:
        """Whether a request that is to be restored asks again in the next step.

        O(1), and O(prefills that run) for the first in a step.

        Args:
            request_id: whose restore it is.
            num_local: leading tokens that the GPU has.
            num_external: that would be restored behind them.
        """
        if not (self._has_held or self._is_busy()):
            return False
        self._num_asked += 1
        self._num_local += num_local // self._common.block_size * self._common.engine.groups.columns
        if self._is_crowded:
            return False
        self._has_held = True
        self._choices.held(request_id, num_external)
        return True

    def end_step(self) -> None:
        """All who could be admitted in a step were asked."""
        if self._num_asked:
            mean = self._num_local / self._num_asked
            # where nobody waits here, only the first in vLLM's order were asked
            self._mean_local = max(mean, self._mean_local * _FADES) if self._is_crowded else mean
            self._num_asked = self._num_local = 0
        self._limit, self._is_crowded, self._has_held = None, False, False
        self._choices.end_step()

    def check_invariants(self, num_filling: int) -> None:
        """So many GPU blocks are being filled."""
        assert self._num_filling == num_filling, f"{num_filling} are filled, {self._num_filling} counted"

    def _is_busy(self) -> bool:
        engine, choices = self._common.engine, self._choices
        if engine.groups.has_bags or self._num_filling <= _MOST_FILLING * engine.num_blocks:
            return False
        if self._limit is None:
            step = self._common.costs.prefill.expected(0, self._step_tokens)
            self._limit = _STEPS * step + choices.computing_seconds()
            each = _EACH + self._mean_local + choices.num_computing
            self._is_crowded = choices.num_waiting * each > _MOST_BLOCKS
        return choices.queue.seconds > self._limit
