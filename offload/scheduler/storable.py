"""How many blocks of a request are full, and may be stored: while it runs, and once it is over."""

from offload.scheduler import amounts
from offload.scheduler.answers import AnswerReuse
from offload.scheduler.backlog import Backlog, Pending
from offload.scheduler.checkpoints import Checkpoints
from offload.scheduler.common import Common
from offload.scheduler.engine import State
from offload.scheduler.holds import Holds


class Storable:
    """Looks at requests, and files them in the backlog. It has no state of its own."""

    def __init__(
        self, common: Common, backlog: Backlog, holds: Holds, checkpoints: Checkpoints, answers: AnswerReuse
    ) -> None:
        self._backlog = backlog
        self._holds = holds
        self._checkpoints = checkpoints
        self.answers = answers
        self._engine = common.engine
        self._metrics = common.metrics
        self._drafts = common.engine.drafts
        self._block_size = common.block_size

    def look(self, pending: Pending, scheduled: dict[str, int], *, has_turn: bool) -> None:
        """A step computes so many tokens of requests; see ``Backlog.look``."""
        num_scheduled = scheduled.get(pending.request_id)
        if num_scheduled is None:  # it waits for its KV, or for its turn
            self._backlog.look_later(pending)
            return
        pending.has_run = True
        request = pending.request
        num_unsettled = self._drafts.num_unsettled_tokens
        num_tokens = request.num_computed_tokens + num_scheduled - num_unsettled
        num_known = request.num_tokens - num_unsettled
        if not pending.stores_answer:
            num_known = min(num_known, request.num_prompt_tokens)
        num_full = amounts.storable_blocks(num_tokens, num_known, pending.num_storable, self._block_size)
        self._backlog.look(pending, num_tokens, num_full, has_turn=has_turn)
        if self._engine.groups.has_bags:
            tokens = range(request.num_computed_tokens, request.num_computed_tokens + num_scheduled)
            is_chunk_end = has_turn or num_scheduled > 1 + self._drafts.num_tokens
            self._checkpoints.look(pending, tokens, num_full, is_chunk_end=is_chunk_end)

    def num_full_at_end(self, pending: Pending) -> int:
        """Full blocks of a request that is over, whatever ended it.

        One that failed, or that waited for its KV, counts tokens as computed that nobody has computed. An
        aborted one counts those of steps that are still under way.
        """
        request = pending.request
        num_unconfirmed = request.num_output_placeholders
        state = self._engine.state(request)
        if state is not State.COMPLETED:
            if state is not State.ABORTED or not pending.has_run:
                pending.lose("aborted", pending.num_planned)
                return 0
            num_unconfirmed = request.num_in_flight_tokens
        return amounts.storable_blocks_at_finish(
            request.num_computed_tokens,
            num_unconfirmed,
            request.num_prompt_tokens,
            request.num_tokens,
            pending.num_storable,
            self._block_size,
            self._drafts.num_unsettled_tokens,
        )

    def without_answer(self, pending: Pending, num_full: int) -> int:
        """How many of the full blocks of a request that is over to store: without its answer, or with it."""
        num_prompt, answers = pending.num_prompt_blocks, self.answers
        if num_full <= num_prompt:
            return num_full
        answers.ended(pending.chain, num_prompt, pending.kind)
        self._metrics.count("answers", answers.is_learning)
        if answers.are_stored(pending.kind):
            return num_full
        num_kept = max(num_prompt, pending.num_planned)
        pending.lose("unreturned" if answers.is_learning else "answers", num_kept)
        if answers.is_learning:
            self._holds.count_unstored(max(0, num_full - num_kept), "unreturned")
        return num_prompt
