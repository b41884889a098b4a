"""The virtual engine: vLLM's scheduler, driven as vLLM's engine core drives it."""

import random
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.request import Request, RequestStatus

from allocator.slot_pool import flat
from offload.scheduler.answers import AnswerReuse
from offload.scheduler.side import SchedulerSide
from offload.testing.copiers.seeded import SeededCopier
from offload.testing.virtual.audit import Audit, complete_bags
from offload.testing.virtual.drafter import Drafter
from offload.testing.virtual.history import History
from offload.testing.virtual.inputs import Inputs
from offload.testing.virtual.meeting import Meeting, register
from offload.testing.virtual.native import scheduler_jobs
from offload.testing.virtual.parts import make_hash, make_scheduler, tell_sizes
from offload.testing.virtual.rank import VirtualRank
from offload.testing.virtual.runner import VirtualRunner
from offload.testing.virtual.scheduler_audit import SchedulerAudit
from offload.testing.virtual.settings import VirtualSettings, make_kv_cache_config, make_vllm_config
from offload.testing.virtual.under_way import StepUnderWay
from offload.transfer_params import KVTransferParams

VOCABULARY = 512

_FIRST_STEPS = 4


class StuckError(AssertionError):
    """Requests or transfers do not end, however often the engine steps."""


class VirtualEngine:
    """Scheduler, connector and ranks in one process, one call to ``step`` at a time.

    Everything random comes from ``rng``: the same calls with the same seed give the same run.
    """

    side: SchedulerSide
    """Our connector's; not there with another one."""

    def __init__(self, settings: VirtualSettings, rng: random.Random) -> None:
        self.settings = settings
        self.counts, self.history = Counter[str](), History()
        self._num_not_run = 0  # steps scheduled that have not run
        self._rng = rng
        vllm_config = make_vllm_config(settings)
        self.sizes = tell_sizes(make_kv_cache_config(settings), vllm_config)
        self._hasher = get_request_block_hasher(self.sizes.hashes, make_hash(vllm_config))
        self.copiers = [
            SeededCopier(settings.copies, random.Random(rng.random()), self.counts)
            for _ in range(settings.num_ranks)
        ]
        meetings = [Meeting(settings.stage_ranks, settings.pcp) for _ in range(settings.stages)]
        self.ranks = [
            VirtualRank(
                index, settings, vllm_config, copier, self.clock, meetings[index // settings.stage_ranks]
            )
            for index, copier in enumerate(self.copiers)
        ]
        register(self.ranks, settings.replica_shape)
        if settings.connector == "offload":
            for index, other in permutations(range(settings.num_ranks), 2):
                if settings.first_replica(index) == settings.first_replica(other):
                    self.ranks[index].share_with(self.ranks[other])
        if settings.tier is not None:
            settings.tier.note_corrupted({rank.pool_address: rank.copier.corrupted for rank in self.ranks})
        workers = {
            divmod(index, settings.stage_ranks): rank.connector for index, rank in enumerate(self.ranks)
        }
        self.scheduler = make_scheduler(settings, vllm_config, self.clock, workers)
        self.scheduler.use_v2_model_runner = settings.v2_runner
        self._inputs: dict[str, Inputs] = {}
        drafts = random.Random(rng.random() if settings.drafter else 0)
        drafter = Drafter(settings, self.ranks, VOCABULARY, self.history, self.counts, drafts)
        self.runner = VirtualRunner(self.ranks, VOCABULARY, self.history, self._inputs, drafter)
        self._watch_blocks()
        self.audit = SchedulerAudit(self)
        self.generation = 0
        """Counts weight updates: KV of an earlier generation must never be read."""
        self.told: dict[str, KVTransferParams] = {}
        """What clients were told of hand-offs, by request."""
        self.adapters = Counter[int]()
        """Counts by id how often an adapter was loaded again: with each request that says so."""
        self._in_flight: deque[StepUnderWay] = deque()
        self._next_id = 0
        if settings.connector == "offload":
            self._find_side()
            self.audit = Audit(self)
        if settings.region is not None:
            settings.region.begin(self)

    @property
    def num_steps(self) -> int:
        """Steps scheduled so far."""
        return self.history.step

    def clock(self) -> float:
        """Seconds so far, for deadlines, pauses and costs. They pass while a step runs."""
        return (self.history.step - self._num_not_run) * self.settings.step_seconds

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose output is not known yet."""
        return len(self._in_flight)

    @property
    def jobs(self) -> list[Any]:
        """Copies in flight, as the connector's scheduler side knows them."""
        match self.settings.connector:
            case "offload":
                return list(self.side.ledger)
            case "native":
                return scheduler_jobs(self.scheduler.connector)
            case _:
                return []

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
        xargs: Mapping[str, Any] | None = None,
        kv_hints: KvHintsEnvelope | None = None,
        resumable: bool = False,
        lora: LoRARequest | None = None,
        features: Sequence[MultiModalFeatureSpec] = (),
        embeds: torch.Tensor | None = None,
        is_pooled: bool = False,
    ) -> Request:
        """Send a request: token ids, tokens to generate, and what ``kv_transfer_params`` say (``hints``).

        ``xargs`` are further ``extra_args``. ``features`` are multimodal items. With ``embeds`` (one row per
        position) there is no other prompt. ``is_pooled``: it wants an embedding instead of tokens, as scoring
        and embedding requests do.
        """
        num_prompt = len(prompt) if embeds is None else len(embeds)
        assert num_prompt + max_tokens <= self.settings.longest, "the request can never fit"
        req_id = f"r{self._next_id}"
        self._next_id += 1
        extra = {**(xargs or {}), **({"kv_transfer_params": hints} if hints else {})}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        request = Request(
            request_id=req_id,
            prompt_token_ids=list(prompt) if embeds is None else None,
            prompt_embeds=embeds,
            mm_features=list(features),
            lora_request=lora,
            sampling_params=None if is_pooled else sampling,
            pooling_params=PoolingParams(task="embed") if is_pooled else None,
            arrival_time=float(self._next_id),
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
            resumable=resumable,
            kv_hints=kv_hints,
        )
        self._inputs[req_id] = Inputs.of(request)
        self.audit.follow(request)
        self.scheduler.add_request(request)
        self.counts["requests"] += 1
        return request

    def abort(self, req_id: str) -> None:
        """The client went away."""
        request = self.scheduler.requests.get(req_id)
        if request is None or request.is_finished():
            return
        self.counts[f"aborts {request.status.name.lower()}"] += 1
        self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)

    def reset(self, *, connector: bool = True, running: bool = False) -> bool:
        """``reset_prefix_cache``. A full success counts as a weight update."""
        done: bool = self.scheduler.reset_prefix_cache(running, connector)
        self.counts["resets"] += 1
        if connector:
            self.audit.pool_was_reset()
            if done:
                self.generation += 1
        return done

    def load_weights(self, version: str, *, running: bool = False) -> bool:
        """As a trainer does: new weights, a reset, and their name. Returns whether they are loaded.

        KV of weights of one name is the same, whichever engine computes it.
        """
        if not self.reset(running=running):
            return False
        self.generation = 1_000_000 + zlib.crc32(version.encode())
        if self.settings.connector == "offload":
            self.side.weights.name(version)
        return True

    def can_reset_running(self) -> bool:
        """Whether vLLM allows to reset under running requests: nobody else may hold a block."""
        manager = self.scheduler.kv_cache_manager
        holding = any(
            request.status is not RequestStatus.RUNNING and any(manager.get_blocks(request_id).blocks)
            for request_id, request in self.scheduler.requests.items()
        )
        queued = self.settings.connector == "offload" and self.side.stores.backlog.num_queued
        return not (holding or self._in_flight or self.jobs or queued)

    def step(self, aborts: Sequence[str] = ()) -> None:
        """One turn of the engine core's loop; ``aborts`` arrive while the model runs."""
        if not self.settings.overlapped:
            if self.scheduler.has_requests():
                self._schedule()
                self._finish_step(aborts)
            return
        if self.scheduler.has_requests():
            ran = self._schedule()
            if len(self._in_flight) < 2 and (ran or self.scheduler.has_requests()):
                return
        if self._in_flight:
            self._finish_step(aborts)

    def flush(self) -> None:
        """Take in the output of every step in flight, scheduling none."""
        while self._in_flight:
            self._finish_step(())

    def rot(self) -> None:
        """A byte of some slot changes by itself, if there is one that no load is reading."""
        allocator = self.side.allocator
        read = [flat(pin.slots) for pin in allocator._pins]
        read += [pin.bag for pin in allocator._pins if pin.bag is not None]
        pinned = {slot for each in read for slot in each.tolist()}
        held = [flat(node.slots[: node.resident]) for node in allocator._tree.nodes()]
        held += [each.slots for node in allocator._tree.nodes() for each in complete_bags(node)]
        slots = [slot for each in held for slot in each.tolist() if slot not in pinned]
        if slots:
            slot = self._rng.choice(slots)
            self._rng.choice(self.ranks).rot(slot, self._rng.randrange(self.settings.slot_bytes))
            self.history.slots([slot], "a byte of it changed by itself")
            self.counts["rot"] += 1

    def is_idle(self) -> bool:
        """Whether the engine core would go to sleep."""
        return not self._in_flight and not self.scheduler.has_requests()

    def drain(self, max_steps: int = 5000) -> None:
        """Step until nothing is left to do, then let go of what is stuck and step until that has ended.

        Blocks that a stuck load may still write to are nobody's. A request that cannot do without them is the
        one thing that may wait for it to end.

        Raises:
            StuckError: more than ``max_steps`` steps pass, and nothing stuck explains that.
        """
        for _ in range(max_steps):
            try:
                self._come_to_rest(max_steps)
                break
            except StuckError:
                if not self._lacks_stuck_blocks():
                    raise
                self._let_go()  # the next load may be stuck, too
        else:
            raise StuckError(f"loads got stuck {max_steps} times in a row")
        self.audit.check_at_rest()
        for _ in range(max_steps):
            if not (self.jobs or self._has_leases):
                return
            self._let_go()
            if self._has_leases:  # their time passes
                seconds = self.side.stores.hand_offs.leases.seconds
                self.history.step += int(seconds / self.settings.step_seconds) + 1
            self.add([0], 1)  # ends travel on steps, and an engine at rest makes none
            self._come_to_rest(max_steps)
        raise StuckError(f"jobs {self.jobs} have not ended though nothing is stuck")

    @property
    def _has_leases(self) -> bool:
        return self.settings.connector == "offload" and len(self.side.stores.hand_offs.leases) > 0

    def _find_side(self) -> None:
        """Our scheduler side is there at once, or when facts have come with the first steps."""
        for _ in range(_FIRST_STEPS):
            if self.scheduler.connector._scheduler is None:
                self.step()
        settings, self.side = self.settings, self.scheduler.connector._scheduler
        finish = self.side.finish
        self.side.finish = lambda request: self._note_told(request, finish(request))  # type: ignore[method-assign]
        self.side.restores.first_part = settings.first_part
        if settings.step_restores:
            self.side.restores.shared_at_once = settings.step_restores
            self.side.restores.carryover.step_work = settings.step_restores
            self.side.restores.tidy()
        self.side.stores.backlog.answer_run = settings.answer_run
        self.side.stores.backlog.answer_interval = settings.answer_interval
        if settings.answer_patience and self.side.stores.answers.is_learning:
            patience = settings.answer_patience
            self.side.stores.learn_answers(AnswerReuse(patience=patience, worth=patience // 2))

    def _note_told(self, request: Any, told: KVTransferParams | None) -> KVTransferParams | None:
        if told is not None:
            self.told[request.request_id] = told
            self.counts["handed off" if told.refused is None else f"not handed off: {told.refused}"] += 1
        return told

    def _watch_blocks(self) -> None:
        """Note which GPU blocks are taken for something new; what was in them must not be read any more."""
        self._taken, pool = list[int](), self.scheduler.kv_cache_manager.block_pool
        take = pool.get_new_blocks

        def watched(num_blocks: int) -> list[Any]:
            blocks: list[Any] = take(num_blocks)
            self._taken.extend(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = watched

    def _lacks_stuck_blocks(self) -> bool:
        """Whether requests that are left need more blocks than there are without those of stuck loads."""
        if self.settings.connector != "offload" or not self.side.restores.num_stuck:
            return False
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        longest = max(request.num_tokens for request in self.scheduler.requests.values())
        return bool(self.settings.blocks_for(longest) + 1 > free)

    def _let_go(self) -> None:
        for copier in self.copiers:
            copier.let_go()

    def _come_to_rest(self, max_steps: int) -> None:
        for _ in range(max_steps):
            if self.is_idle():
                return
            self.step()
        left = {req_id: request.status.name for req_id, request in self.scheduler.requests.items()}
        raise StuckError(f"not idle after {max_steps} steps; requests {left}, jobs {self.jobs}")

    def close(self) -> None:
        """Release threads and memory."""
        if self.settings.region is not None:
            self.settings.region.end(self)
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()

    def _schedule(self) -> bool:
        self.history.step += 1
        self._num_not_run += 1
        if self.settings.network is not None:
            self.settings.network.tend()
        victims = set(self.scheduler.requests)
        output = self.scheduler.schedule()
        preempted = victims & set(output.preempted_req_ids or ())
        self.counts["preemptions"] += len(preempted)
        for req_id in [*preempted, *output.finished_req_ids]:
            self.history.blocks(self.runner.blocks_of(req_id), f"{req_id} gave it back")
        self.audit.see_plan(output.kv_connector_metadata)
        for new in output.scheduled_new_reqs:
            self.counts["tokens found"] += new.num_computed_tokens
            if new.lora_request is not None and new.lora_request.load_inplace:
                self.adapters[new.lora_request.lora_int_id] += 1
        taken, self._taken = self._taken, []
        self._in_flight.appendleft(
            StepUnderWay(output, self.generation, self.audit.pool_epoch, dict(self.adapters), taken)
        )
        if not self.settings.overlapped or self._rng.random() < 0.5:
            self._execute_all()
        return bool(output.total_num_scheduled_tokens)

    def _execute_all(self) -> None:
        """Workers are first-in first-out, but may lag behind the scheduler."""
        for step in reversed(self._in_flight):
            if step.result is None:
                self.runner.adapters, self.runner.taken = step.adapters, step.taken
                step.result = self.runner.execute(step.output, step.generation)
                self._num_not_run -= 1

    def _finish_step(self, aborts: Sequence[str]) -> None:
        self._execute_all()
        step = self._in_flight.pop()
        assert step.result is not None
        for req_id in aborts:
            self.abort(req_id)
        self.audit.see_report(step.result.kv_connector_output, step.pool_epoch)
        self.scheduler.update_from_output(step.output, step.result)
        if self.settings.drafter and not self.settings.overlapped:
            self.scheduler.update_draft_token_ids(self.runner.take_drafts())
        self.audit.after_step()
