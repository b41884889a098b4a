"""Our code with one thing taken out or put wrong: the historic bugs of KV offloading, one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from allocator import CpuOffloadingBlockAllocator, room
from allocator.bags import BagState, Checkpoint
from allocator.node import Removed
from allocator.room import Room
from allocator.slot_pool import SlotPool, SlotState, flat
from allocator.store_plans import StorePlans
from offload.messages import WorkerReport
from offload.scheduler import amounts
from offload.scheduler.checkpoints import Candidate, Checkpoints
from offload.scheduler.flow import Job
from offload.scheduler.groups import HOLE, GpuBlocks, Groups, Kind
from offload.scheduler.jobs import JobLedger
from offload.scheduler.restore import LoadPart, Restore
from offload.scheduler.restores import Restores
from offload.scheduler.side import SchedulerSide
from offload.scheduler.store import Store
from offload.scheduler.stores import Stores
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import SeededCopier
from offload.testing.virtual import VirtualSettings
from offload.testing.virtual.groups import CELL_BYTES
from offload.vllm import connector
from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.engine import VllmEngine
from offload.vllm.replicas import Shape
from offload.worker.awaited import Awaited
from offload.worker.jobs import TransferJob
from offload.worker.layout import BlockLayout, CopyBatch
from offload.worker.replicas import Share
from offload.worker.seals import Seals
from offload.worker.side import WorkerSide
from offload.worker.transfer import TransferEngine
from tests.mutants.edits import Edit


@dataclass(frozen=True)
class Mutant:
    """A change to our code, by name; ``apply`` makes it for the life of a monkeypatch.

    It is seen on engines of a ``kind`` only, and of these where ``may_show`` says so: other seeds are passed
    over.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    kind: str = "plain"
    may_show: Callable[[VirtualSettings], bool] = lambda settings: True


MUTANTS: list[Mutant] = []
Change = Callable[[pytest.MonkeyPatch], None]


def mutant(apply: Change) -> Change:
    MUTANTS.append(Mutant(apply.__name__, apply))
    return apply


def mutant_of_stuck_copies(apply: Change) -> Change:
    MUTANTS.append(Mutant(apply.__name__, apply, may_show=_has_stuck_copies))
    return apply


def mutant_of_drafts(*drafters: str) -> Callable[[Change], Change]:
    """It is seen with these drafters only."""

    def named(apply: Change) -> Change:
        MUTANTS.append(Mutant(apply.__name__, apply, "draft", lambda settings: settings.drafter in drafters))
        return apply

    return named


def mutant_of_replicas(apply: Change) -> Change:
    """It is seen on ranks that hold the same KV, the sooner the more there are."""
    MUTANTS.append(Mutant(apply.__name__, apply, "replica", lambda settings: settings.num_ranks > 3))
    return apply


def mutant_of_model(model: str) -> Callable[[Change], Change]:
    """It is seen on engines of that hybrid model."""

    def named(apply: Change) -> Change:
        MUTANTS.append(Mutant(apply.__name__, apply, model))
        return apply

    return named


def _has_stuck_copies(settings: VirtualSettings) -> bool:
    return settings.copies.fault_rate > 0 and Fault.STUCK in settings.copies.faults


