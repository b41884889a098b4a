"""Back-pressure of a busy link: a restore waits for it without GPU blocks, so the GPU's cache keeps more."""

from offload.scheduler.choices import Choices
from offload.scheduler.common import Common

_MOST_FILLING = 1 / 3
"""Of the GPU's blocks: until restores under way fill so many, others begin whatever is on the link."""
_STEPS = 5
"""Full steps: for so long the link has something to do in any case, beside the prefills that run."""
_MOST_BLOCKS = 4096
"""That vLLM looks up in a step for requests that wait here. It takes about 1.6 µs for each."""
_EACH = 40
"""What else is done for each of these requests takes as long as so many blocks."""


class BackPressure:
    """Whether a restore waits for those under way, before its request is given GPU blocks.

    From then on these blocks are of no use until its load has its turn on the link, and the GPU's prefix
    cache lacks them. So none begins while those under way fill a third of the GPU's blocks, and keep the link
    busy for longer than five full steps and what the prefills that run take. For these may have all tokens of
    a step, and then vLLM asks nobody. A prefill that begins in the same step is not known yet: the link may
    be free before it has ended.

    In a step there is one limit for all, so nobody who waits here overtakes another. Who is to compute goes
    on, and so does what comes from below the pool.

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
        self._is_crowded = False  # in this step
        self._num_asked = self._num_local = 0  # in this step: requests, and blocks that the GPU has of them
        self._mean_local = 0.0  # of such a request, in the last step that had any

    def began(self, num_blocks: int) -> None:
        """A restore begins to fill so many GPU blocks."""
        self._num_filling += num_blocks

    def ended(self, num_blocks: int) -> None:
        """It has ended, or was given up."""
        self._num_filling -= num_blocks

    def must_wait(self, request_id: str, num_local: int) -> bool:
        """Whether a request that is to be restored asks again in the next step.

        O(1), and O(prefills that run) for the first in a step.

        ``num_local``: leading tokens that the GPU has.
        """
        if not self._is_busy():
            return False
        self._num_asked += 1
        self._num_local += num_local // self._common.block_size
        if self._is_crowded:
            return False
        self._choices.held(request_id)
        return True

    def end_step(self) -> None:
        """All who could be admitted in a step were asked."""
        if self._num_asked:
            self._mean_local = self._num_local / self._num_asked
            self._num_asked = self._num_local = 0
        self._limit = None
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
            self._is_crowded = choices.num_waiting * (_EACH + self._mean_local) > _MOST_BLOCKS
        return choices.queue.seconds > self._limit
