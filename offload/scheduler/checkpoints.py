"""Where a running request leaves checkpoints: depths of its chain at which others may go on.

    [ document ....... | ....... | ....... | question ]
                       chunk end           |          end of the prompt, without its last token
                                           branch: here it left what the pool, or the GPU, knew

Windows can be had at any depth that a step passes, states at the ends of steps only, or where the engine
hands them over. Ends of prompts and branches are where others go on. Ends of chunks are for those that
nobody has seen: a document that is asked for a second time, with another question.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from allocator import StorePlan
from offload.scheduler.backlog import Pending
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, States, Step
from offload.scheduler.groups import GpuBlocks


class Candidate(NamedTuple):
    """A depth at which a checkpoint can be stored in this step.

    Attributes:
        depth: in positions.
        is_inner: only as far as there is room for it.
        is_standing: the step begins or ends there.
    """

    depth: int
    is_inner: bool
    is_standing: bool


def candidates(
    tokens: range,
    num_prompt: int,
    branch: int,
    position_tokens: int,
    *,
    handed_over: Collection[int] | None = None,
    most: int | None = None,
    cap: int | None = None,
    num_volatile: int = 0,
    is_chunk_end: bool,
) -> Iterator[Candidate]:
    """Depths at which a step that computes these ``tokens`` of a request passes a checkpoint, in order.

    Args:
        tokens: those of the step; what it starts from counts as passed, too.
        num_prompt: tokens of the prompt, of which one at least is always computed.
        branch: tokens after which the request leaves what others know; 0: none.
        position_tokens: tokens of a position.
        handed_over: numbers of tokens after which the engine hands over states; None: there are no states,
            so that any depth will do.
        most: depths that may be stored; None: all.
        cap: the deepest that the client wants stored; None: all.
        num_volatile: positions at the end of a hit that are computed again for layers that draft.
        is_chunk_end: whether the end of the step is worth an inner one.
    """
    ends = {(num_prompt - 1) // position_tokens}
    if num_volatile:  # the engine goes on before these, and whoever sends more may reach a position further
        ends |= {num // position_tokens - num_volatile for num in (num_prompt - 1, num_prompt)}
    wanted = {depth if cap is None else min(depth, cap) for depth in (branch // position_tokens, *ends)}
    depths = set(wanted)
    if is_chunk_end:
        end = tokens.stop // position_tokens
        depths.add(end if most is None else min(end, most))
    if handed_over is not None:
        depths.update(num // position_tokens for num in (tokens.start, *handed_over))
    for depth in sorted(depths):
        num_tokens = depth * position_tokens
        is_standing = num_tokens in (tokens.start, tokens.stop)
        is_there = handed_over is None or is_standing or num_tokens in handed_over
        if is_there and depth > 0 and tokens.start <= num_tokens <= tokens.stop:
            yield Candidate(depth, depth not in wanted, is_standing)


class Checkpoints:
    """Which checkpoints requests pass in a step, and what to store for each."""

    def __init__(self, common: Common) -> None:
        self._allocator = common.allocator
        self._engine = common.engine
        self._groups = common.engine.groups
        self._note_of = common.note_of
        self._num_volatile = common.engine.drafts.num_volatile_blocks
        self._passing: list[tuple[Pending, Candidate]] = []
        self._states: Mapping[str, Mapping[int, States]] = {}

    def prepare(self, request: Request, max_tokens: int | None) -> None:
        """The scheduler may admit it next, and so many leading tokens are stored of it at most; None: all.

        States are there only where a step ends, so one is to end at the last of these.
        """
        if max_tokens is not None:
            size = self._groups.position_tokens
            num_tokens = min(max_tokens, request.num_prompt_tokens - 1) // size * size
            self._engine.retain(request, num_tokens)

    def begin_step(self, step: Step) -> None:
        """The scheduler is done with a step, for which it hands over states."""
        if self._groups.has_states:
            self._states = self._engine.states(step)

    def look(self, pending: Pending, tokens: range, num_full: int, *, is_chunk_end: bool) -> None:
        """The step computes these tokens of a request, of which ``num_full`` positions may be stored then.

        ``is_chunk_end``: they are many, or it is the turn of its answer.
        """
        states = self._states.get(pending.request_id, {}) if self._groups.has_states else None
        passed = candidates(
            tokens,
            pending.request.num_prompt_tokens,
            self._engine.branch(pending.request),
            self._groups.position_tokens,
            handed_over=states,
            most=num_full,
            cap=pending.max_blocks,
            num_volatile=self._num_volatile,
            is_chunk_end=is_chunk_end,
        )
        self._passing += [(pending, each) for each in passed if each.depth <= num_full]

    def take(self) -> list[tuple[Pending, Candidate]]:
        """The checkpoints that requests pass in this step, in no other."""
        passing, self._passing = self._passing, []
        return passing

    def plan(
        self, pending: Pending, candidate: Candidate, num_holdable: int, *, must: bool = False
    ) -> tuple[StorePlan, GpuBlocks] | None:
        """Plan a checkpoint, and all before it that has no copy yet. Only a part of that if it is too much.

        Args:
            pending: the request.
            candidate: a checkpoint that it passes now, or that its tables still have.
            num_holdable: GPU blocks that the store may hold.
            must: whatever is worth more leaves for it, and it may be stored again.

        Returns:
            The plan, and GPU blocks for its bag. None: it is not worth it, or not possible.
        """
        groups, chain, depth = self._groups, pending.chain, candidate.depth
        known = self._allocator.known_depth(chain, depth)
        if known < min(depth, pending.last_checkpoint) and not must:  # it was stored before, and was evicted
            return None
        num_bag = groups.num_in_bag(depth)
        num_blocks = (depth - known) * groups.columns + num_bag
        if candidate.is_inner and not self._is_worth_a_bag(pending, depth, num_blocks, num_holdable):
            return None
        if num_blocks > num_holdable:
            num_first = min(num_holdable // groups.columns, depth - known) if groups.columns else 0
            note = self._note_of(pending.request)
            plan = self._allocator.plan_store(
                chain, known + num_first, None, pending.keep, must=must, note=note
            )
            return None if plan is None else (plan, [])
        bag = self._bag(pending, candidate)
        if len(bag) < num_bag or not self._engine.ids(bag).all():
            return None
        note = self._note_of(pending.request)
        plan = self._allocator.plan_store(chain, depth, None, pending.keep, num_bag, must, note)
        if plan is None:
            return None
        pending.last_checkpoint = max(pending.last_checkpoint, depth)
        if not num_blocks:  # a chunk ends there, so nothing is needed to go on
            self._allocator.commit(plan)
            return None
        return plan, bag

    def check_invariants(self) -> None:
        """Between steps nobody passes a checkpoint."""
        assert not self._passing, f"{self._passing} were passed in a step before"

    def _bag(self, pending: Pending, candidate: Candidate) -> GpuBlocks:
        num_tokens = candidate.depth * self._groups.position_tokens
        states = self._states.get(pending.request_id, {}).get(num_tokens, {})
        tables = self._engine.tables(pending.request_id)
        return self._groups.bag(tables, candidate.depth, states, is_standing=candidate.is_standing)

    def _is_worth_a_bag(self, pending: Pending, depth: int, num_blocks: int, num_holdable: int) -> bool:
        """Whether to have an inner checkpoint there: there are free slots for it, or it is far from others.

        Nor may copies be so far behind that a store of more use might have to wait for this one.
        """
        if num_blocks > num_holdable // 2:
            return False
        if num_blocks <= self._allocator.num_free:
            return True
        last = max(pending.last_checkpoint, self._allocator.usable_depth(pending.chain, depth))
        return depth - last >= self._groups.spacing
