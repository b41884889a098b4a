"""Flows: what decides about the jobs of one route.

A new place below the pool is a flow for each of its routes here, a lane for each on the workers, and a line
in ``offload.vllm.places``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from allocator import Event
from offload.messages import Order, Route
from offload.peer_messages import PeerFacts
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.engine import Request, Step
from offload.scheduler.hints import RequestHints
from offload.scheduler.offer import Offer

Task = TypeVar("Task")


@dataclass(slots=True, eq=False)
class Job(Generic[Task]):
    """A job in flight.

    Attributes:
        job_id: names it.
        flow: decided about it, and hears of it.
        task: what the flow knows of it.
        num_blocks: that it moves.
        ranks_left: ranks that have not reported it over.
        num_good: leading blocks that are good on all ranks that have reported.
        blocks: GPU blocks that are held for it.
        given_up: a rank has said that its copy is past its deadline.
        seconds: that its copy took on the slowest rank that has reported.
        nbytes: that the ranks that have reported have copied.
        is_sound: nothing went wrong on the ranks that have reported it over: see ``JobReport``.
        reason: that the first of them gave which gave one; the same.
    """

    job_id: int
    flow: "Flow[Task]" = field(repr=False)
    task: Task
    num_blocks: int
    ranks_left: int
    num_good: int
    blocks: list[Any]
    given_up: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    is_sound: bool = True
    reason: str = ""


class Progress(NamedTuple):
    """What a report changed.

    Attributes:
        job: the job.
        fell_short: it has fewer good blocks than were thought before.
        gave_up: its copy is past its deadline on some rank, which was not known before.
        ended: it is over on all ranks.
    """

    job: Job[Any]
    fell_short: bool
    gave_up: bool
    ended: bool


class Flow(Protocol[Task]):
    """What decides about the jobs of one route."""

    route: Route
    breaker: CircuitBreaker
    """Pauses them after faults."""

    def plan(self, step: Step, num_admitted: int) -> list[Order]:
        """What to begin with this step; ``num_admitted`` requests have begun and are not over."""

    def advance(self, job: Job[Task], progress: Progress) -> None:
        """Take in what became of a job."""

    def finish(self, request: Request) -> list[Order]:
        """That request is over, and its blocks are freed right after this; what to begin because of it."""

    def drop(self, is_meant: Callable[[Request], bool]) -> list[int]:
        """KV computed before this for these requests is worthless. Returns the jobs that nobody wants now."""

    def reset(self) -> list[int]:
        """All KV is worthless. Returns the jobs that nobody wants now."""

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do in the next steps, beside what is in flight."""

    @property
    def num_pins(self) -> int:
        """Pins that it holds in the allocator."""

    def check_invariants(self) -> None:
        """It agrees with the ledger and with itself. For tests."""

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""


class Below(NamedTuple):
    """What decides about a place below the pool.

    Attributes:
        flows: of all its routes.
        sources: those of them that waiting requests ask.
        ending: the engine shuts down, and steps on for a while; None: that changes nothing.
        standing: how it stands now, for operators; O(1). None: there is nothing to tell.
        events: what has entered it and left; None: that is not listed.
        hear: workers tell of engines there.
        peers: what there is to tell of these; None: there are none.
        name_weights: there was a reset, and what it writes from now on has that suffix; what was written with
            it before is there again.
        namespace: the short name of what must be equal for its bytes to be usable; none: there is no such.
    """

    flows: Sequence[Flow[Any]]
    sources: Sequence["Source"]
    ending: Callable[[], None] | None = None
    standing: Callable[[], "Standing"] | None = None
    events: "BelowEvents | None" = None
    name_weights: Callable[[bytes], None] = lambda suffix: None
    hear: Callable[[Sequence[PeerFacts]], None] = lambda facts: None
    peers: Callable[[], list[dict[str, Any]]] | None = None
    namespace: str = ""


class ShortStored(NamedTuple):
    """Event: an extent of fewer positions than others, which ends at a checkpoint, is below the pool."""

    num_positions: int
    name: bytes
    parent: bytes | None
    note: object = None


TierEvent = Event | ShortStored


class BelowEvents(NamedTuple):
    """What enters a place below the pool, and leaves it.

    Attributes:
        take: events since the last call, oldest first. Hashes of positions are names of extents. A bag has
            one hash, of the last position before it. Notes are a ``Spelling`` of what an event tells of.
        is_listing: whether there are more to come, without anything that happens.
        positions: of an extent.
        is_shared: others write there, too: events tell of what this engine writes.
    """

    take: Callable[[], Sequence[TierEvent]]
    is_listing: Callable[[], bool]
    positions: int
    is_shared: bool = False


class Standing(NamedTuple):
    """How a tier that one engine owns stands.

    Attributes:
        num_extents: that it has, or is about to.
        num_places: for extents.
        extent_bytes: of a whole extent, on all ranks.
        epoch: of this life.
        is_private: whether what is written is of this life only, because of a reset.
        budget_bytes: that may be written now.
    """

    num_extents: int
    num_places: int
    extent_bytes: int
    epoch: int
    is_private: bool
    budget_bytes: int


class Source(Protocol):
    """A flow that requests wait for."""

    def arrived(self, request: Request, hints: RequestHints) -> None:
        """A request has come that may be given KV, and waits for its turn to ask."""

    def offer(self, request: Request, num_local: int, hints: RequestHints) -> Offer | None:
        """What it brings behind the ``num_local`` leading tokens that the GPU has.

        None: nothing, ask the next. Asked again and again while the request waits.
        """
