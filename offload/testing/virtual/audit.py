"""What must hold after every step and at the end, of the connector, the scheduler and every slot."""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from allocator.bags import BagState, Checkpoint
from allocator.node import Node
from allocator.slot_pool import flat
from offload.messages import GPU, LOAD, POOL, JobReport, Order
from offload.scheduler.flow import Job
from offload.scheduler.restore import LoadPart
from offload.testing.virtual.groups import FULL, STATE
from offload.testing.virtual.history import WrongBytesError
from offload.testing.virtual.inputs import Inputs, generation_of
from offload.testing.virtual.scheduler_audit import SchedulerAudit
from offload.testing.virtual.tags import Words
from offload.vllm.wire import PlanEnvelope, ReportEnvelope

if TYPE_CHECKING:
    from offload.testing.virtual.engine import VirtualEngine

_POOL_EVERY = 8
"""Steps between two looks at the bytes of the whole pool."""

_FEW_BLOCKS = 64
"""In a GPU cache of no more, all references are counted in every step."""


class _FailedBlock(NamedTuple):
    """What a load was to bring, and did not: the block of that prefix hash, from that slot."""

    prefix_hash: bytes
    slot: int


class Audit(SchedulerAudit):
    """Watches one engine with our connector."""

    def __init__(self, engine: "VirtualEngine") -> None:
        super().__init__(engine)
        self._requests: dict[str, Request] = {}
        self._tags: dict[bytes, Words] = {}
        self._inputs: dict[bytes, Inputs] = {}
        self._load_epochs: dict[int, int] = {}
        self._load_slots: dict[int, list[tuple[int, int]]] = {}  # and who had filled them
        self._filled_by: dict[int, int] = {}
        filled_by = engine.side.restores._common.filled_by
        self._slot_epochs = dict.fromkeys(np.flatnonzero(filled_by >= 0).tolist(), self.pool_epoch)
        self._failed: list[_FailedBlock] = []
        self._cancelled: set[int] = set()
        self._refused: str | None = None

    def remember(self, before: SchedulerAudit) -> None:
        """What requests of an earlier engine over the same pool have told."""
        assert isinstance(before, Audit)
        before._learn()
        self._tags |= before._tags
        self._inputs |= before._inputs

    def follow(self, request: Request) -> None:
        """Remember the request, whose prefix hashes name what slots should hold."""
        super().follow(request)
        self._requests[request.request_id] = request

    def see_plan(self, envelope: PlanEnvelope) -> None:
        """The scheduler side has spoken: nothing stored before a reset may be loaded after it."""
        plan = envelope.plan
        if plan is not None:
            self._cancelled.update(plan.cancelled)
        for order in () if plan is None else plan.orders:
            self._engine.history.order(order)
            if order.route.target == POOL:
                self._slot_epochs.update(dict.fromkeys(order.targets.tolist(), self.pool_epoch))
                for job_id, start, stop in order.parts:
                    self._filled_by.update(dict.fromkeys(order.targets[start:stop].tolist(), job_id))
            if order.route.source == POOL:
                self._load_epochs.update((part.job_id, self.pool_epoch) for part in order.parts)
                for part in order.parts:
                    slots = order.sources[part.start : part.stop].tolist()
                    self._load_slots[part.job_id] = [(slot, self._filled_by.get(slot, -1)) for slot in slots]
                self._check_epochs(order)
            if order.route == LOAD:
                self._engine.counts["loads"] += 1
                follows = any(restore.follows for restore in self._engine.side.restores)
                self._engine.counts["loads while some follow"] += follows
        self._check_refused()

    def _check_refused(self) -> None:
        """Nobody goes without a restore for another reason than blocks that the scheduler does not give."""
        engine = self._engine
        before, self._refused = self._refused, engine.side.restores._waiting.refused
        if self._refused not in (None, before):
            num_kept = engine.scheduler._inflight_prefill_reserved_blocks()
            assert num_kept or engine.side.ledger.num_given_up, (
                f"{self._refused} is refused restores, and the scheduler keeps no blocks back"
            )

    def _check_epochs(self, order: Order) -> None:
        for slot in order.sources.tolist():
            if self._slot_epochs.get(slot) != self.pool_epoch:
                raise WrongBytesError(
                    f"{order.parts} read slot {slot}, filled before the pool was reset\n"
                    f"{self._engine.history.of_slot(slot)}"
                )

    def see_report(self, output: KVConnectorOutput | None, pool_epoch: int) -> None:
        """Workers have spoken, in a step planned at ``pool_epoch``: loads from before it are void."""
        envelope = output.kv_connector_worker_meta if output is not None else None
        if not isinstance(envelope, ReportEnvelope):
            return
        report = envelope.report
        jobs = {job.job_id: job for job in self._engine.side.ledger}
        for job_id, ended in report.jobs.items():
            job = jobs.get(job_id)
            if ended.num_good and self._load_epochs.get(job_id, pool_epoch) < pool_epoch:
                raise WrongBytesError(f"job {job_id} loads what was stored before the pool was reset")
            if job is not None:
                block_ids = [block.block_id for block in job.blocks]
                if job.flow.route == LOAD:
                    self._see_failed(job, ended)
                    block_ids = job.task.restore.block_ids[job.task.start : job.task.stop].tolist()
                self._engine.history.blocks(block_ids, f"job {job_id}: {ended}")
                if self.explain_failures:
                    self._check_cause(job, ended)
            self._engine.counts["given up"] += ended.given_up

    def after_step(self) -> None:
        """Cheap checks always, the whole pool's bytes now and then."""
        self._engine.side.check_invariants()
        for rank in self._engine.ranks:
            if rank.side is not None:
                rank.side.check_invariants()
        self._check_failed_slots()
        self._check_pinned_slots()
        self._check_references()
        if self._engine.num_steps % _POOL_EVERY == 0:
            self.check_pool()

    def _check_references(self) -> None:
        """Every reference to a GPU block is a request's, a job's, or the queue's."""
        engine, manager = self._engine, self._engine.scheduler.kv_cache_manager
        if engine.settings.gpu_blocks > _FEW_BLOCKS and engine.num_steps % _POOL_EVERY:
            return
        owners = Counter[int]()
        for group in manager.coordinator.single_type_managers:
            for table in group.req_to_blocks.values():
                owners.update(block.block_id for block in table)
        for _, blocks in engine.scheduler.deferred_frees:
            owners.update(block.block_id for block in blocks)
        for job in engine.jobs:
            owners.update(block.block_id for block in job.blocks)
        owners.update(block.block_id for block in engine.side.stores.backlog.queued_blocks())
        for block in manager.block_pool.blocks:
            num_owners = owners[block.block_id]
            assert block.is_null or block.ref_cnt == num_owners, (
                f"GPU block {block.block_id} has {block.ref_cnt} references and {num_owners} owners\n"
                f"{engine.history.of_block(block.block_id)}"
            )

    def check_pool(self) -> None:
        """Every resident slot holds, on every rank, what its prefix hash says."""
        tree = self._engine.side.allocator._tree
        for node in tree.nodes():
            if node.resident:
                self._check_segment(node)

    def check_at_rest(self) -> None:
        """The engine has gone to sleep, and nobody waits for what is in flight but its memory."""
        scheduler = self._engine.scheduler
        assert not scheduler.requests, f"requests left: {list(scheduler.requests)}"
        waited_for = [job for job in self._engine.jobs if not job.given_up]
        assert not waited_for, f"jobs left: {waited_for}"
        queued = self._engine.side.stores.backlog.num_queued
        assert not queued, f"{queued} blocks are held for requests that are over"

    def check_drained(self) -> None:
        """Everybody has let go of everything."""
        side = self._engine.side
        side.check_invariants()
        left = side.left_over()
        assert not left, f"left over: {left}"
        allocator = side.allocator
        num_settled = allocator.num_free + allocator.num_resident + allocator.num_bagged
        assert num_settled + allocator.resizing.num_withdrawn == allocator.num_slots, (
            f"{allocator.num_filling} slots filling, {allocator.num_leaving} leaving with no job in flight"
        )
        open_ended = [node for node in allocator._tree.nodes() if node.bags is not None and node.bags.is_open]
        assert not open_ended, f"more is to come behind {open_ended}, and nobody stores anything"
        super().check_drained()
        self.check_pool()

    def _check_cause(self, job: Job[Any], ended: JobReport) -> None:
        """No job fails of itself: it would mean that a check below has hidden a fault of ours."""
        engine = self._engine
        tier = engine.settings.tier
        done_to_it = engine.counts["rot"] or any(copier.num_faults for copier in engine.copiers)
        done_to_it = done_to_it or (tier is not None and tier.num_faults > 0)
        region = engine.settings.region
        done_to_it = done_to_it or (region is not None and region.is_disturbed)
        network = engine.settings.network
        done_to_it = done_to_it or (network is not None and network.is_disturbed)
        unwanted = ended.given_up or job.given_up or job.job_id in self._cancelled
        follows = job.flow.route == LOAD and job.task.restore.follows
        may_lack = follows or job.flow.route.source not in (GPU, POOL)  # what others have evicted, or keep
        is_lost = follows and job.task.restore.is_lost  # what it followed was not whole on another rank
        unwanted = unwanted or (may_lack and (ended.is_sound or is_lost))
        if ended.num_good < job.num_blocks and not (done_to_it or unwanted):
            raise WrongBytesError(f"job {job.job_id} failed though nothing was done to it: {ended}")

    def _see_failed(self, job: Job[LoadPart], ended: JobReport) -> None:
        restore, start, _ = job.task
        read = list(enumerate(self._load_slots[job.job_id], start))
        for index, (slot, filled_by) in read[ended.num_good :]:
            if self._filled_by.get(slot, -1) != filled_by:
                continue  # it followed a fetch that failed, and another job has the slot now
            position = restore.position_of(index)
            self._failed.append(_FailedBlock(restore.chain[-1 if position is None else position], slot))

    def _check_failed_slots(self) -> None:
        """Slots that just failed a load serve nobody.

        A slot may have failed because another chain has it, which may go on using it. Those that are yet to
        be dropped are looked at later; until then nobody is offered any. So are those that other ranks are
        still filling.
        """
        carryover = self._engine.side.restores.carryover
        drop_bag = carryover._allocator.drop_bag
        waiting = {each for drop, chain, at in carryover._drops for each in chain[at - (drop == drop_bag) :]}
        ledger = self._engine.side.ledger
        late = [
            block
            for block in self._failed
            if block.prefix_hash in waiting or self._filled_by.get(block.slot, -1) in ledger
        ]
        self._failed = [block for block in self._failed if block not in late]
        if self._failed:
            nodes = list(self._engine.side.allocator._tree.nodes())
            served = {
                _FailedBlock(prefix_hash, slot)
                for node in nodes
                for prefix_hash, row in zip(node.hashes, node.slots[: node.resident].tolist(), strict=False)
                for slot in row
            } | {
                _FailedBlock(node.hashes[each.depth - node.start - 1], slot)
                for node in nodes
                for each in complete_bags(node)
                for slot in each.slots.tolist()
            }
            resident = sorted(block.slot for block in served.intersection(self._failed))
            assert not resident, (
                f"slots {resident} failed a load and are still resident\n"
                f"{self._engine.history.of_slot(resident[0])}"
            )
        self._failed = late

    def _check_pinned_slots(self) -> None:
        """What a load reads cannot be evicted."""
        allocator = self._engine.side.allocator
        pinned = {slot for pin in allocator._pins for slot in flat(pin.slots).tolist()}
        for node in allocator._tree.nodes() if pinned else ():
            if node.is_evictable:
                loose = pinned.intersection(flat(node.slots).tolist())
                assert not loose, f"slots {sorted(loose)} are pinned, and {node!r} may be evicted"

    def _check_segment(self, node: Node) -> None:
        """All columns of its resident positions, and its bags."""
        settings = self._engine.settings
        tags = np.concatenate([self._tags_of(each) for each in node.hashes[: node.resident]])
        rows = tags.reshape(-1, settings.block_tokens)
        column = 0
        for number, group in enumerate(settings.cache_groups):
            size = group.tokens_of_block(settings.dcp)
            for offset in range(0, settings.block_tokens if group.kind == FULL else 0, size):
                slots = node.slots[: node.resident, column]
                has_slot = slots >= 0  # what is hollow is on the GPU only
                part = rows[has_slot, offset : offset + size]
                self._check_slots(node, slots[has_slot].tolist(), number, part)
                column += 1
        for checkpoint in complete_bags(node):
            self._check_bag(node, checkpoint)

    def _check_bag(self, node: Node, checkpoint: Checkpoint) -> None:
        """What windows and states need at its depth."""
        tags = self._tags_up_to(node, checkpoint.depth)
        at = 0
        for number, group in enumerate(self._engine.settings.cache_groups):
            if group.kind == FULL:
                continue
            size = group.block_size
            first = group.first_read(len(tags)) // size
            rows = tags[first * size :].reshape(-1, size)
            slots = checkpoint.slots[at : at + len(rows)].tolist()
            self._check_slots(node, slots, number, rows[:, -1:] if group.kind == STATE else rows)
            at += len(rows)
        assert at == len(checkpoint.slots), f"{checkpoint!r} has slots for nothing, {at} are needed"

    def _check_slots(self, node: Node, slots: list[int], number: int, rows: Words) -> None:
        """Slots hold blocks of a group with these tags, ``uint64[slots, places]``."""
        if not slots:
            return
        engine = self._engine
        generation = engine.generation + generation_of(self._inputs[node.hashes[0]], engine.adapters)
        for index, rank in enumerate(engine.ranks):
            cells = rank.groups[number]
            held = np.concatenate([rank.slot_words(slot, number)[:, :, 0] for slot in slots], axis=1)
            num_layers = len(cells.cells)
            tags = rows.reshape(-1)
            wrong = (held[:num_layers] != cells.expected(tags[cells.own], generation)).any(axis=0)
            for layer, reach in enumerate(engine.settings.draft_reaches):
                drafted = rank.drafted(held[num_layers + layer], layer, generation)
                wrong[engine.runner.drafter.wrong_positions(drafted, tags, reach, generation)] = True
            places = len(wrong) // len(slots)
            if rotten := rank.rotten_slots():  # on purpose; it is up to the loads to find out
                wrong &= ~np.repeat(np.isin(slots, list(rotten)), places)
            if wrong.any():
                slot = slots[int(np.flatnonzero(wrong)[0]) // places]
                raise WrongBytesError(
                    f"rank {index}: slot {slot} of {node!r} is resident with wrong bytes for group {number}\n"
                    f"{engine.history.of_slot(slot)}"
                )

    def _tags_up_to(self, node: Node, depth: int) -> Words:
        """Of all tokens of the first ``depth`` positions of its chain."""
        hashes: list[bytes] = []
        at: Node | None = node
        while at is not None:
            hashes = [*at.hashes, *hashes]
            at = at.parent
        return np.concatenate([self._tags_of(each) for each in hashes[:depth]])

    def _tags_of(self, prefix_hash: bytes) -> Words:
        tags = self._tags.get(prefix_hash)
        if tags is None:
            self._learn()
            tags = self._tags[prefix_hash]
        return tags

    def _learn(self) -> None:
        """Take in the prefix hashes that requests have gained."""
        size = self._engine.settings.block_tokens
        chain_of = self._engine.side._engine.chain
        for req_id, request in list(self._requests.items()):
            hashes = chain_of(request)
            if hashes and hashes[-1] not in self._tags:
                inputs = Inputs.of(request)
                chain = inputs.chain()
                chain.extend(request.all_token_ids[: len(hashes) * size])
                for index, prefix_hash in enumerate(hashes):
                    self._tags.setdefault(prefix_hash, chain.tags[index * size : (index + 1) * size])
                    self._inputs[prefix_hash] = inputs
            if request.is_finished():
                del self._requests[req_id]


def complete_bags(node: Node) -> list[Checkpoint]:
    """Checkpoints of a segment that can serve a load."""
    return [each for each in node.bags or () if each.state is BagState.COMPLETE]
