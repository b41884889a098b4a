"""A store: which slots a job fills from the GPU, and what has become of its source."""

from dataclasses import dataclass

from allocator import StorePlan


@dataclass(slots=True, eq=False)
class Store:
    """What a store job does.

    Attributes:
        plan: into which slots.
        is_spoiled: what it copies may be no KV.
        is_dropped: a reset has made it worthless.
        is_lasting: what it fills may outlive the engine.
        late: the id of its request, if that is over, and the GPU was about to evict this.
    """

    plan: StorePlan
    is_spoiled: bool = False
    is_dropped: bool = False
    is_lasting: bool = False
    late: str | None = None