class _NoReferences:
    """An engine that is asked to hold and release blocks, and does not."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def hold(self, blocks: Any) -> None:
        pass

    def release(self, blocks: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@mutant
def source_blocks_are_not_held_during_a_store(patch: pytest.MonkeyPatch) -> None:
    original = Stores.__init__

    def init(self: Stores, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._engine = self.holds._engine = _NoReferences(self._engine)

    patch.setattr(Stores, "__init__", init)


@mutant
def held_blocks_are_released_at_finish(patch: pytest.MonkeyPatch) -> None:
    original = Stores.finish

    def finish(self: Stores, request: Any) -> Any:
        orders = original(self, request)
        table = set(self._engine.ids(self._engine.tables(request.request_id)[0]).tolist())
        for job in self._ledger.of(self):
            if table.intersection(block.block_id for block in job.blocks):
                self.holds.release_held(job)
        return orders

    patch.setattr(Stores, "finish", finish)


@mutant
def slots_are_not_pinned_during_a_load(patch: pytest.MonkeyPatch) -> None:
    pin = CpuOffloadingBlockAllocator.pin
    unpin = CpuOffloadingBlockAllocator.unpin

    def pin_and_let_go(self: CpuOffloadingBlockAllocator, *args: Any) -> Any:
        pinned = pin(self, *args)
        unpin(self, pinned)
        return pinned

    patch.setattr(CpuOffloadingBlockAllocator, "pin", pin_and_let_go)
    patch.setattr(CpuOffloadingBlockAllocator, "unpin", lambda self, pin: None)


@mutant
def stores_are_committed_before_they_are_copied(patch: pytest.MonkeyPatch) -> None:
    plan_store = CpuOffloadingBlockAllocator.plan_store
    commit = CpuOffloadingBlockAllocator.commit

    def plan_and_commit(self: CpuOffloadingBlockAllocator, *args: Any, **more: Any) -> Any:
        plan = plan_store(self, *args, **more)
        if plan is not None:
            commit(self, plan)
        return plan

    patch.setattr(CpuOffloadingBlockAllocator, "plan_store", plan_and_commit)
    patch.setattr(CpuOffloadingBlockAllocator, "commit", lambda self, plan: None)
    patch.setattr(CpuOffloadingBlockAllocator, "abort", lambda self, plan: None)


@mutant
def failed_stores_are_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuOffloadingBlockAllocator, "abort", CpuOffloadingBlockAllocator.commit)


@mutant
def what_follows_a_failed_store_is_not_aborted(patch: pytest.MonkeyPatch) -> None:
    """Followers become resident: the failed positions stay where they are, as if filled."""

    def abort(self: CpuOffloadingBlockAllocator, plan: Any) -> None:
        followers = [p for p in self._stores.plans._copying.values() if p.parent_hash == plan.hashes[-1]]
        self.commit(plan) if followers else original(self, plan)

    original = CpuOffloadingBlockAllocator.abort
    patch.setattr(CpuOffloadingBlockAllocator, "abort", abort)


@mutant
def plans_after_a_failed_store_stay_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StorePlans, "orphan", lambda self: None)


@mutant
def a_job_is_done_when_the_first_rank_is(patch: pytest.MonkeyPatch) -> None:
    original = JobLedger.__init__
    patch.setattr(JobLedger, "__init__", lambda self, num_ranks, *rest: original(self, 1, *rest))


@mutant
def one_good_rank_makes_a_job_good(patch: pytest.MonkeyPatch) -> None:
    original = JobLedger.report

    def report(self: JobLedger, job_id: int, num_ranks: int, num_good: int, *rest: Any) -> Any:
        job = self._jobs.get(job_id)
        is_last = job is not None and job.ranks_left <= num_ranks
        whole = job.num_blocks if job is not None else 0
        return original(self, job_id, num_ranks, num_good if is_last else whole, *rest)

    patch.setattr(JobLedger, "report", report)
    patch.setattr(
        WorkerReport, "merged", lambda self, other: WorkerReport({**self.jobs, **_added(self, other)})
    )


def _added(mine: WorkerReport, other: Any) -> dict[int, Any]:
    both = mine.jobs.keys() & other.jobs.keys()
    return {
        job_id: ended._replace(
            num_ranks=ended.num_ranks + (mine.jobs[job_id].num_ranks if job_id in both else 0)
        )
        for job_id, ended in other.jobs.items()
    }


@mutant
def blocks_computed_in_part_are_stored(patch: pytest.MonkeyPatch) -> None:
    def storable(num_computed: int, num_tokens: int, num_hashes: int, size: int) -> int:
        return min(-(-num_computed // size), num_hashes)

    patch.setattr(amounts, "storable_blocks", storable)


@mutant
def stores_at_finish_trust_the_hashes(patch: pytest.MonkeyPatch) -> None:
    def storable(
        num_computed: int,
        num_unconfirmed: int,
        num_prompt: int,
        num_tokens: int,
        num_hashes: int,
        block_size: int,
        num_unsettled: int,
    ) -> int:
        return num_hashes

    patch.setattr(amounts, "storable_blocks_at_finish", storable)


@mutant
def loads_in_flight_survive_a_reset(patch: pytest.MonkeyPatch) -> None:
    original = WorkerSide.bind

    def bind(self: WorkerSide, plan: Any) -> None:
        plan.cancelled.clear()
        original(self, plan)

    patch.setattr(WorkerSide, "bind", bind)


@mutant
def stores_in_flight_survive_a_reset(patch: pytest.MonkeyPatch) -> None:
    """Nothing of the pool is forgotten."""
    patch.setattr(CpuOffloadingBlockAllocator, "reset", lambda self: None)


@mutant
def failed_slots_stay_resident(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuOffloadingBlockAllocator, "drop", lambda self, chain, first: None)


@mutant
def unfilled_blocks_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuOffloadConnector, "get_block_ids_with_load_errors", lambda self: set())


@mutant
def a_failed_load_is_never_reported(patch: pytest.MonkeyPatch) -> None:
    original = Awaited.end_part

    def end_part(self: Awaited, end: Any, results: KVConnectorTransferResults) -> None:
        if end.error is None:
            original(self, end, results)

    patch.setattr(Awaited, "end_part", end_part)


@mutant
def a_load_is_reported_with_its_first_part(patch: pytest.MonkeyPatch) -> None:
    original = Awaited.end_part

    def end_part(self: Awaited, end: Any, results: KVConnectorTransferResults) -> None:
        restore = self._restores.get(end.job_id)
        if restore is not None:
            restore.parts_left = 1
            self._restores = {job: other for job, other in self._restores.items() if other is not restore}
            self._restores[end.job_id] = restore
        original(self, end, results)

    patch.setattr(Awaited, "end_part", end_part)


@mutant
def blocks_are_shared_before_they_have_landed(patch: pytest.MonkeyPatch) -> None:
    original = Restores._share

    def share(self: Restores, restore: Restore, num_blocks: int) -> None:
        original(self, restore, len(restore.block_ids))

    patch.setattr(Restores, "_share", share)


@mutant
def blocks_of_a_void_restore_are_shared(patch: pytest.MonkeyPatch) -> None:
    original = Restores.advance

    def advance(self: Restores, job: Job[LoadPart], progress: Any) -> Any:
        ended = original(self, job, progress)
        if job.task.restore.is_void:
            self._share(job.task.restore, len(job.task.restore.block_ids))
        return ended

    patch.setattr(Restores, "advance", advance)


@mutant
def jobs_given_up_count_as_over(patch: pytest.MonkeyPatch) -> None:
    """Slots and blocks of a stuck copy are used again while it may still write to them."""
    original = JobLedger.report

    def report(
        self: JobLedger, job_id: int, num_ranks: int, num_good: int, given_up: bool = False, *rest: Any
    ) -> Any:
        num_over = self._num_ranks if given_up else num_ranks
        return original(self, job_id, num_over, num_good, given_up, *rest)

    patch.setattr(JobLedger, "report", report)


@mutant_of_stuck_copies
def blocks_of_a_stuck_load_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    original = Restores.advance

    def advance(self: Restores, job: Job[LoadPart], progress: Any) -> Any:
        engine = self._engine
        if progress.gave_up:
            self._engine = _NoReferences(engine)
        ended = original(self, job, progress)
        job.blocks = []
        self._engine = engine
        return ended

    patch.setattr(Restores, "advance", advance)


@mutant
def slots_of_a_stuck_store_are_given_back(patch: pytest.MonkeyPatch) -> None:
    original, ends_orphan = CpuOffloadingBlockAllocator.abandon, StorePlans.end_orphan
    freed: set[int] = set()

    def abandon_and_free(self: CpuOffloadingBlockAllocator, plan: Any) -> None:
        if id(plan) not in freed:
            original(self, plan)
            freed.add(id(plan))
            ends_orphan(self._stores, plan)

    def ends(self: StorePlans, plan: Any) -> bool:
        return id(plan) in freed or ends_orphan(self, plan)

    patch.setattr(CpuOffloadingBlockAllocator, "abandon", abandon_and_free)
    patch.setattr(StorePlans, "end_orphan", ends)


@mutant
def nothing_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferEngine, "_give_up_overdue", lambda self: None)
    patch.setattr(SeededCopier, "let_go", lambda self: None)


@mutant
def stuck_jobs_keep_the_engine_awake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "has_pending_work", property(lambda self: len(self.ledger) > 0))
    patch.setattr(SeededCopier, "let_go", lambda self: None)


@mutant
def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seals, "num_intact", lambda self, block_ids, slots: len(slots))


@mutant
def short_copies_pass_for_whole_ones(patch: pytest.MonkeyPatch) -> None:
    original = TransferEngine._after_copy

    def after_copy(self: TransferEngine, copied: Any) -> None:
        job = self._jobs.get(copied.job_id)
        if job is not None and copied.error is None:
            copied = replace(copied, num_copied=len(job.batch.sizes))
        original(self, copied)

    patch.setattr(TransferEngine, "_after_copy", after_copy)


@mutant
def the_engine_may_sleep_with_jobs_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuOffloadConnector, "has_pending_push_work", lambda self: False)


@mutant
def a_block_is_as_long_as_a_ranks_part_of_it(patch: pytest.MonkeyPatch) -> None:
    """Under decode context parallelism ranks share the tokens of a block."""

    def block_size(self: CpuOffloadConnector) -> int:
        size: int = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return size

    patch.setattr(CpuOffloadConnector, "_block_size", property(block_size))


@mutant
def loads_go_to_the_head_of_the_table(patch: pytest.MonkeyPatch) -> None:
    """The blocks that the GPU's own cache supplied are forgotten about."""
    original = amounts.load_range

    def load_range(num_local: int, num_external: int, size: int) -> range:
        return original(0, num_external, size)

    patch.setattr(amounts, "load_range", load_range)


