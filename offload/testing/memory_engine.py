"""A small engine in memory, for tests of the scheduler's side without vLLM: plain, obvious and slow.

It is an ``offload.scheduler.engine.Engine``, and has what a scheduler does with its blocks: give, compute,
take back. Whoever schedules decides when. Each block knows the KV that is in it, so a test can say at once
that a block was reused too early.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from allocator import hash_chain
from offload.messages import Ids
from offload.scheduler.engine import Adapter, Drafts, Origin, Remains, State, States
from offload.scheduler.groups import GpuBlocks, Group, Groups, Kind
from offload.scheduler.hints import RequestHints
from offload.scheduler.spelling import Spelling
from offload.transfer_params import KVTransferParams


class Kv(NamedTuple):
    """KV of one full block.

    Attributes:
        prefix_hash: of its tokens and all before them.
        generation: of the weights that computed it.
    """

    prefix_hash: bytes
    generation: int


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One GPU block.

    Attributes:
        block_id: its place in the cache.
        num_holds: how many hold it.
        prefix_hash: under which the prefix cache has it; None: it has not.
        kv: what is in it; None: nothing, or less than a block.
    """

    block_id: int
    num_holds: int = 0
    prefix_hash: bytes | None = None
    kv: Kv | None = None


class MemoryRequest:
    """A request whose answer is known beforehand, token by token."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        block_size: int,
        *,
        hints: RequestHints | None = None,
        lora_request: Adapter | None = None,
        params: KVTransferParams | None = None,
    ) -> None:
        """It waits, with nothing computed.

        Args:
            request_id: names it.
            prompt: token ids, at least one.
            answer: token ids, at least one.
            block_size: tokens per block.
            hints: what its client asks for.
            lora_request: its adapter.
            params: what it says of hand-offs.
        """
        self.request_id = request_id
        self.arrival_time = 0.0
        self.priority = 0
        self.num_prompt_tokens = len(prompt)
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.lora_request = lora_request
        self.hints = RequestHints() if hints is None else hints
        self.params = KVTransferParams() if params is None else params
        self.state = State.OTHER
        self._num_answer = len(answer)
        self._block_size = block_size
        self.token_ids = [*prompt, *answer]
        self._hashes = hash_chain(self.token_ids, block_size)
        self.block_hashes = self._hashes[: self.num_tokens // block_size]

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.state.name}: {self.num_computed_tokens} of {self.num_tokens}>"

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer is known."""
        return self.num_output_tokens == self._num_answer

    def is_finished(self) -> bool:
        """Whether it is over."""
        return self.state in (State.COMPLETED, State.ABORTED)

    def append(self) -> None:
        """The next token of the answer is known."""
        self.num_output_tokens += 1
        self.block_hashes += self._hashes[len(self.block_hashes) : self.num_tokens // self._block_size]


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """A step, as ``offload.scheduler.engine.Step`` says."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: frozenset[str] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Of all requests."""
        return sum(self.num_scheduled_tokens.values())


class MemoryEngine:
    """GPU blocks with holds, a queue of free ones, a prefix cache by hash, and the tables of requests."""

    def __init__(self, num_blocks: int, block_size: int, num_spare: int = 0) -> None:
        """All blocks are free; ``num_spare`` must be left when a request is admitted."""
        self.num_blocks = num_blocks
        self.num_spare = num_spare
        self.drafts = Drafts()
        self.groups = Groups([Group(Kind.FULL, block_size)], block_size)
        self.block_size = block_size
        self.generation = 0
        """Counts changes of the weights."""
        self._blocks = [MemoryBlock(block_id) for block_id in range(num_blocks)]
        self._free = dict.fromkeys(self._blocks)  # the first is the next to be given
        self._cached: dict[bytes, MemoryBlock] = {}
        self._tables: dict[str, list[MemoryBlock]] = {}

    # What the scheduler's side asks

    @property
    def num_free(self) -> int:
        """GPU blocks that nobody holds."""
        return len(self._free)

    def state(self, request: MemoryRequest) -> State:
        """Where the request stands."""
        return request.state

    def ending(self, request: MemoryRequest) -> Hashable | None:
        """The last two tokens of its answer, or that it was cut."""
        answer = request.token_ids[request.num_prompt_tokens : request.num_tokens]
        if not answer:
            return None
        return "aborted" if request.state is State.ABORTED else tuple(answer[-2:])

    def hints(self, request: MemoryRequest) -> RequestHints:
        """What its client asked for."""
        return request.hints

    def transfer_params(self, request: MemoryRequest) -> KVTransferParams:
        """What it says of hand-offs."""
        return request.params

    def origin(self, request: MemoryRequest) -> Origin:
        """What its prompt begins with."""
        return Origin(hash(request.block_hashes[0]) if request.block_hashes else None, 0, "")

    def chain(self, request: MemoryRequest) -> list[bytes]:
        """Its prefix hashes."""
        return request.block_hashes

    def spelled(self, request: MemoryRequest, start: int, stop: int) -> Spelling:
        """Its token ids of these positions."""
        size = self.groups.position_tokens
        return Spelling(request.token_ids[start * size : stop * size], size)

    def remains(self, request: MemoryRequest, *, is_spelled: bool) -> MemoryRequest | Remains:
        """What is read of it once it is over."""
        return request if is_spelled else Remains(request.request_id, request.lora_request)

    def table(self, request_id: str) -> GpuBlocks:
        """The blocks that a request has now, by chain position."""
        return list(self._tables.get(request_id, ()))

    def tables(self, request_id: str) -> list[GpuBlocks]:
        """The same, of the only cache group."""
        return [self.table(request_id)]

    def mean_depth(self, step: MemoryStep) -> float:
        """Nothing takes time here."""
        return 0.0

    def states(self, step: MemoryStep) -> dict[str, dict[int, States]]:
        """None: there is full attention only."""
        return {}

    def branch(self, request: MemoryRequest) -> int:
        """Not known."""
        return 0

    def retain(self, request: MemoryRequest, num_tokens: int) -> None:
        """It keeps all, so there is nothing to do."""

    def blocks(self, block_ids: Ids) -> GpuBlocks:
        """Those with these ids."""
        return [self._blocks[block_id] for block_id in block_ids.tolist()]

    def ids(self, blocks: Sequence[MemoryBlock]) -> Ids:
        """Ids of blocks, ``int64[len(blocks)]``."""
        return np.array([block.block_id for block in blocks], dtype=np.int64)

    def hold(self, blocks: Sequence[MemoryBlock]) -> None:
        """Keep blocks from reuse until they are released."""
        for block in blocks:
            self._free.pop(block, None)
            block.num_holds += 1

    def release(self, blocks: Iterable[MemoryBlock]) -> None:
        """End a hold on each. The first is the first to be reused."""
        for block in blocks:
            assert block.num_holds, f"{block} is released, and nobody holds it"
            block.num_holds -= 1
            if not block.num_holds:
                self._free[block] = None

    def release_before(self, blocks: Iterable[MemoryBlock], other: MemoryBlock) -> None:
        """The same, and they are given right before ``other``, which nobody holds."""
        others = list(self._free)
        at = others.index(other)
        self.release(blocks)
        freed = list(self._free)[len(others) :]
        self._free = dict.fromkeys([*others[:at], *freed, *others[at:]])

    def num_holds(self, block_id: int) -> int:
        """How many hold that block."""
        return self._blocks[block_id].num_holds

    def holds_of(self, blocks: Sequence[MemoryBlock]) -> Ids:
        """How many hold each of these blocks."""
        return np.array([block.num_holds for block in blocks], dtype=np.int64)

    def num_free_of(self, hashes: Iterator[bytes]) -> int:
        """How many blocks of these prefix hashes the cache has that nobody holds."""
        return sum(each in self._cached and not self._cached[each].num_holds for each in hashes)

    def num_intact(self, blocks: Sequence[MemoryBlock], hashes: Sequence[bytes]) -> int:
        """How many leading ones of these the cache has under these hashes."""
        pairs = zip(blocks, hashes, strict=True)
        return sum(1 for _ in takewhile(lambda pair: pair[0].prefix_hash == pair[1], pairs))

    def is_intact(self, block: MemoryBlock, prefix_hash: bytes) -> bool:
        """Whether the cache has this block under that hash."""
        return block.prefix_hash == prefix_hash

    def is_ending(self) -> bool:
        """It does not."""
        return False

    def share(self, request: MemoryRequest, num_tokens: int) -> None:
        """Give the leading blocks of a request to the prefix cache: ``num_tokens`` of it are there."""
        num_full = num_tokens // self.block_size
        leading = zip(request.block_hashes[:num_full], self._tables[request.request_id], strict=False)
        for prefix_hash, block in leading:
            if block.prefix_hash is None and prefix_hash not in self._cached:
                block.prefix_hash = prefix_hash
                self._cached[prefix_hash] = block

    # What a scheduler does

    def num_cached(self, request: MemoryRequest) -> int:
        """Leading tokens that the prefix cache has, in full blocks; one token at least is computed."""
        num_blocks = 0
        for prefix_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            if prefix_hash not in self._cached:
                break
            num_blocks += 1
        return num_blocks * self.block_size

    def has(self, prefix_hash: bytes) -> bool:
        """Whether the prefix cache has that block."""
        return prefix_hash in self._cached

    def gives(self, prefix_hash: bytes, block: MemoryBlock) -> bool:
        """Whether the prefix cache gives no other block than this one for that hash."""
        return self._cached.get(prefix_hash, block) is block

    @property
    def num_cached_blocks(self) -> int:
        """Prefix hashes that the prefix cache has."""
        return len(self._cached)

    @property
    def next_free(self) -> int | None:
        """The id of the free block that is taken next; None: there is none."""
        first = next(iter(self._free), None)
        return None if first is None else first.block_id

    @property
    def next_unhashed(self) -> int | None:
        """The id of the free block that is taken next; None if the prefix cache has it, or there is none."""
        first = next(iter(self._free), None)
        return None if first is None or first.prefix_hash is not None else first.block_id

    def free_ids(self) -> Ids:
        """Ids of all free blocks, in the order in which they are taken."""
        return np.fromiter((block.block_id for block in self._free), dtype=np.int64, count=len(self._free))

    def num_lacking(self, request: MemoryRequest, num_tokens: int) -> int:
        """Free blocks that it takes for ``num_tokens`` of the request, with those that the cache has."""
        have = len(self._tables.get(request.request_id, ()))
        cached = [] if have else self._cached_blocks(request)
        taken = sum(not block.num_holds for block in cached)
        return max(0, -(-num_tokens // self.block_size) - have - len(cached)) + taken

    def give(self, request: MemoryRequest, num_tokens: int) -> bool:
        """Give the request blocks for that many tokens; first of all those that the cache has.

        False: there are too few, and nothing has changed.
        """
        if self.num_lacking(request, num_tokens) > self.num_free:
            return False
        if request.request_id not in self._tables:
            cached = self._tables[request.request_id] = self._cached_blocks(request)
            self.hold(cached)
        table = self._tables[request.request_id]
        for _ in range(-(-num_tokens // self.block_size) - len(table)):
            block = next(iter(self._free))
            self._forget(block)
            self.hold([block])
            table.append(block)
        return True

    def compute(self, request: MemoryRequest, num_tokens: int) -> None:
        """Compute that many tokens more. The prefix cache has the blocks that are full."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        request.num_computed_tokens = stop
        table = self._tables[request.request_id]
        for position in range(start // self.block_size, -(-stop // self.block_size)):
            if table[position].prefix_hash is not None:  # others have it, too: it is not written again
                continue
            is_full = (position + 1) * self.block_size <= stop
            kv = Kv(request.block_hashes[position], self.generation) if is_full else None
            table[position].kv = kv
        self.share(request, stop)

    def take_back(self, request_id: str) -> None:
        """The request gives up its blocks, the last one to be reused first."""
        self.release(reversed(self._tables.pop(request_id, [])))

    def forget(self) -> bool:
        """The prefix cache forgets the blocks that nobody holds. Returns whether these are all."""
        for block in self._free:
            self._forget(block)
        return len(self._free) == self.num_blocks

    def check_invariants(self) -> None:
        """A block is free if nobody holds it, tables are of held blocks, and the cache finds what it has."""
        free = {block.block_id for block in self._blocks if not block.num_holds}
        queued = {block.block_id for block in self._free}
        assert free == queued, f"nobody holds {free}, free are {queued}"
        in_tables = Counter(block.block_id for table in self._tables.values() for block in table)
        for block_id, num in in_tables.items():
            held = self._blocks[block_id].num_holds
            assert held >= num, f"block {block_id} is in {num} tables and is held {held} times"
        for prefix_hash, block in self._cached.items():
            assert block.prefix_hash == prefix_hash, f"{block} is cached under {prefix_hash!r}"
        num_cached = sum(block.prefix_hash is not None for block in self._blocks)
        assert num_cached == len(self._cached), f"{num_cached} blocks are cached, {len(self._cached)} found"

    def owners(self, *others: Iterable[Any]) -> Counter[int]:
        """How often each block, by its id, is in a table or among ``others``, which hold blocks too."""
        owned = [*self._tables.values(), *others]
        return Counter(block.block_id for blocks in owned for block in blocks)

    def _cached_blocks(self, request: MemoryRequest) -> list[MemoryBlock]:
        num_blocks = self.num_cached(request) // self.block_size
        return [self._cached[each] for each in request.block_hashes[:num_blocks]]

    def _forget(self, block: MemoryBlock) -> None:
        if block.prefix_hash is not None:
            del self._cached[block.prefix_hash]
            block.prefix_hash = None
