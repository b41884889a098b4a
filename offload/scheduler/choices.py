"""Choices: what is made of each restore that the pool could serve, and what was made of them."""

from math import inf

from offload.messages import LOAD, STORE
from offload.restore_config import RestoreWhen
from offload.scheduler.choice import Choice, Prospect, Verdict, choose
from offload.scheduler.common import Common
from offload.scheduler.costs import LinkCost
from offload.scheduler.engine import Request
from offload.scheduler.queues import GpuQueue, LinkQueue, Longest

TRY_SECONDS = 15.0
"""If the link was not measured for that long, a little is loaded though all of it is computed."""
_LATEST_TRY_SECONDS = 45.0
"""Then also of a request that others have kept waiting."""
_NEXT_TRY_SECONDS = 1.0
"""If the latest try was far faster than was expected."""
_TRIED_SECONDS = 0.05
"""What that may take, by what is known: a three hundredth of the time."""
_SIZES = (1, 4)
"""So many times that in turns: jobs of one size do not tell what a job costs from what a byte costs."""
_PATIENCE = 0.4
"""As a part of the longest that a request was to take of late: so much longer may one take for others."""


class Choices:
    """Decides about restores of one engine, and remembers what it decides with.

    Where the configuration decides, nothing is remembered but the verdict, until it is counted.
    """

    def __init__(self, common: Common, when: RestoreWhen) -> None:
        """``when``: the configuration's."""
        self._common = common
        self._when = when
        self._link = common.costs.link(LOAD)
        self._stores = common.costs.link(STORE)
        self.queue = LinkQueue(self._link if when is RestoreWhen.AUTO else None, common.clock)
        self._gpu = GpuQueue(common.costs.prefill, common.clock)
        self._longest = Longest(common.clock)
        self._held_bytes = 0  # of restores that wait for the link, in this step
        self._made: dict[str, Choice] = {}  # of requests that wait, the latest
        self._tried_at = -inf
        self._num_tries = 0

    @property
    def is_off(self) -> bool:
        """Whether nothing is restored."""
        return self._when is RestoreWhen.NEVER

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn; 0 if the configuration decides."""
        return self._gpu.num_waiting

    @property
    def num_computing(self) -> int:
        """Requests whose prefill runs, or ran when that was last looked at."""
        return self._gpu.num_computing

    def computing_seconds(self) -> float:
        """Of prefill of those that are computed; 0 if the configuration decides. O(those)."""
        return self._gpu.computing()

    def arrived(self, request: Request) -> None:
        """It waits for its turn."""
        if self._when is RestoreWhen.AUTO:
            self._gpu.arrived(request)

    def may_restore(self, first: int, stop: int) -> bool:
        """Whether a restore of tokens ``first`` to ``stop`` may be made once somebody asks for it.

        As chosen where its request may wait for ever, and others keep the GPU busy.
        """
        if self._when is not RestoreWhen.AUTO:
            return not self.is_off
        prospect = Prospect(
            first, stop, stop, self._token_bytes, self._fixed_bytes, backlog=inf, patience=inf
        )
        return choose(self._common.costs.prefill, self._known_link, prospect).verdict is not Verdict.COMPUTED

    def make(
        self,
        request: Request,
        first: int,
        stop: int,
        num_restoring: int,
        *,
        is_wanted: bool,
        is_coming: bool,
    ) -> int:
        """Up to which token a restore is made for that request; ``first``: none is.

        Args:
            request: who asks.
            first: leading tokens that the GPU has.
            stop: that there could be.
            num_restoring: restores of others that are under way.
            is_wanted: its client wants all of it.
            is_coming: some of it is on its way from below the pool.
        """
        if self._when is RestoreWhen.ALWAYS:
            choice = Choice(stop, Verdict.ALWAYS)
        elif is_wanted:
            choice = Choice(stop, Verdict.ASKED)
        elif is_coming:
            choice = Choice(stop, Verdict.FETCHED)
        else:
            choice = self._choose(request, first, stop, num_restoring)
        self._made[request.request_id] = choice
        return choice.stop

    def held(self, request_id: str, num_external: int) -> None:
        """Its restore of so many tokens waits for the link.

        For who asks later in this step it is under way, and no longer waits for the GPU.
        """
        self._held_bytes += int(num_external * self._token_bytes)
        self._gpu.held(request_id)

    def end_step(self) -> None:
        """All who wait are asked again."""
        self._held_bytes = 0
        self._gpu.end_step()

    def dismissed(self, request_id: str) -> None:
        """What was chosen for that request comes to nothing: no checkpoint is so near."""
        self._made[request_id] = self._made[request_id]._replace(verdict=Verdict.COMPUTED)

    def admitted(self, request: Request, num_local: int, num_external: int) -> None:
        """It has blocks: so many tokens behind those that the GPU has are restored, or it goes on."""
        choice = self._made.pop(request.request_id, None)
        if choice is not None and (choice.verdict is Verdict.COMPUTED) != bool(num_external):
            self._common.metrics.count("restore_choices", 1, choice.verdict)
            if choice.verdict is Verdict.TRIED:
                self._tried_at = self._common.clock()
                self._num_tries += 1
        if self._when is RestoreWhen.AUTO:
            if choice is not None and choice.compute_seconds:
                # now, and not with each ask: a request would make itself more patient by waiting
                self._longest.note(self._gpu.waited(request.request_id) + choice.compute_seconds)
            self._gpu.admitted(request, num_local + num_external)
            if not num_external:
                self._gpu.goes_on(request)

    def finish(self, request_id: str) -> None:
        """It is over."""
        self._made.pop(request_id, None)
        self._gpu.finish(request_id)

    def check_invariants(self) -> None:
        """What waits was summed up, and nobody took less than no time."""
        self._gpu.check_invariants()
        assert self._longest.seconds >= 0, f"the longest request took {self._longest.seconds} s"
        assert self._when is RestoreWhen.AUTO or not self._gpu.left_over(), (
            f"{self._gpu.left_over()} are known"
        )

    def left_over(self) -> list[str]:
        """Who has not ended. For tests."""
        return [*self._gpu.left_over(), *self._made]

    # Private

    def _choose(self, request: Request, first: int, stop: int, num_restoring: int) -> Choice:
        common = self._common
        waited = self._gpu.waited(request.request_id)
        size = common.block_size
        held = self._known_link.seconds(self._held_bytes) if self._held_bytes else 0.0
        prospect = Prospect(
            first,
            stop,
            request.num_tokens,
            self._token_bytes,
            self._fixed_bytes,
            self.queue.seconds + held,
            self._gpu.backlog(request.request_id),
            _PATIENCE * self._longest.seconds - waited,
            num_restoring + self._gpu.num_held,
        )
        choice = choose(common.costs.prefill, self._known_link, prospect)
        if choice.verdict is Verdict.COMPUTED:
            choice = self._tried(choice, prospect)
        return choice._replace(stop=choice.stop - choice.stop % size if choice.stop != first else first)

    def _tried(self, choice: Choice, prospect: Prospect) -> Choice:
        """Of what is to be computed, load a little if that is due; with checkpoints all, and less often."""
        common, link = self._common, self._known_link
        seconds = _TRIED_SECONDS * _SIZES[self._num_tries % len(_SIZES)]
        has_time = prospect.patience > seconds and not common.engine.groups.has_bags
        due = TRY_SECONDS if has_time else _LATEST_TRY_SECONDS
        due = _NEXT_TRY_SECONDS if self._link.seems_faster else due
        if common.clock() < max(self._tried_at, self._link.measured_at) + due:
            return choice
        tried, each = prospect.stop, prospect.token_bytes * link.per_byte
        if each and not common.engine.groups.has_bags:
            tried = min(tried, prospect.first + max(int(seconds / each), common.block_size))
        return choice._replace(stop=tried, verdict=Verdict.TRIED)

    @property
    def _token_bytes(self) -> float:
        """That a restored token moves."""
        return self._common.engine.groups.columns * self._common.block_bytes / self._common.block_size

    @property
    def _fixed_bytes(self) -> int:
        """That a restore moves beside."""
        return self._common.engine.groups.bag_slots * self._common.block_bytes

    @property
    def _known_link(self) -> LinkCost:
        """What loads cost; as long as none was made, as much as stores."""
        return self._link if self._link.is_known else self._stores