@mutant
def held_blocks_are_never_released(patch: pytest.MonkeyPatch) -> None:
    original = Stores._end

    def end(self: Stores, job: Job[Store]) -> None:
        job.blocks = []
        original(self, job)

    patch.setattr(Stores, "_end", end)


@mutant
def the_salt_of_a_request_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Chains are looked up by tokens alone."""
    from offload.testing.virtual.engine import VirtualEngine

    original = VirtualEngine.add

    def add(
        self: VirtualEngine, prompt: Any, max_tokens: int, *, salt: str | None = None, **kwargs: Any
    ) -> Any:
        request = original(self, prompt, max_tokens, **kwargs)
        request_id = request.request_id
        self._inputs[request_id] = self._inputs[request_id]._replace(salt=salt)
        return request

    patch.setattr(VirtualEngine, "add", add)


@mutant
def block_tables_are_remembered(patch: pytest.MonkeyPatch) -> None:
    """Stores read the blocks a request had when it was admitted first, plus what it gained since."""
    tables: dict[tuple[int, str], list[Any]] = {}
    original = Stores._open

    class Remembering:
        def __init__(self, stores: Stores) -> None:
            self._engine = stores._engine

        def tables(self, req_id: str) -> list[list[Any]]:
            table = tables.setdefault((id(self._engine), req_id), [])
            table.extend(self._engine.tables(req_id)[0][len(table) :])
            return [table]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    def open_store(self: Stores, *arguments: Any) -> Any:
        engine, self._engine = self._engine, Remembering(self)
        orders = original(self, *arguments)
        self._engine = engine
        return orders

    patch.setattr(Stores, "_open", open_store)


@mutant_of_stuck_copies
def the_slots_of_a_pinned_chain_are_freed_when_it_is_dropped(patch: pytest.MonkeyPatch) -> None:
    def give_back(pool: SlotPool, removed: Sequence[Removed]) -> None:
        for part in removed:
            pool.move(flat(part.slots[: part.resident]), SlotState.RESIDENT, SlotState.FREE)

    patch.setattr(room, "give_back", give_back)


def _with_other_drafts(patch: pytest.MonkeyPatch, **others: int) -> None:
    """The scheduler's side takes speculative decoding for something else than it is."""
    original = connector.drafts_of
    patch.setattr(connector, "drafts_of", lambda *engine: original(*engine)._replace(**others))


