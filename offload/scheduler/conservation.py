"""What must hold between all parts of the scheduler's side. For tests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.scheduler.side import SchedulerSide


def check_side(side: "SchedulerSide") -> None:
    """All parts agree, and nobody is known who is not known to all. O(pool)."""
    own = (side.ledger, side.adapters, side.metrics, side.costs, side._gauges, side.weights, side.aside)
    more = (side.askers, side.notes, side._other_sizes, side._resizing, side._turns)
    for part in (side.allocator, *more, *own):
        part.check_invariants()
    for flow in side.flows:
        flow.check_invariants()
        flow.breaker.check_invariants()
    if side._recorder is not None:
        side._recorder.check_invariants()
    gone = [request_id for request_id in side.stores.backlog if request_id not in side._turns]
    assert not gone, f"blocks of {gone} may be stored, and they are not admitted"
    planned = [part.job_id for order in side._next.orders for part in order.parts]
    over = [job_id for job_id in planned if job_id not in side.ledger]
    assert not over, f"jobs {over} are over before workers were told of them"


def left_over_of(side: "SchedulerSide") -> dict[str, object]:
    """What has not ended or is known of somebody, by name; nothing once all is over."""
    left = side.notes.left_over() | {
        "jobs": list(side.ledger),
        "requests": [*side._turns, *side._local_tokens, *side._hints, *side.aside.left_over()],
        "pins": side.allocator.num_pins,
        "owners of uncached blocks": side.allocator.num_owners,
        "requests in other sizes": side._other_sizes.left_over(),
    }
    for flow in side.flows:
        left |= flow.left_over()
    return {name: each for name, each in left.items() if each}
