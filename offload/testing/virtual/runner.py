"""The virtual model runner: keeps requests as a worker does, "computes", and checks what it attends to."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from offload.testing.virtual.cells import GARBAGE, NULL_BLOCK, Misread, Work
from offload.testing.virtual.drafter import Drafted, Drafter, Span, Turn
from offload.testing.virtual.history import History, WrongBytesError
from offload.testing.virtual.inputs import Inputs, generation_of
from offload.testing.virtual.rank import VirtualRank
from offload.testing.virtual.tags import TagChain


@dataclass(slots=True)
class _State:
    """What a worker remembers of a request."""

    chain: TagChain
    num_prompt: int
    generation: int  # of its adapter when it was admitted: what runs on is not vLLM's to compute again
    is_pooled: bool
    drafted: Drafted
    tables: list[list[int]]  # of each group


class VirtualRunner:
    """All ranks in step. They differ in their bytes and in when their copies end, not in their requests."""

    def __init__(
        self,
        ranks: list[VirtualRank],
        vocabulary: int,
        history: History,
        inputs: dict[str, Inputs],
        drafter: Drafter,
    ) -> None:
        """``inputs`` by request id; a worker is not told of salts, but the tags depend on them."""
        self._ranks = ranks
        self._vocabulary = vocabulary
        self._history = history
        self._inputs = inputs
        self.drafter = drafter
        self.adapters: dict[int, int] = {}
        """How often each LoRA adapter has been loaded again, by id, for the next ``execute``."""
        self.taken: Sequence[int] = ()
        """GPU blocks that the scheduler took for something new in planning the next ``execute``."""
        self._states: dict[str, _State] = {}
        self._last: list[str] = []  # of the last step
        connector = ranks[0].connector
        self._aggregator = KVOutputAggregator((connector and connector.get_finished_count()) or len(ranks))
        self.num_positions_checked = 0

    def execute(self, output: SchedulerOutput, generation: int) -> ModelRunnerOutput:
        """Run one step on every rank and merge what they say, as an executor does.

        Raises:
            WrongBytesError: a position that counts as computed has the wrong tag.
        """
        for rank in self._ranks:
            metadata = _through_a_pipe(output.kv_connector_metadata)
            if rank.is_native:
                rank.begin(metadata)
                self._prepare_blocks(rank, output)
            else:
                self._prepare_blocks(rank, output)
                rank.begin(metadata)
        self.drafter.begin_step()
        computed = self._update_states(output)
        spans = self._spans(output, computed)
        works = self._works(spans, generation)
        for rank in self._ranks:
            self._forward(rank, works)
        sampled = self._sample(spans)
        self._draft(spans, sampled, generation)
        results = []
        for rank in self._ranks:
            result = ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={req_id: index for index, req_id in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                pooler_output=self._pool(output, computed),
                kv_connector_output=_through_a_pipe(rank.end(output.finished_req_ids)),
            )
            results.append(result)
        if len(results) == 1:
            return results[0]
        return self._aggregator.aggregate(results)

    def blocks_of(self, req_id: str) -> list[int]:
        """What is in the block tables a worker has of that request, empty if it knows none."""
        state = self._states.get(req_id)
        return [block_id for table in state.tables for block_id in table] if state else []

    def check_drained(self) -> None:
        """Nothing is half reported."""
        aggregator = self._aggregator
        assert not aggregator._recv_remaining_count, f"half reported: {aggregator._recv_remaining_count}"
        for rank in self._ranks:
            rank.check_drained()

    def _prepare_blocks(self, rank: VirtualRank, output: SchedulerOutput) -> None:
        """What vLLM does: its second runner before the connector hears of a step, its first after.

        The second is harder on a connector. vLLM's own copies late what a step takes, and gets the first.
        """
        if self.taken:
            rank.forget(self.taken, self._history.step)
        if output.new_block_ids_to_zero:
            rank.clear(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            sources, targets = zip(*output.kv_cache_block_copies, strict=True)
            rank.copy(sources, targets)
            if rank is self._ranks[0]:
                self._history.blocks(targets, f"vLLM copied blocks {sources} to {targets}")

    def _update_states(self, output: SchedulerOutput) -> dict[str, int]:
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            inputs = self._inputs[new.req_id]
            prompt = new.prompt_token_ids or [0] * len(new.prompt_embeds)
            chain = inputs.chain()
            chain.extend(new.prefill_token_ids or prompt)
            generation, is_pooled = generation_of(inputs, self.adapters), new.pooling_params is not None
            self._states[new.req_id] = _State(
                chain,
                len(prompt),
                generation,
                is_pooled,
                self.drafter.admitted(new.num_computed_tokens),
                [list(table) for table in new.block_ids],
            )
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self._states[req_id]
            computed[req_id] = cached.num_computed_tokens[index]
            if req_id in cached.all_token_ids:
                state.chain.become(cached.all_token_ids[req_id])
            else:
                # A scheduler that does not wait for outputs counts drafts as if all were right.
                computed[req_id] = min(computed[req_id], state.drafted.num_done)
                state.chain.become(state.chain.tokens[: state.num_prompt + cached.num_output_tokens[index]])
            new_ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                state.tables = [list(table) for table in new_ids]
                state.drafted = self.drafter.admitted(computed[req_id])
            elif new_ids is not None:
                for table, more in zip(state.tables, new_ids, strict=True):
                    table.extend(more)
        return computed

    def _spans(self, output: SchedulerOutput, computed: dict[str, int]) -> list[Span]:
        spans = []
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            state, start = self._states[req_id], computed[req_id]
            drafts = list(output.scheduled_spec_decode_tokens.get(req_id, ()))
            for index, draft in enumerate(state.drafted.tokens[: len(drafts)]):
                if drafts[index] == -1:  # the scheduler does not know what was drafted
                    drafts[index] = draft
            stop = start + num_scheduled
            num_known = len(state.chain) + len(drafts)
            assert stop <= num_known, f"{req_id} computes up to {stop} of {num_known} tokens"
            assert stop == num_known or not drafts, f"{req_id} has drafts before its last token"
            spans.append(Span(req_id, start, stop, drafts))
        return spans

    def _works(self, spans: list[Span], generation: int) -> list[Work]:
        works = []
        for req_id, start, stop, drafts in spans:
            state = self._states[req_id]
            tags = np.append(state.chain.tags, state.chain.ahead(drafts)) if drafts else state.chain.tags
            writer = (self._history.step << 24) | (hash(req_id) & 0xFFFFFF)
            works.append(
                Work(req_id, start, stop, tags[:stop], generation + state.generation, state.tables, writer)
            )
        return works

    def _forward(self, rank: VirtualRank, works: list[Work]) -> None:
        for cells in rank.groups:
            if rank is self._ranks[0]:
                for work in works:
                    blocks = work.tables[cells.index][work.start // cells.span : -(-work.stop // cells.span)]
                    what = f"{work.req_id} computed tokens {work.start} to {work.stop} of group {cells.index}"
                    self._history.blocks(blocks, what)
            misread = cells.compute(works)
            if misread is not None:
                self._complain(rank, misread, cells.index)
            self.num_positions_checked += sum(
                work.stop - cells.group.first_read(work.start) for work in works
            )

    def _complain(self, rank: VirtualRank, misread: Misread, index: int) -> None:
        cells, (work, positions, layers, block_id, *_) = rank.groups[index], misread
        writers = cells.cells[0, block_id, :, 1] >> np.uint64(24)
        raise WrongBytesError(
            f"rank {self._ranks.index(rank)}: {work.req_id}, computing from token {work.start}, attends to "
            f"wrong bytes at token positions {positions} of its table {work.tables[index]} in group {index} "
            f"({cells.group.kind}), layers {layers}: {_what_is(misread)}; GPU block {block_id} now "
            f"holds what was computed in steps {writers.tolist()}\n{self._history.of_block(block_id)}"
        )

    def _sample(self, spans: list[Span]) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for req_id, _, stop, drafts in spans:
            state = self._states[req_id]
            is_last = stop == len(state.chain) + len(drafts) and not state.is_pooled
            sampled[req_id] = self.drafter.accepted(state.chain, drafts) if is_last else []
            num_rejected = len(drafts) + 1 - len(sampled[req_id]) if is_last else 0
            state.drafted.num_done = stop - num_rejected
        return sampled

    def _draft(self, spans: list[Span], sampled: dict[str, list[int]], generation: int) -> None:
        turns, self._last = [], [span.request_id for span in spans]
        for span in spans:
            state = self._states[span.request_id]
            state.drafted.tokens = self.drafter.propose(state.chain) if sampled[span.request_id] else []
            turns.append(
                Turn(span, state.chain, state.tables[0], state.drafted, generation + state.generation)
            )
        self.drafter.run(turns)

    def take_drafts(self) -> DraftTokenIds:
        """What the last step drafted, for a scheduler that waits for it."""
        return DraftTokenIds(self._last, [self._states[req_id].drafted.tokens for req_id in self._last])

    def _pool(self, output: SchedulerOutput, computed: dict[str, int]) -> list[torch.Tensor | None]:
        """An embedding for each request that wants one and whose prompt is computed."""
        pooled: list[torch.Tensor | None] = []
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self._states[req_id]
            is_last = state.is_pooled and computed[req_id] + num_scheduled == len(state.chain)
            pooled.append(torch.zeros(1) if is_last else None)
        return pooled


def _what_is(misread: Misread) -> str:
    """In words, the first wrong word."""
    if misread.block_id == NULL_BLOCK:
        return "there is no block"
    if misread.held == GARBAGE:
        return "nobody wrote to the block since it was taken"
    if not misread.held:
        return "zeros"
    places = np.flatnonzero(misread.work.tags == np.uint64(misread.unmasked)).tolist()
    return f"what is right at {places}" if places else "of another chain, or of other weights"


def _through_a_pipe(message: Any) -> Any:
    """What the other process would receive."""
    return pickle.loads(pickle.dumps(message))