@mutant_of_drafts("eagle", "mtp")
def the_last_block_of_a_hit_is_restored_for_draft_layers_too(patch: pytest.MonkeyPatch) -> None:
    _with_other_drafts(patch, num_volatile_blocks=0)


@mutant_of_drafts("mtp")
def blocks_are_stored_before_their_draft_kv_is_final(patch: pytest.MonkeyPatch) -> None:
    _with_other_drafts(patch, num_unsettled_tokens=0)


@mutant_of_drafts("draft_model", "eagle", "mtp")
def restores_leave_no_gpu_blocks_for_drafts(patch: pytest.MonkeyPatch) -> None:
    _with_other_drafts(patch, num_tokens=0, num_lookahead=0)


@mutant_of_drafts("draft_model", "eagle", "mtp")
def draft_kv_is_restored_one_position_late(patch: pytest.MonkeyPatch) -> None:
    """Where each layer is a piece of its own, of which the last is a draft layer's."""
    original = BlockLayout.load

    def load(self: BlockLayout, *where: Any) -> CopyBatch:
        batch, num_pieces = original(self, *where), len(self.piece_sizes)
        batch.sources[num_pieces - 1 :: num_pieces] -= CELL_BYTES if num_pieces > 1 else 0
        return batch

    patch.setattr(BlockLayout, "load", load)


