"""Each check of the scheduler's side can fail: state that contradicts itself is found, and shown."""

from collections.abc import Callable

import pytest

from offload.messages import STORE, Order, Part
from tests.offload.scheduler.serving import Serving, Sizes


def busy() -> Serving:
    """One request runs, its store is in flight; another's restore is in flight; one is over and queued."""
    serving = Serving(Sizes(num_blocks=40))
    serving.send(range(8), [7])
    serving.drain()
    serving.engine.forget()
    serving.send(range(8), [7])
    serving.send(range(100, 108), [7] * 9)
    serving.step()
    serving.check()
    assert list(serving.side.ledger.of(serving.side.stores))
    assert list(serving.side.ledger.of(serving.side.restores))
    return serving


def store_of_nobody(serving: Serving) -> None:
    (job,) = serving.side.ledger.of(serving.side.stores)
    del serving.side.ledger._jobs[job.job_id]


def slots_of_others(serving: Serving) -> None:
    (job,) = serving.side.ledger.of(serving.side.stores)
    serving.side.stores._common.filled_by[job.task.plan.slots[0, 0]] += 1


def too_many_begin(serving: Serving) -> None:
    serving.side.stores.ended._num_left = 17


def released_too_early(serving: Serving) -> None:
    (job,) = serving.side.ledger.of(serving.side.stores)
    while serving.engine.num_holds(job.blocks[0].block_id):
        serving.engine.release(job.blocks[:1])


def pin_of_nobody(serving: Serving) -> None:
    hashes = next(iter(serving.side.restores)).chain
    serving.side.allocator.pin(hashes, 0, 1)


def restore_without_jobs(serving: Serving) -> None:
    (restore,) = serving.side.restores
    serving.side.restores._restores[restore.restore_id + 100] = restore


def stored_without_admission(serving: Serving) -> None:
    serving.side._turns._turns.clear()


def turns_out_of_order(serving: Serving) -> None:
    turns = serving.side._turns._turns
    first, _ = turns
    turns[first] = turns[first]._replace(number=9)


def planned_and_over(serving: Serving) -> None:
    (job,) = serving.side.ledger.of(serving.side.stores)
    slots = job.task.plan.slots[:, 0]
    serving.side._next.orders.append(Order(STORE, [Part(job.job_id + 100, 0, len(slots))], slots, slots))


def gauge_as_counter(serving: Serving) -> None:
    serving.side.metrics.show("stored_bytes", 1)


def unknown_metric(serving: Serving) -> None:
    serving.side.metrics.count("stored_kilobytes")


def trial_without_pause(serving: Serving) -> None:
    serving.side.stores.breaker._trial = 3


def endless_pause(serving: Serving) -> None:
    serving.side.restores.breaker._pause = 1e9


@pytest.mark.parametrize(
    ("contradict", "shown"),
    [
        (store_of_nobody, "0 blocks in jobs"),
        (slots_of_others, "known of them is"),
        (too_many_begin, "17 may begin"),
        (released_too_early, "we hold GPU block"),
        (pin_of_nobody, "2 pins, 1 known"),
        (restore_without_jobs, "have not ended"),
        (stored_without_admission, "are not admitted"),
        (turns_out_of_order, "are out of order"),
        (planned_and_over, "over before workers were told"),
        (gauge_as_counter, "shown as gauges"),
        (unknown_metric, "stored_kilobytes"),
        (trial_without_pause, "3 on trial"),
        (endless_pause, "1000000000.0 s"),
    ],
)
def test_a_contradiction_is_found_and_shown(contradict: Callable[[Serving], None], shown: str) -> None:
    serving = busy()
    contradict(serving)
    with pytest.raises(AssertionError, match=shown):
        serving.side.check_invariants()


def test_what_is_left_over_is_named() -> None:
    serving = busy()
    left = serving.side.left_over()
    assert {"jobs", "requests", "pins", "restores", "backlog"} <= left.keys()
    serving.drain()
    assert not serving.side.left_over()
