"""Hand-offs: which prompts are computed for other engines, and what these are told of them."""

from collections.abc import Sequence
from enum import StrEnum

from allocator import StorePlan
from offload.fleet_config import FleetConfig, Role
from offload.messages import is_private
from offload.naming import bag_names, rows
from offload.scheduler.backlog import Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.common import Common
from offload.scheduler.engine import Request, State
from offload.scheduler.hints import RequestHints
from offload.scheduler.leases import Leases
from offload.scheduler.tiers.names import name_of
from offload.transfer_params import KVTransferParams, tip_of


class Refusal(StrEnum):
    """Why a prompt is not handed off although it should be. Clients are told so."""

    NOT_LISTENING = "this engine does not listen"
    RESET = "this engine was reset and its weights have no name"
    SHORT = "the prompt is shorter than a block"
    UNWANTED = "the client asked not to store it"
    STREAMED = "a streaming session is not stored"
    ADAPTER = "the request uses an adapter"
    FULL = "lease_share of the pool is used"
    NO_ROOM = "the pool has no room for it"
    PAUSED = "stores are paused after faults"
    NOT_STORED = "no part that others could go on from is stored"


class HandOffs:
    """Those of requests that are not over, and their answers. What is stored of them is up to ``Stores``."""

    def __init__(self, common: Common, fleet: FleetConfig) -> None:
        """None yet."""
        self._allocator = common.allocator
        self._engine = common.engine
        self._note_of = common.note_of
        self._groups = common.engine.groups
        self._metrics = common.metrics
        self._lasting = common.lasting
        self._block_size = common.block_size
        self._role = fleet.role
        self._refusals: dict[str, Refusal | None] = {}  # by request that is to be handed off
        self._answer: KVTransferParams | None = None
        self.leases = Leases(common, fleet.share, fleet.lease_seconds)

    def __len__(self) -> int:
        """Requests that are to be handed off, and have begun."""
        return len(self._refusals)

    def arrived(self, request: Request) -> None:
        """``request`` has come, and waits for its turn: what was said of its prompt before is over."""
        if self._is_asked(request):
            self._tell_peers(request, is_refused=False)

    def begin(self, request: Request, hints: RequestHints, *, may_store: bool) -> bool:
        """``request`` has blocks for the first time; returns whether all of its prompt is to be stored."""
        if not self._is_asked(request):
            return False
        refusal = None
        if self._lasting is None or self._lasting.life is None:
            refusal = Refusal.NOT_LISTENING
        elif request.lora_request is not None:  # its name is in the hashes, its weights are not
            refusal = Refusal.ADAPTER
        elif request.resumable:
            refusal = Refusal.STREAMED
        elif not (may_store and hints.may_store(self._block_size)):
            refusal = Refusal.UNWANTED
        elif request.num_prompt_tokens < self._block_size:
            refusal = Refusal.SHORT
        self._refusals[request.request_id] = refusal
        self._tell_peers(request, is_refused=refusal is not None)
        return refusal is None

    def ends(self, request: Request) -> bool:
        """``request`` is over; returns whether it is to be handed off now."""
        if request.request_id not in self._refusals:
            return False
        refusal = self._refusals.pop(request.request_id)
        if self._engine.state(request) is not State.COMPLETED:  # nobody gets an answer
            self._tell_peers(request, is_refused=True)
            return False
        life = None if self._lasting is None else self._lasting.life
        if refusal is None and life is not None and is_private(life.suffix):
            refusal = Refusal.RESET
        if refusal is not None:
            self.refuse(request, refusal)
        return refusal is None

    def must_be_stored(self, pending: Pending, stop: int) -> bool:
        """Whether blocks up to ``stop`` take the place of others, whatever these are worth.

        So they do as long as they could be leased if the request were over.
        """
        if not pending.delivers or stop > pending.num_prompt_blocks:
            return False
        num_more = stop - self._allocator.known_depth(pending.chain, stop)
        return self.leases.has_room_for(num_more * self._groups.columns + self._groups.bag_slots)

    def deliver(self, pending: Pending, num_full: int | None, breaker: CircuitBreaker) -> StorePlan | None:
        """Lease the prompt of a request that is over, and have what lacks a copy stored, all of it.

        Args:
            pending: the request.
            num_full: its full blocks; None: it has lost them to others.
            breaker: that of stores.

        Returns:
            What is to be stored of it now.
        """
        chain, stop = pending.chain, pending.num_prompt_blocks
        stop = stop if num_full is None else min(num_full, stop)
        if self._groups.has_bags:  # nobody goes on from the end of the prompt itself
            stop = min(stop, (pending.request.num_prompt_tokens - 1) // self._block_size)
        known = self.leases.depth(chain, stop)
        if self._groups.has_bags or num_full is None:
            stop = known
        plan = None
        if not stop:
            self.refuse(pending.request, Refusal.NOT_STORED)
        elif not self.leases.would_fit(chain, known, stop):
            self.refuse(pending.request, Refusal.FULL)
        elif known < stop and (breaker.is_outage or not breaker.allows):
            self.refuse(pending.request, Refusal.PAUSED)
        else:
            if known < stop:
                note = self._note_of(pending.request)
                plan = self._allocator.plan_store(chain, stop, None, pending.keep, must=True, note=note)
                known = known if plan is None else plan.stop
            if known < stop:
                self.refuse(pending.request, Refusal.NO_ROOM)
            else:
                self.grant(chain, stop)
                self._tell_peers(pending.request, is_refused=False)
        return plan

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """The request that is over is not handed off."""
        self._tell_peers(request, is_refused=True)
        self._metrics.count("refused_hand_offs")
        self._answer = KVTransferParams(refused=str(refusal))

    def grant(self, chain: Sequence[bytes], stop: int) -> None:
        """The first ``stop`` positions of it are, which are resident or filling and fit."""
        assert self._lasting is not None and self._lasting.life is not None
        self.leases.grant(chain, stop)
        num_tokens = stop * self._block_size
        self._metrics.count("handed_off_tokens", num_tokens)
        life = self._lasting.life
        self._answer = KVTransferParams(
            do_remote_prefill=True,
            peer=life.peer.hex(),
            epoch=life.epoch.hex(),
            tokens=num_tokens,
            tip=tip_of(chain[stop - 1]),
        )

    def take_answer(self) -> KVTransferParams | None:
        """What to tell of the request that is over; None: nothing was asked."""
        answer, self._answer = self._answer, None
        return answer

    def _is_asked(self, request: Request) -> bool:
        """Whether its prompt is to be handed off, if that can be."""
        if self._role is Role.DECODE:
            return False
        return self._role is Role.PREFILL or self._engine.transfer_params(request).do_remote_decode

    def _tell_peers(self, request: Request, *, is_refused: bool) -> None:
        """Who expects the prompt need not wait for it, or may again."""
        num_tokens = request.num_prompt_tokens - self._groups.has_bags  # with those nobody goes on at its end
        last = num_tokens // self._block_size
        if self._lasting is None or not last:
            return
        name = name_of(self._engine.chain(request)[last - 1])
        if self._groups.has_bags:
            name = bag_names(rows([name])).tobytes()
        (self._lasting.refuse if is_refused else self._lasting.expect)(name)

    def check_invariants(self) -> None:
        """Nothing is to be told of a request that is not over."""
        self.leases.check_invariants()
        assert self._answer is None, f"{self._answer} was told to nobody"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {"hand-offs": list(self._refusals)} | self.leases.left_over()
