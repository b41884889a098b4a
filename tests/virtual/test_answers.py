"""When blocks of answers are stored: in runs, a few at a time, and never forgotten."""

import random
from itertools import pairwise
from typing import Any

import pytest

from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, VirtualSettings

BLOCK = 4
RUN = 8


@pytest.fixture
def engines() -> Any:
    made: list[VirtualEngine] = []

    def make(**settings: Any) -> VirtualEngine:
        defaults = {"block_size": BLOCK, "answer_run": RUN, "answer_interval": 4, "verify_loads": "never"}
        made.append(VirtualEngine(VirtualSettings(**{**defaults, **settings}), random.Random(0)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def resident_depths(engine: VirtualEngine, request: Any, steps: int) -> list[int]:
    """How much of the request's chain the pool has after each of so many steps."""
    depths = []
    for _ in range(steps):
        engine.step()
        depths.append(engine.side.allocator.resident_depth(request.block_hashes))
    return depths


def test_a_prompt_is_stored_at_once_and_an_answer_in_runs(engines: Any) -> None:
    engine = engines(gpu_blocks=100, cpu_slots=100, chunk=40)
    request = engine.add([1] * 40, 200)
    depths = resident_depths(engine, request, 150)
    assert depths[3] == 10
    gains = [after - before for before, after in pairwise(depths[3:]) if after > before]
    assert gains == [RUN] * 4, "runs of an answer"
    engine.drain()
    assert engine.side.allocator.resident_depth(request.block_hashes) == 239 // BLOCK


def test_the_line_of_answers_holds_only_those_that_run(engines: Any) -> None:
    """More answers reach a run than turns come up: the line must not fill with requests that are over."""
    engine = engines(gpu_blocks=400, cpu_slots=4000, max_num_seqs=32, chunk=64, max_model_len=200)
    rng, backlog = random.Random(1), engine.side.stores.backlog
    live: list[Any] = []
    most_in_line = 0
    for _ in range(400):
        live = [request for request in live if not request.is_finished()]
        while len(live) < 32:
            live.append(engine.add([rng.randrange(512) for _ in range(5)], rng.randint(33, 60)))
        engine.step()
        most_in_line = max(most_in_line, len(backlog._line))
        assert set(backlog._line) <= {request.request_id for request in live}
    assert most_in_line > 4
    engine.drain()
    engine.audit.check_drained()


def test_a_store_that_failed_is_made_again_soon(engines: Any) -> None:
    engine = engines(
        gpu_blocks=200, cpu_slots=200, chunk=80, answer_run=64, copies=CopySchedule(longest_delay=4)
    )
    request = engine.add([1] * 80, 400)
    engine.step()
    engine.side.stores._spoil_jobs()
    assert max(resident_depths(engine, request, 60)) >= 80 // BLOCK


def test_what_found_no_room_is_stored_when_there_is_some(engines: Any) -> None:
    """While the pool is full of stores in flight nothing can be evicted; at the end of the request it can."""
    engine = engines(
        gpu_blocks=60,
        cpu_slots=10,
        block_size=16,
        chunk=256,
        copies=CopySchedule(longest_delay=6),
        eviction_policy="lru",
    )
    one, other = engine.add([1] * 160, 1), engine.add([2] * 80, 14)
    engine.drain()
    allocator = engine.side.allocator
    assert allocator.resident_depth(other.block_hashes) == 5
    assert allocator.resident_depth(one.block_hashes) == 5


def test_a_request_that_starts_over_is_in_line_once_and_stored(engines: Any) -> None:
    engine = engines(gpu_blocks=120, cpu_slots=100, chunk=16, max_model_len=400)
    request = engine.add([1] * 5, 200)
    for _ in range(150):
        engine.step()
    while not engine.can_reset_running():
        engine.step()
    engine.reset(connector=False, running=True)
    before = engine.side.allocator.resident_depth(request.block_hashes)
    depths = resident_depths(engine, request, 60)
    assert depths[-1] > before
    engine.drain()
    engine.audit.check_drained()
    assert engine.side.allocator.resident_depth(request.block_hashes) == 204 // BLOCK
