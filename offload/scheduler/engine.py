"""The engine as the scheduler's side sees it: its requests, its steps, and its GPU blocks.

``offload.vllm.engine`` has the one for vLLM. Requests and steps are vLLM's own objects: what is named here is
what is read of them.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from offload.messages import Ids
from offload.scheduler.groups import GpuBlocks, Groups
from offload.scheduler.hints import RequestHints
from offload.scheduler.spelling import Spelling
from offload.transfer_params import KVTransferParams


class State(Enum):
    """Where a request stands, as far as it matters here."""

    WAITS_FOR_KV = auto()
    """For a restore, or for the step after it."""
    PREEMPTED = auto()
    COMPLETED = auto()
    """Over, by computing all that was asked for."""
    ABORTED = auto()
    """Over, ended from outside: a stop string is such an end."""
    OTHER = auto()


class Adapter(Protocol):
    """A LoRA adapter that a request names."""

    lora_name: str
    lora_int_id: int
    load_inplace: bool


class Request(Protocol):
    """What is read of a request. Numbers count tokens."""

    request_id: str
    arrival_time: float
    priority: int
    """Less is sooner."""
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_in_flight_tokens: int
    resumable: bool
    skip_reading_prefix_cache: bool
    lora_request: Adapter | None

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def is_finished(self) -> bool: ...


class Remains(NamedTuple):
    """What is read of a request once it is over, but for its tokens."""

    request_id: str
    lora_request: Adapter | None


class Step(Protocol):
    """What is read of a step that is scheduled."""

    num_scheduled_tokens: dict[str, int]
    """By request."""
    total_num_scheduled_tokens: int
    preempted_req_ids: Collection[str] | None


class Drafts(NamedTuple):
    """What speculative decoding changes for whoever keeps KV. All 0: there is none.

    Layers that draft may read tokens behind a position before they write the KV of that position. So KV at
    the end of a block may depend on tokens that its prefix hash does not cover.

    Attributes:
        num_tokens: drafted per request and step, at most. They may all be rejected.
        num_lookahead: tokens behind those of a step for which a running request has blocks, too.
        num_volatile_blocks: at the end of a hit, which the engine computes again for their draft layers.
        num_unsettled_tokens: at the end of the computed ones, whose KV in draft layers is yet to be final.
    """

    num_tokens: int = 0
    num_lookahead: int = 0
    num_volatile_blocks: int = 0
    num_unsettled_tokens: int = 0

    def step_blocks(self, block_size: int) -> int:
        """GPU blocks that must be free beside its own before a request is restored; 0 without drafts."""
        num_tokens = 1 + self.num_tokens + self.num_lookahead if self.num_tokens else 0
        return -(-num_tokens // block_size)


States = Mapping[int, Any]
"""GPU blocks that hold a state, by cache group."""


class Origin(NamedTuple):
    """What a prompt begins with, as far as it says whether others could share it.

    Attributes:
        tokens: a hash of the tokens of its first position; None: there are none.
        salt: a hash of its ``cache_salt``; 0 without one.
        adapter: the name of its adapter; "" without one.
    """

    tokens: int | None
    salt: int
    adapter: str


class Engine(Protocol):
    """What is asked of the engine. Its cache groups hand out blocks of one pool."""

    groups: Groups
    """How its blocks make up chain positions."""

    num_blocks: int
    """GPU blocks."""
    num_spare: int
    """Blocks that must be left when a request is admitted."""
    drafts: Drafts
    """What speculative decoding changes."""

    @property
    def num_free(self) -> int:
        """GPU blocks that nobody holds."""

    def state(self, request: Any) -> State:
        """Where the request stands."""

    def ending(self, request: Any) -> Hashable | None:
        """How the answer of a request that is over ended: equal where answers ended alike. Never raises.

        O(1). None: there is no answer, or a fault ended it.
        """

    def hints(self, request: Any) -> RequestHints:
        """What its client asked for. Never raises."""

    def transfer_params(self, request: Any) -> KVTransferParams:
        """What it says of hand-offs. Never raises."""

    def origin(self, request: Any) -> Origin:
        """What its prompt begins with. O(tokens of a position)."""

    def chain(self, request: Any) -> Sequence[bytes]:
        """Prefix hashes of a request's chain positions; grows with the request."""

    def spelled(self, request: Any, start: int, stop: int) -> Spelling | None:
        """What the hashes of these chain positions are made of. O(tokens), in C, and O(positions) for those
        that need more than token ids. None: that is not known.
        """

    def remains(self, request: Any, *, is_spelled: bool) -> Any:
        """What is read of a request that is over: ``Remains``, or if it ``is_spelled`` its tokens as well.

        Its images and all else may go.
        """

    def tables(self, request_id: str) -> Sequence[GpuBlocks]:
        """The blocks that a request has now, by cache group; none after a preemption."""

    def mean_depth(self, step: Any) -> float | None:
        """How many tokens are before those that this step computes, in the mean. O(requests).

        None: most of them are of answers, so the step says nothing about prefill.
        """

    def states(self, step: Any) -> Mapping[str, Mapping[int, States]]:
        """Blocks that hold states once this step has run, by request and number of tokens.

        Only states that the tables do not show in the place of that number.
        """

    def branch(self, request: Any) -> int:
        """Tokens up to where the GPU's prefix cache, or ``retain``, has seen others go; 0: not known."""

    def retain(self, request: Any, num_tokens: int) -> None:
        """Have the GPU's prefix cache keep what it takes to go on there, and compute a step up to there."""

    def blocks(self, block_ids: Ids) -> GpuBlocks:
        """Those with these ids."""

    def ids(self, blocks: Sequence[Any]) -> Ids:
        """Ids of blocks, ``int64[len(blocks)]``."""

    def hold(self, blocks: Sequence[Any]) -> None:
        """Keep blocks from reuse until they are released."""

    def release(self, blocks: Iterable[Any]) -> None:
        """End a hold on each. The first is the first to be reused."""

    def release_before(self, blocks: Iterable[Any], other: Any) -> None:
        """The same, of blocks that are to be reused right before ``other``, which nobody holds."""

    def num_holds(self, block_id: int) -> int:
        """How many hold that block."""

    def holds_of(self, blocks: Sequence[Any]) -> Ids:
        """How many hold each of these blocks, ``int64[len(blocks)]``. O(these), in C."""

    def num_free_of(self, hashes: Iterator[bytes]) -> int:
        """How many blocks of these prefix hashes the GPU has that nobody holds. O(these)."""

    def num_intact(self, blocks: Sequence[Any], hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks the prefix cache has under these hashes. O(these), in C."""

    def is_intact(self, block: Any, prefix_hash: bytes) -> bool:
        """Whether the prefix cache has this block under that hash. O(1)."""

    def has(self, prefix_hash: bytes) -> bool:
        """Whether its prefix cache has the block of full attention with that hash."""

    def gives(self, prefix_hash: bytes, block: Any) -> bool:
        """Whether its prefix cache gives no block of full attention with that hash but this one to others."""

    @property
    def num_cached_blocks(self) -> int:
        """Prefix hashes that the prefix cache has."""

    @property
    def next_free(self) -> int | None:
        """The id of the free block that is taken next; None: there is none. O(1)."""

    @property
    def next_unhashed(self) -> int | None:
        """The id of the free block that is taken next; None if the prefix cache has it, or there is none."""

    def free_ids(self) -> Ids:
        """Ids of all free blocks, in the order in which they are taken. O(blocks), a loop: not for steps."""

    def is_ending(self) -> bool:
        """Whether the engine shuts down, and makes steps for as long as there is work."""

    def share(self, request: Any, num_tokens: int) -> None:
        """Give the leading blocks of a request to the GPU's prefix cache: ``num_tokens`` of it are there."""


class Stand(NamedTuple):
    """Who computes in a step, and what moves on whenever a running request is given a block."""

    num_running: int
    num_free: int
    next_free: int | None

    @classmethod
    def of(cls, engine: Engine, num_running: int) -> "Stand":
        """As it is now, in a step of that many requests."""
        return cls(num_running, engine.num_free, engine.next_free)
