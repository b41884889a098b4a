"""A step in which there is nothing to do costs next to nothing."""

import math

from offload.messages import StepPlan, WorkerReport
from offload.scheduler.engine import Request, Stand, Step
from offload.scheduler.offer import Offer
from offload.scheduler.side import SchedulerSide
from offload.transfer_params import KVTransferParams

_MOST_STEPS = 16
"""Steps in a row that may be quiet."""
_MOST_SECONDS = 0.25
"""After that a step is planned."""
_TELLS_SECONDS = 1.0
"""From one time to the next that metrics are told, while requests run."""


class QuietSide(SchedulerSide):
    """Plans most steps by a look at what might have changed.

    A step is *quiet* if the one before it has left nothing to do, and nothing has happened since:

    - each request computes one token, they are as many as before, and no prompt goes on;
    - the GPU has given nobody a block, and nobody is to be looked at in this step;
    - nobody has come, has asked, was given anything, or is over; nothing moves, or waits to.

    What time alone brings about, such as another size of the pool that an operator has asked for, or what
    pools of other sizes would have found, waits for a quarter of a second at most. No step is quiet while the
    pool is resized, nor where something is below it, or others read it. None is of models with windows or
    states, whose checkpoints pass in steps.
    """

    _has_happened = True  # anything, since the last step
    _stood: Stand | None = None  # as the last step left it, if the next one may be quiet
    _num_left = 0  # quiet steps that may follow
    _until = 0.0  # by the clock
    _told_at = -math.inf  # the same

    def arrived(self, request: Request) -> None:
        self._wake()
        super().arrived(request)

    def offer(self, request: Request, num_local: int) -> Offer:
        self._wake()
        return super().offer(request, num_local)

    def allocated(self, request: Request, num_external: int) -> None:
        self._wake()
        super().allocated(request, num_external)

    def build_plan(self, step: Step) -> StepPlan:
        if self._is_quiet(step):
            self._num_left -= 1
            return StepPlan(self._fingerprint)
        had_news, self._has_news = self._has_news, False
        plan = super().build_plan(step)
        is_settled = self._is_settled and not (self._has_happened and self._has_waiting)
        self._stood = self._stand(step) if is_settled else None
        self._num_left, self._until = _MOST_STEPS, self._clock() + _MOST_SECONDS
        self._has_news, self._has_happened = self._has_news or had_news, False
        return plan

    def receive(self, report: WorkerReport | None, invalid_block_ids: set[int]) -> None:
        if report is None and not invalid_block_ids:
            self.costs.prefill.end(0)
            return
        self._wake()
        super().receive(report, invalid_block_ids)

    def finish(self, request: Request) -> KVTransferParams | None:
        self._wake()
        return super().finish(request)

    def reset(self) -> None:
        self._wake()
        super().reset()

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last time, and the gauges; once a second while requests run, then at once."""
        if self._turns.go_on and self._clock() - self._told_at < _TELLS_SECONDS:
            return {}
        if told := super().take_metrics():
            self._told_at = self._clock()
        return told

    # Private

    def _wake(self) -> None:
        self._has_happened, self._stood = True, None

    def _is_quiet(self, step: Step) -> bool:
        if self._stood is None or not self._num_left or step.preempted_req_ids:
            return False
        if step.total_num_scheduled_tokens != len(step.num_scheduled_tokens):
            return False
        if self._stood != self._stand(step) or self._clock() >= self._until:
            return False
        return self.stores.backlog.skip()

    def _stand(self, step: Step) -> Stand:
        return Stand.of(self._engine, len(step.num_scheduled_tokens))

    @property
    def _has_waiting(self) -> bool:
        """Whether somebody who has no blocks has asked, or will: the next step ends what that has begun."""
        return bool(self._local_tokens) or self.aside.has_waiting

    @property
    def _is_settled(self) -> bool:
        """Whether the step that was just planned would have nothing to do if it came again."""
        if self.below or self._lasting is not None or self._engine.groups.has_bags:
            return False
        if self._has_news or self._resizing.is_busy or self.has_pending_work:
            return False  # it had something to do, or something moves
        if self.stores.holds.is_prefilling:
            return False
        later = self.stores.later
        if later is not None and not later.is_settled:
            return False
        return not self.stores.backlog.has_runs or not (later is None or later.is_pressed(len(self._turns)))