@mutant_of_replicas
def of_ranks_with_the_same_kv_only_the_first_reports(patch: pytest.MonkeyPatch) -> None:
    """What the others have not copied counts as good."""
    original = TransferEngine._end

    def end(self: TransferEngine, job_id: int, num_good: int, error: str | None) -> None:
        job = self._jobs[job_id]
        if job.lane.fills_pool and self._share.part:
            num_good, error = len(job.sources), None
        original(self, job_id, num_good, error)

    patch.setattr(TransferEngine, "_end", end)


@mutant_of_replicas
def seals_of_a_shared_pool_are_not_shared(patch: pytest.MonkeyPatch) -> None:
    original = Seals.__init__

    def init(self: Seals, *args: Any, tables: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    patch.setattr(Seals, "__init__", init)


@mutant_of_replicas
def every_rank_copies_the_same_part(patch: pytest.MonkeyPatch) -> None:
    """Where a part begins is forgotten."""
    original = Share.of
    patch.setattr(
        Share, "of", lambda self, job_id, num_blocks: range(len(original(self, job_id, num_blocks)))
    )


@mutant_of_replicas
def good_blocks_are_counted_from_the_part(patch: pytest.MonkeyPatch) -> None:
    """And not from the job."""
    patch.setattr(TransferJob, "num_good", lambda self, num_own: num_own)


@mutant_of_replicas
def a_part_that_falls_short_passes_for_a_whole_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferJob, "num_good", lambda self, num_own: self.num_blocks)


@mutant_of_replicas
def a_late_rank_breaks_the_seals_of_others(patch: pytest.MonkeyPatch) -> None:
    """All slots of a job, not those of its part."""
    original = TransferEngine.submit

    def submit(self: TransferEngine, job_id: int, route: Any, sources: Any, targets: Any, *rest: Any) -> None:
        if self._lanes[route].fills_pool:
            self._seals.unseal(targets)
        original(self, job_id, route, sources, targets, *rest)

    patch.setattr(TransferEngine, "submit", submit)


@mutant_of_replicas
def ranks_that_hold_other_heads_share_a_pool(patch: pytest.MonkeyPatch) -> None:
    original = connector.replica_shape

    def all_of_a_stage(vllm_config: Any, kv_cache_config: Any) -> Shape:
        shape = original(vllm_config, kv_cache_config)
        return shape._replace(tensor=vllm_config.parallel_config.tensor_parallel_size)

    patch.setattr(connector, "replica_shape", all_of_a_stage)


_TO_CHECKPOINT = "offload.scheduler.hits:Hits._tokens_to_checkpoint"


@mutant_of_model("states")
def all_tokens_of_a_request_are_offered(patch: pytest.MonkeyPatch) -> None:
    """Its last one is computed once more, on a state that has it already."""
    Edit(_TO_CHECKPOINT, "(request.num_tokens - 1) // size", "request.num_tokens // size").apply(patch)


@mutant_of_model("window")
def offers_end_within_a_position(patch: pytest.MonkeyPatch) -> None:
    Edit(_TO_CHECKPOINT, "depth * size - num_local", "depth * size + size // 2 - num_local").apply(patch)


@mutant_of_model("window")
def blocks_of_a_bag_are_taken_in_order_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """And not by their positions: the first one loaded gets the first one stored."""
    function = "offload.scheduler.hits:Hits.pairs"
    Edit(function, "bag[entries.start : entries.stop]", "bag[: len(entries)]").apply(patch)


