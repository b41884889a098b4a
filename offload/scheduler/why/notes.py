"""Notes of what each request was given, and why it was not more: a few plain facts, of the latest."""

from collections.abc import Callable
from typing import Any

from allocator import CpuOffloadingBlockAllocator
from offload.messages import Order
from offload.observe.metrics import Metrics
from offload.scheduler.backlog import Pending
from offload.scheduler.costs import Costs
from offload.scheduler.engine import Engine, Request
from offload.scheduler.fetched import Fetched
from offload.scheduler.hints import RequestHints
from offload.scheduler.jobs import JobLedger
from offload.scheduler.offer import Offer, Why
from offload.scheduler.restore import Restore
from offload.scheduler.why.absence import Absence
from offload.scheduler.why.note import MOST_NOTES, POOL, Note
from offload.scheduler.why.prompts import Prompts
from offload.scheduler.why.reasons import Missing, Reason
from offload.transfer_params import KVTransferParams


class Notes:
    """Facts of requests as they come, are given blocks, and end. Whoever asks why gets these.

    Nothing is looked for when somebody asks: what explains a miss may be gone by then. What is missing of a
    prompt is explained when its request is given blocks. That takes O(log n) and no look at single blocks.
    Requests that are over are remembered until ``MOST_NOTES`` others are. The engine's thread writes; others
    may call ``of`` and ``now``.
    """

    def __init__(
        self,
        parts: tuple[CpuOffloadingBlockAllocator, JobLedger, Engine, Metrics],
        clock: Callable[[], float],
        block_size: int,
        costs: Costs,
        fetched: Fetched,
        *,
        has_below: bool = False,
        most: int = MOST_NOTES,
    ) -> None:
        """Nobody has come. Arguments as in ``Common``.

        ``fetched``: what came from below. ``has_below``: there are tiers or peers.
        """
        allocator, ledger, engine, metrics = parts
        self._ledger = ledger
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._block_size = block_size
        self._prefill = costs.prefill
        self._fetched = fetched
        self.prompts = Prompts()
        self._absence = Absence(allocator, engine, self.prompts, block_size, has_below=has_below)
        self._live: dict[str, Note] = {}
        self._over: list[Note | None] = [None] * most
        self._num_over = 0
        self._is_told = ""  # the last to end, if its client asks for a report

    # As a request goes its way

    def arrived(self, request: Request) -> None:
        """It waits for its turn."""
        self._note(request)

    def asked(self, request: Request, num_local: int, offer: Offer) -> None:
        """It was answered so; the GPU has ``num_local`` leading tokens. Not told where nothing is new."""
        note = self._note(request)
        if note.asked_local < 0:
            note.asked_local = num_local
        if num_local + self._block_size == request.num_prompt_tokens:
            position = num_local // self._block_size
            last = self._engine.chain(request)[position : position + 1]
            note.has_last = bool(last) and self._engine.has(last[0])
        if offer.tokens is None:
            is_aside = offer.why is Why.ASIDE
            if note.held_since is None or note.is_aside is not is_aside:
                self._end_hold(note)
                note.held_since, note.is_aside = self._clock(), is_aside
            return
        note.offer = offer
        self._end_hold(note)

    def admitted(
        self, request: Request, num_local: int, num_external: int, *, has_waited: bool, hints: RequestHints
    ) -> None:
        """It was given blocks, ``num_external`` tokens to be restored behind ``num_local`` that the GPU has.

        ``has_waited``: it goes on behind its restore, whatever came of that.
        """
        note = self._note(request)
        self._end_hold(note)
        if has_waited:
            self._end_restore(note, self._clock())
            if not num_external:
                return
        note.num_admissions += 1
        if note.admitted is not None:
            note.num_again += num_local + num_external
            return
        note.admitted, note.state = self._clock(), "runs"
        note.num_prompt = request.num_prompt_tokens
        note.num_local, note.num_planned = num_local, num_external
        note.wants_report = hints.report
        note.origin = self._engine.origin(request)
        missing = self._absence.explain(note, request, hints)
        note.missing = () if missing is None else (missing,)
        self.prompts.add(note, self._engine.chain(request))
        if not num_external and note.held:
            self._settle(note)

    def stores(
        self, request: Request, pending: Pending | None, hints: RequestHints, *, may_store: bool
    ) -> None:
        """Its blocks may be stored: ``pending`` notes which are not, and why. None: none may be."""
        note = self._note(request)
        if pending is not None:
            note.lost = pending.lost
            if pending.max_blocks is not None:
                pending.lose("hint", pending.max_blocks)
        elif not may_store:
            note.lost["adapter"] = 0
        else:
            note.lost["hint" if not hints.may_store(self._block_size) else "session"] = 0

    def opened(self, order: Order) -> None:
        """A restore for a request begins."""
        note = self._live.get(order.request_id or "")
        if note is not None:
            note.opened, note.order = self._clock(), order

    def restored(self, restore: Restore) -> None:
        """A restore has ended, whatever came of it. O(1) and array work per slot.

        It counts for the request that it began for, and not for a later one with the same id.
        """
        note = self._live.get(restore.request.request_id)
        if note is None or note.order is None or note.order.parts[0].job_id != restore.restore_id:
            return
        num_positions = 0 if restore.was_stuck else restore.num_landed
        num_tokens = num_positions * self._block_size
        order, note.order = note.order, None
        if num_tokens and order.fills is not None:
            num_slots = num_positions * restore.columns or len(order.sources)
            slots, fills = order.sources[:num_slots], order.fills[:num_slots]
            from_pool = num_tokens
            for place, num in self._fetched.count(slots, fills, note.first_job).items():
                num_fetched = num_tokens // self._block_size * num // num_slots * self._block_size
                self._add(note, place, num_fetched)
                from_pool -= num_fetched
            self._add(note, POOL, from_pool)
        num_lacking = restore.num_positions * self._block_size - num_tokens
        if num_lacking > 0 and note.num_admissions <= 1:
            missing = Missing(restore.first * self._block_size + num_tokens, num_lacking, Reason.FAILED)
            note.missing = (missing, *note.missing)

    def not_fetched(self, request_id: str, place: str, stop: int, why: str) -> None:
        """A place has, or should have, its first ``stop`` positions, and they are not fetched."""
        note = self._live.get(request_id)
        if note is not None:
            note.unfetched = (place, stop, why)

    def finished(self, request: Request, told: KVTransferParams | None) -> None:
        """It is over; ``told``: what its client is of the hand-off that was asked for."""
        note, self._is_told = self._live.pop(request.request_id, None), ""
        if note is None:
            return
        if note.wants_report:
            self._is_told = request.request_id
        self._end_hold(note)
        note.ended, note.state = self._clock(), self._engine.state(request).name.lower()
        if told is not None:
            note.hand_off = told.refused or f"{told.tokens} tokens"
        note.num_prompt = request.num_prompt_tokens
        note.num_answer = request.num_output_tokens
        if note.opened is not None:
            self._end_restore(note, note.ended)
        note.order = None
        self.prompts.finish(note)
        self._over[self._num_over % len(self._over)] = note
        self._num_over += 1

    def reset(self) -> None:
        """All KV is worthless from now on."""
        self._absence.reset_at = self._clock()

    # Whoever asks

    def report(self, request_id: str) -> Any:
        """What its client is to be told of the request that was the last to end; None: nothing was asked."""
        if not request_id or request_id != self._is_told:
            return None
        note = self._over[(self._num_over - 1) % len(self._over)]
        return None if note is None else note.report()

    def of(self, is_meant: Callable[[str], bool], most: int) -> list[Note]:
        """Notes of requests whose ids are meant, ``most`` of them, the latest first. O(all)."""
        over = [note for note in self._over if note is not None and is_meant(note.request_id)]
        live = [note for note in list(self._live.values()) if is_meant(note.request_id)]
        return sorted([*live, *over], key=lambda note: note.arrived, reverse=True)[:most]

    @property
    def now(self) -> float:
        """By the engine's clock."""
        return self._clock()

    def __len__(self) -> int:
        """Requests that are noted."""
        return len(self._live) + min(self._num_over, len(self._over))

    def check_invariants(self) -> None:
        """What runs is not over, and all is bounded."""
        self.prompts.check_invariants()
        over = [note.request_id for note in self._live.values() if note.ended is not None]
        assert not over, f"{over} are over, and noted among those that run"
        for note in self._live.values():
            waited = note.held, note.aside, note.restoring
            assert min(waited) >= 0, f"{note} has waited for less than no time"
            assert (
                note.num_local + note.num_restored <= max(note.num_prompt, 0) or note.num_admissions != 1
            ), f"{note} was given more than its prompt"

    def left_over(self) -> dict[str, object]:
        """Who has not ended, by name. For tests."""
        return {"notes": list(self._live)}

    # Private

    def _note(self, request: Request) -> Note:
        note = self._live.get(request.request_id)
        if note is None:
            note = Note(request.request_id, self._clock(), self._ledger.next_id)
            self._live[request.request_id] = note
        return note

    def _end_hold(self, note: Note) -> None:
        if note.held_since is None:
            return
        seconds = self._clock() - note.held_since
        if note.is_aside:
            note.aside += seconds
        else:
            note.held += seconds
        note.held_since = None

    def _end_restore(self, note: Note, now: float) -> None:
        if note.opened is not None:
            note.restoring += now - note.opened
            note.opened = None
            self._settle(note)

    def _add(self, note: Note, place: str, num_tokens: int) -> None:
        if num_tokens and note.num_admissions <= 1:
            note.restored[place] = note.restored.get(place, 0) + num_tokens
        elif num_tokens:
            note.num_again += num_tokens

    def _settle(self, note: Note) -> None:
        """What it was worth: seconds that computing would have taken, less those that it has waited for it.

        Both are of this request alone. What the GPU did for others meanwhile is not in it.
        """
        if note.gain is not None or not self._prefill.is_known:
            return
        first = note.asked_local if note.asked_local >= 0 else note.num_local
        stop = note.num_local + note.num_restored
        note.gain = self._prefill.seconds(first, max(first, stop)) - note.held - note.restoring
        self._metrics.count("saved_seconds", max(note.gain, 0.0))
        self._metrics.count("lost_seconds", max(-note.gain, 0.0))
