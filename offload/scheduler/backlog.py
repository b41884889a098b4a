"""The backlog: what each request has still to store."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from allocator import CpuOffloadingBlockAllocator, UncachedRun
from evictor import KeepHints
from offload.scheduler import amounts
from offload.scheduler.answers import Kind
from offload.scheduler.lookout import Lookout

_ANSWERS_AT_ONCE = 4
"""Answers of which a run is stored in one step. The first costs as much as the others together."""


LONGEST_WAIT_SECONDS = 30.0
"""For the next store to begin or end, while requests that are over wait for theirs."""

_LONGEST_STEP_SECONDS = 10.0
"""More than that from step to step does not count: nobody has called the engine."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request whose blocks may be stored: admitted, and perhaps ended.

    Attributes:
        request_id: names it.
        request: the engine's own view of it, opaque here.
        chain: its prefix hashes; the list grows with the request.
        num_prompt_blocks: full blocks of its prompt, as far as they may be stored.
        keep: how to keep its blocks.
        max_blocks: leading blocks that may be stored; None: all.
        kind: of its answer, see ``answers``.
        stores_answer: whether its answer is stored in runs while it computes.
        has_run: it has computed since its last admission, so no KV is on its way into its blocks.
        num_full: blocks that were full when it was last looked at, and are noted.
        num_planned: how far stores were planned since its last admission, or the last fault. What was stored
            and then evicted is not stored a second time while the request runs. Otherwise requests whose
            chains do not fit the pool together would evict each other's blocks with every block they fill.
        last_checkpoint: the deepest that was planned since then.
        blocks: once it has ended, the GPU blocks that are held for it and have no copy yet.
        start: chain position of the first of these.
        columns: how many of them make up a position.
        num_in_flight: GPU blocks that its stores in flight hold.
        is_over: it holds none itself.
        delivers: its prompt is to be handed off.
        is_late: it is stored because the GPU is about to evict it.
        lost: why from which position on its blocks are not stored, for whoever asks.
    """

    request_id: str
    request: Any
    chain: Sequence[bytes]
    num_prompt_blocks: int
    keep: KeepHints | None = None
    max_blocks: int | None = None
    kind: Kind = ""
    stores_answer: bool = True
    has_run: bool = False
    num_full: int = 0
    num_planned: int = 0
    last_checkpoint: int = 0
    blocks: list[Any] = field(default_factory=list)
    start: int = 0
    columns: int = 1
    num_in_flight: int = 0
    is_over: bool = False
    delivers: bool = False
    is_late: bool = False
    lost: dict[str, int] = field(default_factory=dict)

    def lose(self, why: str, position: int) -> None:
        """From that position on its blocks are not stored."""
        self.lost[why] = min(position, self.lost.get(why, position))

    @property
    def num_storable(self) -> int:
        """Leading blocks that have a prefix hash and may be stored."""
        num_hashes = len(self.chain)
        return num_hashes if self.max_blocks is None else min(num_hashes, self.max_blocks)

    @property
    def stop(self) -> int:
        """The chain position after the last of ``blocks``."""
        return self.start + len(self.blocks) // self.columns


class Backlog:
    """What requests have still to store, and when to look at which of them.

    The states of a request, from its admission to its end::

        admit --> expected in step s --due()--> looked at --> expected again
                    ^                             |    \\--> in line, until its turn
                    |                             \\------> at rest: nothing more will be stored
                    +-- admit_again, plan_anew        ^
                                                      +-- set_aside: preempted
        finish --> over, or ended: in the queue, with its blocks, until they are stored or given up

    A prompt's blocks are noted in the step that fills them, an answer's in runs: a few answers have their
    turn every ``answer_interval`` steps. Whichever state it is in, its *noted* blocks are the allocator's to
    list: those without a copy are stored as the engine's blocks allow.

    What a request has not stored when it ends waits in the queue. It is stored from its beginning on, first
    come first served. It is given up from the end of the queue: the deepest positions of the newest.

    No call costs more than O(requests it is about), but ``runs`` and ``plan_anew``: O(all admitted).
    """

    answer_interval = 16

    def __init__(
        self,
        allocator: CpuOffloadingBlockAllocator,
        clock: Callable[[], float],
        *,
        block_size: int,
        tokens_per_step: int = 1,
    ) -> None:
        """Begin with none.

        Args:
            allocator: lists which of the noted blocks have no copy.
            clock: in seconds.
            block_size: tokens per block.
            tokens_per_step: by which an answer grows at most.
        """
        self.answer_run = amounts.answer_run_blocks(block_size)
        self._allocator = allocator
        self._block_size = block_size
        self._tokens_per_step = tokens_per_step
        self._pending: dict[str, Pending] = {}
        self._lookout: Lookout[str] = Lookout()
        self._line: dict[str, None] = {}  # answers with a run of full blocks
        self._steps_to_turn = 0
        self._queue: deque[Pending] = deque()
        self._clock = clock
        self._moved_at = self._stepped_at = clock()
        self.num_queued = 0
        """GPU blocks held for requests that have ended."""

    def __len__(self) -> int:
        """Requests whose blocks may be stored."""
        return len(self._pending)

    def __iter__(self) -> Iterator[str]:
        """Their ids."""
        return iter(self._pending)

    def get(self, request_id: Hashable) -> Pending | None:
        """What is known of a request; None if its blocks may not be stored, or it is over."""
        return self._pending.get(str(request_id))

    # Coming and going

    def admit(self, pending: Pending) -> None:
        """A request has blocks for the first time."""
        self._pending[pending.request_id] = pending
        self._lookout.expect(pending.request_id, 1)

    def admit_again(self, request_id: str) -> None:
        """It was preempted, and has blocks again."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.has_run = False
            self._start_over(pending)

    def set_aside(self, request_id: str, *, is_back: bool) -> None:
        """It was preempted, so the blocks that were noted are gone; ``is_back``: it has others already."""
        self._allocator.forget_owner(request_id)
        if not is_back:
            self._forget(request_id)

    def finish(self, request_id: str) -> Pending | None:
        """It is over. Returns what is known of it."""
        self._forget(request_id)
        self._allocator.forget_owner(request_id)
        return self._pending.pop(request_id, None)

    def drop(self, is_meant: Callable[[Any], bool]) -> list[Any]:
        """Nothing that was computed for these requests is ever stored. O(all requests).

        Returns the GPU blocks that were held for those in the queue.
        """
        for pending in [pending for pending in self._pending.values() if is_meant(pending.request)]:
            self.finish(pending.request_id)
        blocks: list[Any] = []
        for pending in [pending for pending in self._queue if is_meant(pending.request)]:
            self._queue.remove(pending)
            blocks += reversed(pending.blocks)
            pending.blocks = []
        self.num_queued -= len(blocks)
        return blocks

    def clear(self) -> None:
        """Nothing of the admitted requests is ever stored. The allocator has forgotten them."""
        for request_id in self._pending:
            self._forget(request_id)
        self._pending.clear()

    # The queue of those that have ended

    @property
    def first(self) -> Pending | None:
        """Whose turn it is in the queue."""
        return self._queue[0] if self._queue else None

    @property
    def is_overdue(self) -> bool:
        """Whether the queue has not moved for ``LONGEST_WAIT_SECONDS`` in which the engine has stepped."""
        return bool(self._queue) and self._clock() - self._moved_at > LONGEST_WAIT_SECONDS

    def end(self, pending: Pending, start: int, blocks: list[Any], columns: int = 1) -> None:
        """A request that has finished leaves these GPU blocks, at least one, held for the queue.

        Args:
            pending: the request.
            start: chain position of the first block.
            blocks: full blocks without a copy, ``columns`` for each position.
            columns: blocks of a position.
        """
        pending.start, pending.blocks, pending.columns = start, blocks, columns
        self.moved()
        self._queue.append(pending)
        self.num_queued += len(blocks)

    def take(self, num_positions: int, why: str | None = None) -> list[Any]:
        """Blocks of the leading positions of the first in the queue, which from now on does without them.

        ``why``: they are not stored; None: they are.
        """
        pending = self._queue[0]
        if why is not None:
            pending.lose(why, pending.start)
        num_blocks = num_positions * pending.columns
        taken = pending.blocks[:num_blocks]
        del pending.blocks[:num_blocks]
        pending.start += len(taken) // pending.columns
        self.num_queued -= len(taken)
        if not pending.blocks:
            self._queue.popleft()
        self.moved()
        return taken

    def give_up(self, num_blocks: int, why: str) -> list[Any]:
        """The last blocks of the queue, that many at least, or all. They fill positions.

        The engine should reuse the first of them first.
        """
        given_up: list[Any] = []
        while self._queue and len(given_up) < num_blocks:
            pending = self._queue[-1]
            at = max(0, len(pending.blocks) - (num_blocks - len(given_up)))
            at -= at % pending.columns
            given_up += reversed(pending.blocks[at:])
            del pending.blocks[at:]
            pending.lose(why, pending.stop)
            if not pending.blocks:
                self._queue.pop()
        self.num_queued -= len(given_up)
        return given_up

    def queued_blocks(self) -> Iterator[Any]:
        """The GPU blocks that are held for those in the queue, in the order of their turns."""
        return chain.from_iterable(pending.blocks for pending in self._queue)

    def moved(self) -> None:
        """A store has begun or ended: the queue's time starts anew."""
        self._moved_at = self._clock()

    # A step

    def skip(self) -> bool:
        """A step begins, if nobody is to be looked at in it. Else call ``due`` and ``turns``."""
        if self._line or not self._lookout.skip():
            return False
        self._steps_to_turn -= self._steps_to_turn > 0
        return True

    def due(self, busy: Iterable[str]) -> list[Pending]:
        """A step begins: whom to look at, each with ``look``.

        ``busy`` compute more in it than answers do. The others are those whose turn it is by the lookout. It
        counts on as many tokens per step as there can be, so it may be early, and never late.
        """
        now = self._clock()
        self._moved_at += max(0.0, now - self._stepped_at - _LONGEST_STEP_SECONDS)
        self._stepped_at = now
        request_ids = dict.fromkeys([*self._lookout.due(), *busy])
        return [self._pending[request_id] for request_id in request_ids if request_id in self._pending]

    def turns(self) -> list[Pending]:
        """Answers whose turn in the line it is in this step. Look at them, too."""
        self._steps_to_turn -= self._steps_to_turn > 0
        if self._steps_to_turn or not self._line:
            return []
        self._steps_to_turn = self.answer_interval
        request_ids = list(islice(self._line, _ANSWERS_AT_ONCE))
        for request_id in request_ids:
            del self._line[request_id]
        return [self._pending[request_id] for request_id in request_ids]

    def look_later(self, pending: Pending) -> None:
        """It does not compute in this step: it waits for its KV, or until it is scheduled again."""
        self._lookout.expect(pending.request_id, 1)

    def look(self, pending: Pending, num_tokens: int, num_full: int, *, has_turn: bool = False) -> None:
        """Once this step has run, ``num_tokens`` of it at most are computed, ``num_full`` blocks are full.

        Note these blocks, or have the request stand in line, if there are enough of them.
        """
        num_prompt_blocks, run = pending.num_prompt_blocks, self.answer_run
        is_last = num_full == pending.max_blocks
        if amounts.is_worth_storing(num_full, pending.num_full, num_prompt_blocks, run):
            if num_full > num_prompt_blocks and not has_turn:
                noted = max(min(num_full, pending.num_full), num_prompt_blocks)
                if num_full >= noted + run:
                    self._line[pending.request_id] = None
                num_full = noted
            if num_full != pending.num_full:
                pending.num_full = num_full
                pending.num_planned = min(pending.num_planned, num_full)
                self._allocator.note_full(pending.request_id, pending.chain, num_full)
        if is_last or pending.request_id in self._line:
            self._lookout.forget(pending.request_id)
        elif num_full < num_prompt_blocks or pending.stores_answer:
            tokens_left = amounts.tokens_to_next_look(
                num_tokens, pending.num_full, num_prompt_blocks, run, self._block_size
            )
            self._lookout.expect(pending.request_id, -(-tokens_left // self._tokens_per_step))

    @property
    def has_runs(self) -> bool:
        """Whether noted blocks may have no copy."""
        return self._allocator.num_owners > 0

    def runs(self) -> list[UncachedRun]:
        """Noted blocks without a copy, deepest shared prefix first."""
        return self._allocator.uncached()

    # What became of a run

    def planned(self, pending: Pending, stop: int) -> None:
        """Stores are under way up to that position."""
        pending.num_planned = stop
        if pending.lost.get("not_admitted", stop) < stop:
            del pending.lost["not_admitted"]

    def declined(self, pending: Pending, start: int) -> None:
        """Its blocks are worth less than all that is in the pool now: another try at the next look."""
        pending.lose("not_admitted", start)
        self._allocator.forget_owner(pending.request_id)
        pending.num_full = 0

    def was_evicted(self, pending: Pending) -> None:
        """What it would store now, it has stored before."""
        self._allocator.forget_owner(pending.request_id)

    def spoil(self) -> None:
        """Nothing that was noted is sure to hold KV: all of it is looked at anew."""
        for request_id in self._pending:
            self._allocator.forget_owner(request_id)
        self.plan_anew()

    def plan_anew(self) -> None:
        """Something has left the pool that was not evicted; whose chains went with it is not known here."""
        for pending in self._pending.values():
            self._start_over(pending)

    def check_invariants(self) -> None:
        """Each request is looked for in one place at most, and none that is over in any."""
        self._lookout.check_invariants()
        for request_id, pending in self._pending.items():
            assert pending.request_id == request_id, f"{pending} is filed under {request_id}"
            assert pending.num_planned <= pending.num_full or not pending.num_full, f"{pending}"
            both = request_id in self._line and request_id in self._lookout
            assert not both, f"{request_id} is in line and expected"
        held = sum(len(pending.blocks) for pending in self._queue)
        assert held == self.num_queued, f"{held} blocks are held, {self.num_queued} counted"
        assert all(pending.blocks for pending in self._queue), "a request in the queue has nothing to store"
        assert not any(pending.blocks for pending in self._pending.values()), (
            "blocks are held for one that runs"
        )
        gone = [*(self._line.keys() - self._pending.keys()), *(set(self._lookout) - self._pending.keys())]
        assert not gone, f"{gone} are over, and still looked for"

    # Private

    def _start_over(self, pending: Pending) -> None:
        pending.num_full = pending.num_planned = pending.last_checkpoint = 0
        self._line.pop(pending.request_id, None)
        self._lookout.expect(pending.request_id, 1)

    def _forget(self, request_id: str) -> None:
        self._lookout.forget(request_id)
        self._line.pop(request_id, None)
