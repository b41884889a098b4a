"""The list of mutants: each is to be noticed by more than one test, or by an invariant."""

from itertools import groupby

from tests.mutants.edits import Edit

_ALLOCATOR = "allocator.block_allocator:CpuOffloadingBlockAllocator"
_TREE = "allocator.prefix_tree:PrefixTree"
_INDEX = "allocator.index:PositionIndex"
_STORES = "allocator.store_plans:StorePlans"
_RANKING = "allocator.ranking:Ranking"
_POOL = "allocator.slot_pool:SlotPool"
_RESIZING = "allocator.resizing:Resizing"
_TO_SIZE = "offload.scheduler.resizing:PoolResizing"
_TARGET = "offload.scheduler.pool_target:PoolTarget"
_PAGES = "offload.worker.pool.memory:HostMemory"
_AT_RANK = "offload.worker.resizing:WorkerResizing"
_PLANS = "allocator.in_flight:PlansInFlight"
_BAGS = "allocator.bags:Bags"
_CHECKPOINTS = "allocator.checkpoints:Checkpoints"
_ROOM = "allocator.room:Room"
_CALLER = "evictor.caller:Caller"
_HINTED = "evictor.hinted:HintedPolicy"
_HAZARD = "evictor.hazard:HazardPolicy"
_STATISTICS = "evictor.reuse:ReuseStatistics"
_RANKED = "evictor.ranked:RankedPolicy"
_CLAIMS = "evictor.hints:Claims"
_EVENTS = "allocator.events:EventLog"
_LEDGER = "offload.scheduler.jobs:JobLedger"
_JOBS_OF_STORES = "offload.scheduler.stores:Stores"
_HOLDS = "offload.scheduler.holds:Holds"
_LATER = "offload.scheduler.later:Later"
_RESTORES = "offload.scheduler.restores:Restores"
_ALLOWANCE = "offload.worker.allowance:Allowance"
_TRANSFER = "offload.worker.transfer:TransferEngine"
_JOB = "offload.worker.jobs:TransferJob"
_ELSEWHERE = "offload.worker.elsewhere:Elsewhere"
_SEALS = "offload.worker.seals:Seals"
_REUSE = "offload.scheduler.answers:AnswerReuse"
_TURNS = "offload.scheduler.turns:Turns"
_GROUP = "offload.scheduler.groups:Group"
_GROUPS = "offload.scheduler.groups:Groups"
_ARRIVALS = "offload.scheduler.arrivals:Arrivals"
_CANDIDATES = "offload.scheduler.checkpoints:candidates"
_PASSED = "offload.scheduler.checkpoints:Checkpoints"
_HITS = "offload.scheduler.hits:Hits"
_TOKENS = "offload.scheduler.spelling:SlotTokens"
_SPELLING = "offload.scheduler.spelling:Spelling"
_STREAM = "offload.vllm.kv_events:KvEventStream"
_BAG_BLOCKS = "offload.vllm.kv_events:_BagBlocks"
_WAITING = "offload.scheduler.waiting:Waiting"
_INDEX_OF_EVENTS = "offload.proxy.kv_index:EngineIndex"
_STREAM_OF_EVENTS = "offload.proxy.kv_streams:_Stream"
_CHOOSE = "offload.scheduler.choice:choose"
_CHOICES = "offload.scheduler.choices:Choices"
_PREFILL = "offload.scheduler.costs:PrefillCost"
_GPU_QUEUE = "offload.scheduler.queues:GpuQueue"
_LINK_QUEUE = "offload.scheduler.queues:LinkQueue"

_ABSENCE = "offload.scheduler.why.absence:Absence"
_NOTES = "offload.scheduler.why.notes:Notes"
_PROMPTS = "offload.scheduler.why.prompts:Prompts"
_DEPARTURES = "allocator.departures:Departures"

