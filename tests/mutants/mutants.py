"""The list of mutants: each is to be noticed by more than one test, or by an invariant."""

from itertools import groupby

from tests.mutants.edits import Edit

_ALLOCATOR = "allocator.block_allocator:CpuOffloadingBlockAllocator"
_TREE = "allocator.prefix_tree:PrefixTree"
_INDEX = "allocator.index:PositionIndex"
_STORES = "allocator.store_plans:StorePlans"
_RANKING = "allocator.ranking:Ranking"
_POOL = "allocator.slot_pool:SlotPool"
_PLANS = "allocator.in_flight:PlansInFlight"
_CALLER = "evictor.caller:Caller"
_HINTED = "evictor.hinted:HintedPolicy"
_HAZARD = "evictor.hazard:HazardPolicy"
_RANKED = "evictor.ranked:RankedPolicy"
_CLAIMS = "evictor.hints:Claims"
_EVENTS = "allocator.events:EventLog"
_LEDGER = "offload.scheduler.jobs:JobLedger"
_JOBS_OF_STORES = "offload.scheduler.stores:Stores"
_HOLDS = "offload.scheduler.holds:Holds"
_RESTORES = "offload.scheduler.restores:Restores"
_TRANSFER = "offload.worker.transfer:TransferEngine"
_SEALS = "offload.worker.seals:Seals"
_REUSE = "offload.scheduler.answers:AnswerReuse"

