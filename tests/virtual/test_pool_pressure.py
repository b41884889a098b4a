"""A pool that is too small for what runs: stores stay in proportion, and nothing invalid gets in."""

import random

import pytest

from offload.messages import STORE
from offload.scheduler.offer import NOTHING, Why
from offload.testing.virtual import VirtualEngine, VirtualSettings
from tests.virtual import driver

BLOCK = 4


def drawn(rng: random.Random, num_blocks: int) -> list[int]:
    return [rng.randrange(512) for _ in range(num_blocks * BLOCK)]


@pytest.mark.parametrize("cpu_slots", [400, 160, 80])
def test_running_requests_do_not_evict_each_others_blocks_in_turns(cpu_slots: int) -> None:
    """Each block is stored once or not at all, however little of their chains the pool can hold."""
    settings = VirtualSettings(gpu_blocks=400, cpu_slots=cpu_slots, block_size=BLOCK, chunk=256)
    engine = VirtualEngine(settings, random.Random(1))
    plan, stored = engine.side.build_plan, []

    def counted(output):  # type: ignore[no-untyped-def]
        result = plan(output)
        stored.append(sum(len(order.sources) for order in result.orders if order.route == STORE))
        return result

    engine.side.build_plan = counted  # type: ignore[method-assign]
    rng = random.Random(2)
    for _ in range(4):
        engine.add(drawn(rng, 40), 120)
    engine.drain()
    engine.close()
    distinct = 4 * (40 + 120 // BLOCK)
    assert 0 < sum(stored) <= distinct


def test_what_was_computed_on_top_of_a_siblings_failed_load_is_not_kept() -> None:
    """Under a MultiConnector a store may hold none of the unfilled blocks and still be worthless."""
    settings = VirtualSettings(gpu_blocks=100, cpu_slots=100, block_size=BLOCK, chunk=256)
    engine = VirtualEngine(settings, random.Random(1))
    rng = random.Random(2)
    head = drawn(rng, 6)
    engine.add(head, 1)
    engine.drain()
    assert engine.reset(connector=False)
    engine.side.offer = lambda *_: NOTHING[Why.ABSENT]  # type: ignore[method-assign]
    driver.hold(engine, STORE)
    request = engine.add(head + drawn(rng, 6), 1)
    engine.step()
    (job,) = engine.side.ledger._jobs.values()
    assert job.task.plan.start == 6
    unfilled = set(range(1, 100)) - {block.block_id for block in job.blocks}
    engine.side.receive(None, unfilled)
    driver.release(engine)
    engine.drain()
    assert engine.side.allocator.resident_depth(request.block_hashes) == 6
    engine.close()