@mutant_of_model("window")
def a_checkpoint_outlives_its_bag(patch: pytest.MonkeyPatch) -> None:
    """Its slots are another's, and it is still found."""

    def give_bag(self: Room, checkpoint: Checkpoint) -> None:
        self._tree.checkpoints._unfile(checkpoint)
        if checkpoint.state is BagState.COMPLETE:
            self._pool.move(checkpoint.slots, SlotState.BAGGED, SlotState.FREE)
            checkpoint.slots = checkpoint.slots.copy()

    patch.setattr(Room, "_give_bag", give_bag)


@mutant_of_model("window")
def bags_are_stored_one_step_late(patch: pytest.MonkeyPatch) -> None:
    """When windows have gone on, and their blocks may be another's."""
    take, bag = Checkpoints.take, Checkpoints._bag
    last: dict[int, list[tuple[Any, Candidate, GpuBlocks]]] = {}
    blocks_of: dict[tuple[int, str, int], GpuBlocks] = {}

    def take_late(self: Checkpoints) -> list[tuple[Any, Candidate]]:
        passing = last.get(id(self), [])
        last[id(self)] = [(pending, each, bag(self, pending, each)) for pending, each in take(self)]
        for pending, each, blocks in passing:
            blocks_of[id(self), pending.request_id, each.depth] = blocks
        return [(late, each) for late, each, _ in passing if any(self._engine.tables(late.request_id))]

    def bag_of_then(self: Checkpoints, pending: Any, candidate: Candidate) -> GpuBlocks:
        key = (id(self), pending.request_id, candidate.depth)
        return blocks_of[key] if key in blocks_of else bag(self, pending, candidate)

    patch.setattr(Checkpoints, "take", take_late)
    patch.setattr(Checkpoints, "_bag", bag_of_then)


@mutant_of_model("states")
def a_state_is_stored_wherever_a_step_ends(patch: pytest.MonkeyPatch) -> None:
    """Also within a position, as if it stood at its end."""
    original = Groups.bag

    def bag(self: Groups, tables: Sequence[GpuBlocks], depth: int, states: Any, **kwargs: Any) -> GpuBlocks:
        last = [
            [block for block in table if block.block_id != HOLE][-1:] if group.kind is Kind.STATE else table
            for table, group in zip(tables, self._groups, strict=True)
        ]
        if all(group.kind is Kind.STATE for group in self._groups):
            return [block for table in last for block in table]
        return original(self, tables, depth, states, **kwargs)

    Edit(
        "offload.scheduler.checkpoints:candidates", "num_tokens in (tokens.start, tokens.stop)", "True"
    ).apply(patch)
    patch.setattr(Groups, "bag", bag)


@mutant_of_model("mixed")
def positions_have_the_hashes_of_smaller_blocks(patch: pytest.MonkeyPatch) -> None:
    """Of the first blocks of a request, where there are more than one to a position."""
    patch.setattr(VllmEngine, "chain", lambda self, request: request.block_hashes)


@mutant_of_model("chunked")
def a_chunk_is_taken_to_be_half_a_chunk(patch: pytest.MonkeyPatch) -> None:
    function = "offload.scheduler.groups:Group.needed"
    Edit(function, "num_tokens // self.span * self.span", "max(num_tokens - self.span // 2, 0)").apply(patch)


@mutant_of_model("window")
def windows_end_a_block_early(patch: pytest.MonkeyPatch) -> None:
    function = "offload.scheduler.groups:Group.needed"
    Edit(function, "num_tokens - self.span, 0", "num_tokens - self.span + self.block_size, 0").apply(patch)


@mutant_of_model("window")
def wrong_bags_stay_in_the_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuOffloadingBlockAllocator, "drop_bag", lambda self, chain, depth: None)


@mutant_of_model("mamba")
def bags_are_given_back_while_loads_read_them(patch: pytest.MonkeyPatch) -> None:
    def give_back_bag(pool: SlotPool, checkpoint: Checkpoint, pins: Any = ()) -> None:
        original(pool, checkpoint)

    original = room.give_back_bag
    patch.setattr(room, "give_back_bag", give_back_bag)