_ROWS = [
    # area, function, old text, new text
    ("allocator", f"{_TREE}._split_off_tail", "tail.pins, node.pins = node.pins, NO_PINS", "pass"),
    ("allocator", f"{_TREE}._split_off_tail", "pin.node = tail", "pass"),
    ("allocator", f"{_TREE}._split_off_tail", "child.parent = tail", "pass"),
    ("allocator", f"{_TREE}._split_off_tail", "tail.resident = part.resident", "pass"),
    ("allocator", f"{_TREE}._split_off_head", "min(node.resident, size)", "size"),
    ("allocator", f"{_TREE}._split_off_head", "self._index.point_all(head)", "pass"),
    ("allocator", f"{_TREE}._split_off_head", "self._index.point_first(node)", "pass"),
    ("allocator", f"{_TREE}.append", "self._index.point(hashes, depth, node)", "pass"),
    ("allocator", f"{_TREE}.settle", "node.resident = len(node)", "pass"),
    ("allocator", f"{_TREE}.trim", "pin.kept = max(0, node.end - pin.start)", "pass"),
    ("allocator", f"{_TREE}.join", "pin.node = heir", "pass"),
    ("allocator", f"{_INDEX}.find", "depth == size or chain[depth] == after", "True"),
    ("allocator", f"{_INDEX}.lead", "max(start - 1, 0)", "start"),
    ("allocator", f"{_ALLOCATOR}.plan_store", "self._ranking.refresh(node)", "pass"),
    ("allocator", f"{_STORES}.commit", "if self.end_orphan(plan):\n        return None", "pass"),
    ("allocator", f"{_ALLOCATOR}.drop", "node.start + node.resident > position", "True"),
    ("allocator", f"{_ALLOCATOR}.unpin", "self._pool.end_read(flat(pin.slots[pin.kept :]))", "pass"),
    ("allocator", f"{_INDEX}.remove", "if self._table.has_dead", "if False"),
    ("allocator", f"{_INDEX}.begin_anew", "self.forget_border()", "pass"),
    ("allocator", f"{_INDEX}._descend", "child.parent is not node or", ""),
    ("allocator", f"{_INDEX}._descend", "or child.is_dead", ""),
    ("allocator", f"{_RANKING}._may_join", "and not path[stop].pins", ""),
    ("allocator", f"{_RANKING}.join_more", "and not self._tree.is_dead(node)", ""),
    ("allocator", f"{_CALLER}._after_end", "and heir is not growing", ""),
    ("allocator", f"{_CALLER}.after_split", "self.refresh(new)", "pass"),
    ("allocator", f"{_CALLER}._after_end", "self._policy.forget(node)", "pass"),
    (
        "allocator",
        f"{_EVENTS}.record",
        "self._after_cuts[-1] if self._after_cuts else self._events",
        "self._events",
    ),
    ("allocator", f"{_EVENTS}.take_away", "self.end_cuts(num_cuts)", "pass"),
    ("allocator", f"{_POOL}.end_read", "self._num_readers[slots] -= 1", "self._num_readers[slots] = 0"),
    ("allocator", f"{_POOL}.move", "self.num_free += num_slots", "pass"),
    ("evictor", f"{_HINTED}.heed", "mark.stamp, mark.last_use = stamp, now", "mark.last_use = now"),
    ("evictor", f"{_HINTED}.heed", "num_fixed += len(node)", "pass"),
    ("evictor", f"{_HINTED}.inherit", "mark.stamp, mark.last_use)", "next(self._stamps), mark.last_use)"),
    ("evictor", f"{_HINTED}.evicted", "self._file(leaf, mark)", "pass"),
    ("evictor", f"{_HINTED}.forget", "self._num_marks -= 1", "pass"),
    ("evictor", f"{_HAZARD}.choose", "newcomer.rank < value", "newcomer.rank <= value"),
    ("evictor", f"{_HINTED}.heed", "self._expire(now)", "pass"),
    ("evictor", f"{_HINTED}.choose_for", "state <= min(worth, Worth.LOW)", "state < min(worth, Worth.LOW)"),
    ("evictor", f"{_HINTED}.dropped", "self._file(node, mark)", "pass"),
    ("evictor", f"{_HINTED}._raise", "claims = before | asking", "claims = asking"),
    ("evictor", f"{_CLAIMS}.of", "hints.worth >= each", "hints.worth > each"),
    ("evictor", f"{_CLAIMS}.at", "last_use + self.ttl > now", "True"),
    ("evictor", f"{_CLAIMS}.__or__", "max(self.normal, other.normal)", "self.normal"),
    ("evictor", f"{_CLAIMS}.__or__", "max(self.high, other.high)", "other.high"),
    ("evictor", f"{_CLAIMS}.unprotected", "Claims(self.low, self.normal, 0.0)", "self.not_high"),
    ("evictor", f"{_RANKED}.enter", "if known.key is None", "if True"),
    ("evictor", f"{_RANKED}._rank", "self.leave(node)", "pass"),
    ("scheduler", f"{_HOLDS}.release_held", "self._engine.release(reversed(job.blocks))", "pass"),
    ("scheduler", f"{_HOLDS}.finish", "self._num_left += pending.num_in_flight", "pass"),
    (
        "scheduler",
        f"{_HOLDS}.give_up",
        "self.release(self._backlog.give_up(num_blocks), why)",
        "self._backlog.give_up(num_blocks)",
    ),
    ("scheduler", f"{_JOBS_OF_STORES}.advance", "self._ledger.take_held(job)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}.finish", "self._engine.hold(blocks)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}._open", "self._engine.hold(blocks)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}._begin", "self.filled_by[slots] = job.job_id", "pass"),
    ("scheduler", f"{_RESTORES}._end", "self.carryover.unpin(restore.pin)", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._engine.release(reversed(job.blocks))", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._engine.hold(job.blocks)", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._index.remove(restore)", "pass"),
    ("scheduler", f"{_RESTORES}.cancel", "self._index.remove(restore)", "pass"),
    ("scheduler", f"{_RESTORES}.open", "self._is_filling[block_ids] = True", "pass"),
    ("scheduler", f"{_RESTORES}.still_waits", "not (is_awaited or self._has_landed(restore))", "False"),
    ("scheduler", f"{_RESTORES}.went_on", "self._landed.pop(request_id, None)", "pass"),
    ("scheduler", f"{_RESTORES}.forget", "self._followed.pop(request_id, None)", "pass"),
    ("ledger", f"{_LEDGER}.open_store", "self.num_held_blocks += len(blocks)", "pass"),
    ("ledger", f"{_LEDGER}.take_held", "self.num_held_blocks -= len(blocks)", "pass"),
    ("ledger", f"{_LEDGER}.take_held", "job.blocks, []", "job.blocks, job.blocks"),
    ("ledger", f"{_LEDGER}.open_load", "restore.parts_left += 1", "pass"),
    ("ledger", f"{_LEDGER}.report", "min(job.num_copied, num_copied)", "num_copied"),
    ("ledger", f"{_LEDGER}.report", "num_copied < job.num_copied", "num_copied < job.num_blocks"),
    ("ledger", f"{_LEDGER}.report", "given_up and not job.given_up", "given_up"),
    ("ledger", f"{_LEDGER}.report", "job.given_up |= given_up", "job.given_up = given_up"),
    ("ledger", f"{_LEDGER}.report", "job.ranks_left -= num_ranks", "job.ranks_left -= 1"),
    ("ledger", f"{_LEDGER}.report", "job.ranks_left <= 0", "job.ranks_left <= 1"),
    ("ledger", f"{_LEDGER}.report", "self.num_given_up -= job.given_up", "pass"),
    ("ledger", f"{_LEDGER}.report", "self.num_held_blocks -= len(job.blocks)", "pass"),
    ("ledger", "offload.scheduler.jobs:Restore.end_part", "self.parts_left -= 1", "pass"),
    (
        "amounts",
        "offload.scheduler.amounts:storable_blocks",
        "min(min(num_computed, num_tokens)",
        "min(num_computed",
    ),
    (
        "amounts",
        "offload.scheduler.amounts:storable_blocks_at_finish",
        "num_computed - num_unconfirmed",
        "num_computed",
    ),
    ("amounts", "offload.scheduler.amounts:storable_blocks_at_finish", "num_tokens - 1", "num_tokens"),
    ("amounts", "offload.scheduler.amounts:loadable_tokens", " - num_local, 0)", ", 0)"),
    ("amounts", "offload.scheduler.amounts:loadable_tokens", "(num_local + most)", "most"),
    ("amounts", "offload.scheduler.amounts:load_range", "range(num_local // block_size", "range(0"),
    ("amounts", "offload.scheduler.amounts:load_parts", "2 * stops[-1]", "stops[-1] + first_part"),
    ("amounts", "offload.scheduler.amounts:tokens_to_next_look", "num_seen + run", "num_seen + run + 1"),
    ("amounts", "offload.scheduler.amounts:may_load", "num_stuck + num_blocks <=", "num_blocks <="),
    ("hints", "offload.scheduler.hints:_is_duration", "0 < value", "0 <= value"),
    ("hints", "offload.scheduler.hints:_is_duration", "not isinstance(value, bool) and", ""),
    ("hints", "offload.scheduler.hints:_is_count", "type(value) is int and", ""),
    ("hints", "offload.scheduler.hints:RequestHints.may_load", ">= block_size", "> block_size"),
    ("hints", "offload.scheduler.hints:_read_keys", "if name not in accepted else _ABSENT", ""),
    ("hints", "offload.scheduler.hints:_read_keys", "source.has_no_booleans and", ""),
    ("hints", "offload.scheduler.client_values:warn_once", '_warned.add(f"{source}: {kind}")', "pass"),
    ("hints", "offload.scheduler.kv_hints:_wishes_of", 'version.startswith("1.")', 'version.startswith("1")'),
    ("hints", "offload.scheduler.kv_hints:_wishes_of", "len(payload) > num_known", "False"),
    ("hints", "offload.scheduler.kv_hints:wishes", "actions[:MAX_ACTIONS]", "actions"),
    ("hints", "offload.scheduler.hints:RequestHints.to_keep", "now + self.pin_seconds", "self.pin_seconds"),
    ("hints", "offload.scheduler.hints:_is_priority", "value in tuple(_PRIORITIES)", "True"),
    ("seals", f"{_SEALS}.unseal", "self._fills[slots] = _BROKEN", "pass"),
    ("seals", f"{_SEALS}._intact", "self._sums[slots]", "self._sums[block_ids]"),
    ("seals", f"{_SEALS}.num_intact", "self._num_samples += 1", "pass"),
    ("seals", f"{_SEALS}.num_intact", ".all()", ".any()"),
    ("seals", f"{_SEALS}._checksums", "if self.of_blocks", "if not self.of_blocks"),
    ("seals", "offload.worker.seals:_num_leading", "int(good.argmin())", "int(good.sum())"),
    ("seals", f"{_TRANSFER}.store", "self._seals.unseal(slots)", "pass"),
    ("seals", f"{_TRANSFER}.load", "self._check(job, job.num_wanted)", "pass"),
    ("seals", f"{_TRANSFER}._submit", "self._seals.num_current(slots, fills)", "len(slots)"),
    ("seals", f"{_TRANSFER}._after_copy", "self._seals.num_current(job.slots, job.fills)", "job.num_current"),
    ("seals", f"{_TRANSFER}._after_copy", "and num_blocks == len(job.slots)", ""),
    ("seals", f"{_TRANSFER}._after_copy", "job.is_given_up or job.is_cancelled", "job.is_cancelled"),
    ("seals", f"{_TRANSFER}._after_copy", "job.is_given_up or job.is_cancelled", "job.is_given_up"),
    ("seals", f"{_TRANSFER}._end_if_checked", "min(num_blocks, job.num_current)", "num_blocks"),
    ("seals", f"{_TRANSFER}._end_if_checked", "num_blocks = num_intact", "pass"),
    ("seals", f"{_TRANSFER}._end_if_checked", "num_blocks < job.num_wanted", "False"),
    ("seals", f"{_TRANSFER}._end", "if job.is_cancelled", "if False"),
    ("seals", f"{_TRANSFER}._give_up_overdue", "job.since <= late", "job.since < late"),
    ("seals", f"{_TRANSFER}._give_up_overdue", "and job.copied is None", ""),
    ("seals", f"{_TRANSFER}._give_up", "self._loads.discard(job_id)", "pass"),
    ("seals", f"{_TRANSFER}._give_up", "is_over=False", "is_over=True"),
    ("seals", f"{_TRANSFER}._begin_copy", "job.since = self._clock()", "pass"),
    ("seals", f"{_TRANSFER}._begin_stores", "self._allowance -= float(job.batch.sizes.sum())", "pass"),
    ("seals", f"{_TRANSFER}._begin_stores", "and now < job.since + HOLD_SECONDS", ""),
    ("seals", f"{_TRANSFER}.cancel", "if job_id in self._held", "if False"),
    ("answers", f"{_REUSE}.arrived", "num_found + 1, num_prompt", "num_found, num_prompt"),
    ("answers", f"{_REUSE}.arrived", "int(stop == num_prompt)", "0"),
    ("answers", f"{_REUSE}.ended", "self._uncounted.append(kind)", "pass"),
    ("answers", f"{_REUSE}._came_back", "self._answers[first] = None", "pass"),
    ("answers", f"{_REUSE}._earn", "account.credit > self._worth", "account.credit > 0"),
    ("answers", f"{_REUSE}._spend", "was_open and not self._all.is_open", "0"),
    ("answers", f"{_REUSE}.are_stored", "or account.proven_at == self._num_closed", ""),
    ("answers", "offload.scheduler.answers:_forget_oldest", "if len(known) > most", "if False"),
]

MUTANTS = {area: [Edit(*row[1:]) for row in rows] for area, rows in groupby(_ROWS, key=lambda row: row[0])}
"""By area."""