_ROWS = [
    # area, function, old text, new text
    ("why", f"{_ABSENCE}._why_absent", "len(neighbour.chain) > position", "True"),
    ("why", f"{_DEPARTURES}.note", "Cause.SHRUNK if self._is_shrinking", "Cause.SHRUNK if False"),
    ("why", f"{_DEPARTURES}.shrinking", "self._is_shrinking = False", "pass"),
    ("why", f"{_ABSENCE}._why_lost", "if first <= position", "if False"),
    ("why", f"{_ABSENCE}._why", "if known > position", "if known >= position"),
    ("why", f"{_NOTES}.restored", "from_pool -= num_fetched", "pass"),
    ("why", f"{_NOTES}.finished", "self.prompts.finish(note)", "pass"),
    ("why", f"{_ABSENCE}._why", "(known > position or self._has_below)", "True"),
    ("why", f"{_PROMPTS}.charge", "or len(self._notes) > self._most_notes", ""),
    ("why", f"{_PROMPTS}.charge", "note.marks.append(mark)", "pass"),
    ("why", f"{_PROMPTS}._forget", "if each is not note", ""),
    ("why", f"{_PROMPTS}._forget", "del self._by_tokens[tokens]", "pass"),
    ("why", f"{_DEPARTURES}.note", "self._by_first.move_to_end(first_hash)", "pass"),
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
    ("allocator", "allocator.planning:Planning._plan", "self._ranking.refresh(node)", "pass"),
    ("allocator", f"{_STORES}.commit", "if self.end_orphan(plan):\n        return None", "pass"),
    ("allocator", f"{_ALLOCATOR}.drop", "node.start + node.resident > position", "True"),
    ("allocator", "allocator.pins:Pins.end", "self._pool.end_read(flat(pin.slots[pin.kept :]))", "pass"),
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
    ("allocator", f"{_POOL}.move", "self.num_free += len(slots)", "pass"),
    ("allocator", f"{_POOL}.move", "slots = slots[~is_closed]", "pass"),
    ("allocator", f"{_POOL}.close", "self._withdraw(free[is_closed])", "pass"),
    ("allocator", f"{_POOL}.open", "self._push(back)", "pass"),
    ("allocator", f"{_RESIZING}._empty", "int(np.argmax(is_closed))", "int(np.argmax(is_closed)) + 1"),
    ("allocator", f"{_RESIZING}._empty", "self._pool.is_closed(checkpoint.slots).any()", "False"),
    ("allocator", f"{_RESIZING}._empty", "node in self._covered or", ""),  # a leased slot is given up
    ("allocator", f"{_RESIZING}._empty", "self._policy.pins(node)", "False"),  # and a pinned one
    ("allocator", "allocator.shedding:Shedding.shed", " or self._pins(node)", ""),
    (
        "allocator",
        f"{_BAGS}.remove",
        "del self._checkpoints[bisect_left(self._checkpoints, checkpoint.depth, key=_depth)]",
        "pass",
    ),
    ("allocator", f"{_BAGS}.last_complete", "self._checkpoints[index].state is BagState.COMPLETE", "True"),
    ("allocator", "allocator.giving_back:give_back_bag", "pin.checkpoint is checkpoint", "False"),
    ("allocator", "allocator.plans:StorePlan.all_slots", "self.bag is None", "True"),
    ("allocator", "allocator.pins:Pins.end", "self._pool.end_read(pin.checkpoint.slots)", "pass"),
    ("allocator", f"{_TREE}.last_checkpoint", "last_complete(depth)", "last_complete(node.end)"),
    ("allocator", f"{_TREE}.last_checkpoint", "found.depth > beyond", "True"),
    ("allocator", f"{_TREE}._split_off_tail", "self.checkpoints.split_tail(node, tail, part.bags)", "pass"),
    ("allocator", f"{_CHECKPOINTS}.split_head", "head.bags = bags or None", "pass"),
    ("allocator", f"{_CHECKPOINTS}.split_head", "self._file_at(head, head.end)", "pass"),
    ("allocator", f"{_CHECKPOINTS}.trimmed", "self._unfile(checkpoint)", "pass"),
    ("allocator", f"{_CHECKPOINTS}.joined", "self._file_at(heir, end)", "pass"),
    ("allocator", f"{_CHECKPOINTS}._is_inner", "and checkpoint.depth < node.end", ""),
    ("allocator", f"{_CHECKPOINTS}.use", "checkpoint.last_use = next(self._clock)", "pass"),
    ("allocator", "allocator.node:Node.is_evictable", "not self.bags.num_filling", "True"),
    ("allocator", f"{_RANKING}.refresh", "self.loose.append(node)", "pass"),
    (
        "allocator",
        f"{_RANKING}.trim_loose",
        "self._tree.num_loose(node), growing",
        "self._tree.num_loose(node), None",
    ),
    ("allocator", f"{_ROOM}._thin_if_many", "> most", "> 0"),
    ("allocator", f"{_ROOM}.may_be_made", "num_slots + in_use", "in_use"),
    ("evictor", f"{_HAZARD}.resized", "self.leave(node)", "pass"),
    ("evictor", f"{_HAZARD}._value_of", "/ 2.0 ** _level_of(newcomer.weight, newcomer.num_positions)", ""),
    ("evictor", f"{_HAZARD}._file_kinds", "value / 2.0**level", "value"),
    ("evictor", f"{_STATISTICS}.value", "value / pace", "value"),
    ("evictor", f"{_STATISTICS}._take_in_news", "in_seconds[places], in_ticks", "in_ticks[places], in_ticks"),
    (
        "evictor",
        f"{_STATISTICS}._take_in_news",
        "_IS_BY_TURN, of_turns, memory",
        "_IS_BY_TURN, memory, memory",
    ),
    ("evictor", f"{_STATISTICS}._at_risk", "_IS_BY_TURN, in_seconds", "_IS_BY_TURN, in_ticks"),
    ("evictor", f"{_HINTED}.resized", "self._make_fit(0, self._clock())", "pass"),
    ("evictor", "evictor.two_queues:TwoQueues.resized", "self._count(node)", "pass"),
    ("evictor", "evictor.arc:ArcPolicy.resized", "self._trim()", "pass"),
    ("evictor", "evictor.ghosts:Ghosts.add", "max(weight, 1) / len(names)", "1"),
    ("evictor", f"{_HINTED}.heed", "mark.stamp, mark.last_use = stamp, now", "mark.last_use = now"),
    ("evictor", f"{_HINTED}.heed", "num_fixed += node.weight", "pass"),
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
    ("holds", f"{_HOLDS}.num_holdable", "copied - self.num_held", "most"),
    ("holds", f"{_HOLDS}.give_way", "is_soon and not self._patience.is_over", "not self._patience.is_over"),
    ("holds", f"{_HOLDS}.end_step", "busy and", "True and"),
    ("holds", f"{_HOLDS}.end_step", "math.ceil(num_late)", "0"),
    ("holds", f"{_HOLDS}._copied_in", "self._link.per_byte * self._slot_bytes", "self._link.per_byte"),
    ("later", f"{_LATER}._take_turn", "self._engine.hold(blocks)", "pass"),
    ("later", f"{_LATER}._take_turn", "self._backlog.end(pending, start, blocks)", "pass"),
    ("later", f"{_LATER}._take_turns", "self._num_due >= window", "False"),
    ("later", f"{_LATER}._take_turns", "self._take_turn(left, is_freed=left.pending is not ended)", "pass"),
    ("later", f"{_LATER}._window", "_STEPS *", ""),
    ("later", f"{_LATER}.has_begun", "self._take_turn(self._line[serial])", "pass"),
    ("later", f"{_LATER}.must_wait", "return True", "return False"),
    (
        "later",
        f"{_LATER}.must_wait",
        "self._allocator.pin(chain, depth - 1, depth) if depth else None",
        "None",
    ),
    ("later", f"{_LATER}.make_room", "self._allocator.leases.end(lease)", "pass"),
    ("later", f"{_LATER}._release", "release_before(blocks, left.blocks[stop - 1])", "release(blocks)"),
    ("later", f"{_LATER}._own", "self._lose(self._find(loser), num)", "pass"),
    ("later", f"{_LATER}._disown", "self._owners[gone] = 0", "pass"),
    ("later", f"{_LATER}._lose", "self._num_due -= num_blocks", "pass"),
    ("later", f"{_LATER}._file_as_due", "self._has_twice.pop(left.serial, None)", "pass"),
    ("later", f"{_LATER}._stop_waiting", "self._unpin(request_id)", "pass"),
    ("later", "offload.scheduler.ended:Ended._open", "if self._later is not None:", "if False:"),
    ("scheduler", f"{_HOLDS}.release_held", "self._free(reversed(blocks), is_late=pending.is_late)", "pass"),
    ("scheduler", f"{_HOLDS}.finish", "self._num_left += pending.num_in_flight", "pass"),
    (
        "scheduler",
        f"{_HOLDS}.give_up",
        "self.release(self._backlog.give_up(num_blocks, why), why)",
        "self._backlog.give_up(num_blocks, why)",
    ),
    ("scheduler", f"{_HOLDS}.release_held", "job.blocks, []", "job.blocks, job.blocks"),
    ("scheduler", f"{_JOBS_OF_STORES}.finish", "self._engine.hold(blocks)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}._copy", "self._engine.hold(blocks)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}._begin", "self._common.filled_by[slots] = job.job_id", "pass"),
    ("scheduler", f"{_RESTORES}._end", "self.carryover.unpin(restore.pin)", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._engine.release(reversed(job.blocks))", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._engine.hold(job.blocks)", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._index.remove(restore)", "pass"),
    ("scheduler", f"{_RESTORES}.drop", "self._index.remove(restore)", "pass"),
    ("scheduler", f"{_RESTORES}.open", "self._is_filling[block_ids] = True", "pass"),
    ("scheduler", f"{_RESTORES}.still_waits", "not (is_awaited or self._has_landed(restore))", "False"),
    ("scheduler", f"{_RESTORES}.went_on", "self._landed.pop(request_id, None)", "pass"),
    ("scheduler", f"{_RESTORES}.finish", "self._followed.pop(request.request_id, None)", "pass"),
    ("scheduler", f"{_JOBS_OF_STORES}._spoil_jobs", "job.num_good = 0", "pass"),
    ("scheduler", f"{_HOLDS}._count_in_flight", "self.num_held += num_blocks", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self._failed.add(restore.request.request_id)", "pass"),
    ("scheduler", f"{_RESTORES}.finish", "self._failed.discard(request.request_id)", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self.num_stuck += job.num_blocks", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "self.num_stuck -= job.num_blocks", "pass"),
    ("scheduler", f"{_RESTORES}.advance", "restore.end_part(start, start + job.num_good)", "pass"),
    ("scheduler", f"{_RESTORES}.open", "restore.parts_left = len(jobs)", "restore.parts_left = 1"),
    ("scheduler", "offload.scheduler.restore:Restore.end_part", "self.parts_left -= 1", "pass"),
    ("hybrid", f"{_GROUP}.needed", "num_tokens - self.span, 0", "num_tokens - self.span + 1, 0"),
    ("hybrid", f"{_GROUP}.needed", "num_tokens // self.span * self.span", "max(num_tokens - self.span, 0)"),
    ("hybrid", f"{_GROUP}.needed", "first = stop - 1", "first = 0"),
    ("hybrid", f"{_GROUP}.most", "self.span - gcd(self.span, self.block_size)", "self.span"),
    ("hybrid", f"{_GROUPS}.prefix", "for offset in range(num)", "for offset in range(num)[:1]"),
    ("hybrid", f"{_GROUPS}.prefix", "positions.stop * num : num", "positions.stop * num"),
    ("hybrid", f"{_GROUPS}.missing", "at += len(needed)", "pass"),
    ("hybrid", f"{_CANDIDATES}", "(num_prompt - 1) // position_tokens}", "num_prompt // position_tokens}"),
    ("hybrid", f"{_CANDIDATES}", "(branch // position_tokens, *ends)", "ends"),
    ("hybrid", f"{_CANDIDATES}", "in (tokens.start, tokens.stop)", "in (tokens.stop,)"),
    ("hybrid", f"{_CANDIDATES}", "in (tokens.start, tokens.stop)", "in (tokens.start,)"),
    ("hybrid", f"{_CANDIDATES}", "is_standing or num_tokens in handed_over", "True"),
    ("hybrid", f"{_CANDIDATES}", "depth not in wanted", "depth in wanted"),
    ("hybrid", f"{_PASSED}.take", "passing, self._passing = self._passing, []", "passing = self._passing"),
    ("hybrid", f"{_HITS}._tokens_to_checkpoint", "depth * size - num_local", "depth * size"),
    ("hybrid", f"{_HITS}._tokens_to_checkpoint", "first + most // size", "most // size"),
    ("hybrid", f"{_HITS}.pairs", "bag[entries.start : entries.stop]", "bag[: len(entries)]"),
    ("hybrid", f"{_HITS}.pairs", "append(ids)", "append(self._engine.ids(table[: len(entries)]))"),
    ("hybrid", f"{_HITS}.retain_known", "known > beyond", "False"),
    ("hybrid", f"{_WAITING}.wait", "self._num_needed += num_needed", "pass"),
    ("hybrid", f"{_WAITING}.went_on", "self._num_needed -= waiter.num_needed", "pass"),
    ("ledger", f"{_LEDGER}.report", "min(job.num_good, num_good)", "num_good"),
    ("ledger", f"{_LEDGER}.report", "num_good < job.num_good", "num_good < job.num_blocks"),
    ("ledger", f"{_LEDGER}.report", "given_up and not job.given_up", "given_up"),
    ("ledger", f"{_LEDGER}.report", "job.given_up |= given_up", "job.given_up = given_up"),
    ("ledger", f"{_LEDGER}.report", "job.ranks_left -= num_ranks", "job.ranks_left -= 1"),
    ("ledger", f"{_LEDGER}.report", "job.ranks_left <= 0", "job.ranks_left <= 1"),
    ("ledger", f"{_LEDGER}.report", "self.num_given_up -= job.given_up", "pass"),
    (
        "amounts",
        "offload.scheduler.amounts:storable_blocks",
        "min(num_computed, num_tokens)",
        "num_computed",
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
    ("amounts", "offload.scheduler.amounts:restorable_blocks", "num_resident - num_volatile", "num_resident"),
    ("amounts", "offload.scheduler.amounts:restorable_blocks", " - 1 - num_step_blocks", " - 1"),
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
    ("seals", f"{_SEALS}.unseal", "self._fills[slots] = BROKEN", "pass"),
    ("seals", f"{_SEALS}._intact", "self._sums[slots]", "self._sums[block_ids]"),
    ("seals", f"{_SEALS}.num_intact", "self._num_samples += 1", "pass"),
    ("seals", f"{_SEALS}.num_intact", ".all()", ".any()"),
    ("seals", f"{_SEALS}._checksums", "if self.of_blocks", "if not self.of_blocks"),
    ("seals", "offload.worker.seals:num_leading", "int(good.argmin())", "int(good.sum())"),
    ("seals", f"{_TRANSFER}.submit", "self._seals.unseal(targets)", "pass"),
    ("seals", f"{_TRANSFER}._start", "self._checker.check(job, num_wanted)", "pass"),
    (
        "seals",
        f"{_JOB}.num_filled",
        "seals.num_current(self.sources, self.fills)",
        "len(self.sources)",
    ),
    ("seals", f"{_TRANSFER}._after_copy", "self._seals.num_current(job.slots, job.fills)", "job.num_current"),
    ("seals", f"{_TRANSFER}._after_copy", "elif num_blocks == len(job.slots):", "else:"),
    ("seals", f"{_TRANSFER}._after_copy", "job.is_given_up or job.is_cancelled", "job.is_cancelled"),
    ("seals", f"{_TRANSFER}._after_copy", "job.is_given_up or job.is_cancelled", "job.is_given_up"),
    ("seals", f"{_JOB}.outcome", "min(num_good, self.num_current)", "num_good"),
    ("seals", f"{_JOB}.outcome", "num_good = num_intact", "pass"),
    ("seals", f"{_JOB}.outcome", "num_good < self.num_wanted", "False"),
    ("seals", f"{_JOB}.end", "if self.is_cancelled", "if False"),
    ("seals", f"{_TRANSFER}._give_up_overdue", "job.since <= late", "job.since < late"),
    ("seals", f"{_TRANSFER}._give_up_overdue", "and job.copied is None", ""),
    ("seals", f"{_TRANSFER}._give_up", "self._awaited.discard(job_id)", "pass"),
    ("seals", f"{_TRANSFER}._give_up", "is_over=False", "is_over=True"),
    ("seals", f"{_TRANSFER}._begin_copy", "job.since = self._clock()", "pass"),
    ("seals", f"{_TRANSFER}._begin_held", "self._allowance.take(job.lane.num_bytes(job.batch))", "pass"),
    ("seals", f"{_ALLOWANCE}.has_turn", "or self._at >= since + HOLD_SECONDS", ""),
    ("seals", f"{_TRANSFER}._has_not_begun", "job_id in self._held or", ""),
    (
        "turns",
        f"{_TURNS}.end",
        "self._turns.pop(request.request_id, None)",
        "self._turns.get(request.request_id)",
    ),
    ("turns", f"{_TURNS}.end", "turn.number, number", "0, number"),
    ("turns", f"{_TURNS}.ending", "(ending, turn.wish)", "ending"),
    ("turns", f"{_TURNS}.begin", "_wish_of(keep)", "None"),
    (
        "turns",
        "offload.scheduler.miniatures:Miniatures._serve",
        "pool.ended(each.chain, turn, each.ending)",
        "pass",
    ),
    ("answers", f"{_REUSE}.arrived", "num_found + 1, num_prompt", "num_found, num_prompt"),
    ("answers", f"{_REUSE}.arrived", "int(stop == num_prompt)", "0"),
    ("answers", f"{_REUSE}.ended", "self._uncounted.append(kind)", "pass"),
    ("answers", f"{_REUSE}._came_back", "self._answers[first] = None", "pass"),
    ("answers", f"{_REUSE}._earn", "account.credit > self._worth", "account.credit > 0"),
    ("answers", f"{_REUSE}._spend", "was_open and not self._all.is_open", "0"),
    ("answers", f"{_REUSE}.are_stored", "or account.proven_at == self._num_closed", ""),
    ("answers", "offload.scheduler.answers:_forget_oldest", "if len(known) > most", "if False"),
    ("chained", f"{_ARRIVALS}.may_follow", "self._num_blocks + num_blocks <= self._most_blocks and", ""),
    ("chained", f"{_ARRIVALS}.end", "self._pin(restore)", "pass"),
    ("chained", f"{_ARRIVALS}.end", "if not restore.num_coming", "if restore.num_coming"),
    ("chained", f"{_ARRIVALS}.left", "self._num_blocks -= len(restore.block_ids)", "pass"),
    ("chained", f"{_ARRIVALS}._forget", "del self._by_first[arrival.plan.hashes[0]]", "pass"),
    ("chained", "offload.worker.following:Following.over", "if not awaited", "if True"),
    ("chained", f"{_TRANSFER}.submit", "if fillers:", "if False:"),
    (
        "chained",
        f"{_JOB}.num_filled",
        "seals.num_current(self.sources, self.fills)",
        "len(self.sources)",
    ),
    ("chained", f"{_JOB}.was_to_come", "self.follows or", ""),
    ("chained", f"{_TRANSFER}._has_not_begun", "job_id in self._following or", ""),
    ("chained", f"{_TRANSFER}._has_not_begun", "or job_id in self._elsewhere", ""),
    ("chained", f"{_TRANSFER}._start_or_wait", "if self._elsewhere.must_wait(job)", "if False"),
    ("chained", f"{_TRANSFER}._filled", "self._seals.fail(job_id, job.slots)", "pass"),
    ("chained", f"{_ELSEWHERE}._first_coming", "if each in self._begun", ""),
    ("chained", f"{_ELSEWHERE}.over", "self.leave(job_id)", "pass"),
    ("chained", f"{_ELSEWHERE}.over", "self._first[job_id] = found", "over.append(job_id)"),
    ("chained", f"{_SEALS}.coming", "newest < fills", "newest <= fills"),
    ("chained", f"{_SEALS}.coming", "np.where(found > BROKEN, found, _failed(found))", "found"),
    ("chained", f"{_SEALS}.fail", "slots[self._fills[slots] == BROKEN]", "slots"),
    ("resize", f"{_TO_SIZE}.hear", "if order.num_left > 0:", "if False:"),  # one rank's word for all
    ("resize", f"{_TO_SIZE}.hear", "order.error = max(order.error, error)", "pass"),
    ("resize", f"{_TO_SIZE}.hear", "self._allocator.resizing.open(", "len("),
    ("resize", f"{_TO_SIZE}._empty", "& (used == 0)", ""),  # memory of what jobs read goes
    ("resize", f"{_TO_SIZE}._empty", "self._order(empty, takes=False)", "pass"),  # it is not given back
    ("resize", f"{_TO_SIZE}._close", "self._target.tell(self._allocator.capacity)", "pass"),
    ("resize", f"{_TO_SIZE}.step", "self._resized()", "pass"),
    ("resize", f"{_TO_SIZE}._order", "+ self._unit_slots", ""),
    ("resize", f"{_TARGET}.yield_memory", "int(bounds.num_slots * LEAST_SHARE)", "1"),
    ("resize", f"{_PAGES}.give_back", "if self._is_unpinned(address):", "if True:"),
    ("resize", f"{_PAGES}.take", "self.give_back(runs)", "pass"),
    ("resize", f"{_AT_RANK}._carry_out", "self._memory.give_back(runs)", "pass"),
    ("resize", "offload.worker.pool.pressure:Pressure.is_short", "or self.stalled > _STALLED", ""),
    ("spelling", "offload.scheduler.common:Common.note_of", "min(start, stop - reach)", "start"),
    ("spelling", f"{_TOKENS}.keep", "self._rows[slots[is_plain]] = rows[is_plain]", "pass"),
    ("spelling", f"{_TOKENS}.keep", "is_plain &=", "_ ="),
    ("spelling", f"{_TOKENS}.of", "not np.array_equal(self._jobs[slots], self._filled_by[slots])", "False"),
    ("spelling", f"{_SPELLING}.ending", "self.num_positions - num_behind", "self.num_positions"),
    ("spelling", f"{_SPELLING}.part", "self.extra_keys[start:stop]", "self.extra_keys"),
    ("spelling", "offload.vllm.engine:VllmEngine.spelled", "start * size :", "stop * size - size :"),
    ("spelling", "offload.vllm.engine:VllmEngine.spelled", "or request.cache_salt", ""),
    ("spelling", f"{_STREAM}._of_positions", "len(event.hashes) - begun - len(hashes)", "0"),
    ("spelling", f"{_BAG_BLOCKS}.add", "num_left -= len(blocks)", "pass"),
    ("spelling", "offload.scheduler.tiers.told:ExtentsNote.part", "(index - self.first)", "index"),
    ("kv_index", "offload.proxy.kv_index:_Place.take", "self.by_key.pop(block.key, None)", "pass"),
    ("kv_index", "offload.proxy.kv_index:_keys", "if extra:", "if False:"),
    ("kv_index", "offload.proxy.kv_index:Prompt.key", "self._model if is_adapter else None", "None"),
    ("kv_index", f"{_INDEX_OF_EVENTS}.hear", "self._places.pop(medium, None)", "pass"),
    ("kv_index", f"{_INDEX_OF_EVENTS}.hear", "event.kv_cache_spec_kind in _FULL", "True"),
    ("kv_index", f"{_INDEX_OF_EVENTS}.depth", "end - by_key.get(key, 0) <= reach", "key in by_key"),
    ("kv_index", f"{_INDEX_OF_EVENTS}._put", "before is None or ", ""),
    ("kv_index", f"{_INDEX_OF_EVENTS}._put", "is_full or extra is None", "extra is None"),
    ("kv_index", f"{_INDEX_OF_EVENTS}._fits", "self.clear(is_whole=False)", "pass"),
    ("kv_streams", f"{_STREAM_OF_EVENTS}.take", "if number <= self._live:", "if False:"),
    ("kv_streams", f"{_STREAM_OF_EVENTS}._catch_up", "self.index.clear(is_whole=False)", "pass"),
    ("kv_streams", f"{_STREAM_OF_EVENTS}._take_again", "if number > self._last + 1:", "if False:"),
    ("kv_streams", f"{_STREAM_OF_EVENTS}._apply", "self.index.clear(is_whole=True)", "pass"),
    ("choices", _CHOOSE, "own_load < own_compute", "True"),
    ("choices", _CHOOSE, "HELD_UP * prospect.num_restoring", "0.0"),
    ("choices", _CHOOSE, "prospect.queue + own_load + rest", "own_load + rest"),
    ("choices", _CHOOSE, "min(prospect.backlog, prospect.patience)", "prospect.backlog"),
    ("choices", _CHOOSE, "load <= compute + spare", "load <= compute"),
    ("choices", f"{_CHOICES}.admitted", "(choice.verdict is Verdict.COMPUTED) != bool(num_external)", "True"),
    ("choices", f"{_CHOICES}._tried", "max(self._tried_at, self._link.measured_at)", "self._tried_at"),
    ("choices", f"{_GPU_QUEUE}.backlog", "0 if own is None else own.num_tokens", "0"),
    ("choices", f"{_GPU_QUEUE}._leave", "self._num_tokens -= waiter.num_tokens", "pass"),
    ("choices", f"{_LINK_QUEUE}.begin", "self._num_bytes += num_bytes", "pass"),
    ("choices", f"{_LINK_QUEUE}.end", "self._num_bytes -= num_bytes", "pass"),
    ("choices", "offload.scheduler.costs:LinkCost.add", "self._forget()", "pass"),
    ("choices", f"{_PREFILL}._note", "self._own.append(_median(own))", "pass"),
    ("choices", f"{_PREFILL}._per_token", "(step.seconds - own)", "step.seconds"),
    ("choices", f"{_PREFILL}._per_token", " + own / self._step_tokens", ""),
    ("choices", f"{_PREFILL}._per_token", "sorted(step.seconds for step in latest)[len(latest) // 4]", "inf"),
    ("choices", f"{_PREFILL}._own_seconds", "if len(self._own) >= _LEAST_SAMPLES else 0.0", ""),
    ("choices", "offload.scheduler.costs:_median", "(len(values) - 1) // 2", "len(values) // 4"),
]

MUTANTS = {area: [Edit(*row[1:]) for row in rows] for area, rows in groupby(_ROWS, key=lambda row: row[0])}
"""By area."""
