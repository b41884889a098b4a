"""All full blocks of a completed request are stored, or counted; and nobody pays for those that wait."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from offload.messages import LOAD, STORE, Order, Route, StepPlan
from offload.scheduler import amounts
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import MODELS, VirtualEngine
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    depth_of,
    hold,
    release,
    serve,
    step_until,
    table_of,
    tokens,
    watch,
)

BLOCK = 4
CACHE = 64


@pytest.fixture
def unstored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Blocks that were not stored after all, by reason."""
    from offload.observe.metrics import Metrics

    counts, count = Counter[str](), Metrics.count

    def counted(self: Metrics, name: str, amount: float = 1, route: Route | None = None) -> None:
        if name.startswith("unstored_blocks_") and amount:
            counts[name.removeprefix("unstored_blocks_")] += int(amount)
        count(self, name, amount, route)

    monkeypatch.setattr(Metrics, "count", counted)
    yield counts
    assert all(num > 0 for num in counts.values()), f"{counts}"


def full_blocks(request: Request) -> int:
    """All but that of the last token, which was never computed; an embedding's has no such token."""
    computed = request.num_tokens if request.pooling_params else request.num_tokens - 1
    return computed // BLOCK


def prompts(num: int, length: int) -> list[list[int]]:
    rng = random.Random(length)
    return [[rng.randrange(512) for _ in range(length)] for _ in range(num)]


def fill(engine: VirtualEngine, num_blocks: int) -> Request:
    """A request that has ended, of that many full blocks, of which some are in flight and the rest queued."""
    request = engine.add(prompts(1, num_blocks * BLOCK)[0], 1)
    step_until(engine, request.is_finished)
    return request


def test_prompts_are_found_whole_by_whoever_asks_again(engines: Engines, unstored: Counter[str]) -> None:
    """256 blocks of 64 tokens on the GPU, prompts of 5,950 tokens one at a time, one token to generate."""
    engine = engines(
        gpu_blocks=256, cpu_slots=600, block_size=64, chunk=2048, copies=CopySchedule(longest_delay=3)
    )
    asked = prompts(5, 5950)
    for prompt in asked:
        serve(engine, prompt)
    computed = watch(engine)
    again = [serve(engine, prompt) for prompt in asked]
    assert [computed[request.request_id] for request in again] == [5950 - 5950 // 64 * 64] * 5
    assert not unstored


@pytest.mark.parametrize("is_pooled", [False, True], ids=["tokens", "embedding"])
@pytest.mark.parametrize("copies", [1, 4, 12])
@pytest.mark.parametrize("chunk", [CACHE * BLOCK // 8, CACHE * BLOCK])
@pytest.mark.parametrize("num_blocks", [4, 16, 32, 60])
def test_what_has_time_is_stored_whole(
    engines: Engines, unstored: Counter[str], num_blocks: int, chunk: int, copies: int, is_pooled: bool
) -> None:
    engine = engines(
        gpu_blocks=CACHE + 1, cpu_slots=300, chunk=chunk, copies=CopySchedule(longest_delay=copies)
    )
    for prompt in prompts(4, num_blocks * BLOCK):
        request = serve(engine, prompt, is_pooled=is_pooled)
        assert depth_of(engine, request) == num_blocks == full_blocks(request)
    assert not unstored
    come_to_rest(engine)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("copies", [1, 12])
@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(4, 1), (16, 1), (16, 40), (60, 1), (60, 12)])
def test_what_has_no_time_is_stored_or_counted(
    engines: Engines,
    unstored: Counter[str],
    num_blocks: int,
    max_tokens: int,
    copies: int,
    overlapped: bool,
) -> None:
    """Eight at once, and as many waiting: every full block is in the pool, or has a reason not to be."""
    engine = engines(
        gpu_blocks=CACHE + 1,
        cpu_slots=2000,
        chunk=CACHE * BLOCK,
        overlapped=overlapped,
        step_seconds=0.05,
        answer_run=4,
        copies=CopySchedule(longest_delay=copies),
    )
    requests = [engine.add(prompt, max_tokens) for prompt in prompts(16, num_blocks * BLOCK)]
    engine.drain()
    stored = sum(depth_of(engine, request) for request in requests)
    assert stored + unstored.total() == sum(map(full_blocks, requests))
    assert set(unstored) <= {"gave_way"}
    come_to_rest(engine)


def test_a_waiting_request_waits_for_the_queue_no_longer_than_patience_lasts(
    engines: Engines, unstored: Counter[str]
) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=0.1)
    hold(engine, STORE)
    ended = fill(engine, 60)
    queued = engine.side.stores.backlog.num_queued
    assert queued == 60 - (CACHE + 1) // 2
    other = engine.add(tokens(20 * BLOCK - 1, first=3), 2)
    for _ in range(5):
        engine.step()
        assert not other.num_output_tokens and not unstored, "it should have been patient"
    engine.step()
    engine.step()
    assert other.num_output_tokens, "nothing was given up for it"
    assert unstored == {"gave_way": 20 - 4 + 1}, "more than it lacks, and one to go on with"
    come_to_rest(engine)
    assert depth_of(engine, ended) == 60 - 17, "not the deepest positions"


def test_the_queue_gives_way_where_positions_are_several_blocks(
    engines: Engines, unstored: Counter[str]
) -> None:
    """Of 64 blocks 31 are in flight for ever, and 25 are queued. A prompt of 5 positions takes 25."""
    engine = engines(groups=MODELS["columns"], gpu_blocks=CACHE, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    fill(engine, 23)
    gpu, queued = engine.side._engine, engine.side.stores.backlog.num_queued
    assert gpu.groups.columns == 5 < gpu.num_free < 25 < gpu.num_free + queued
    request = engine.add(tokens(5 * engine.side.block_size - 1, first=3), 1)
    step_until(engine, request.is_finished, 25)  # what has waited for 30 is given up in any case
    assert unstored["gave_way"]
    come_to_rest(engine)


def test_who_waits_for_others_gets_nothing_of_the_queue(engines: Engines, unstored: Counter[str]) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, max_num_seqs=2)
    hog = engine.add(tokens(19 * BLOCK, first=3), 50)
    step_until(engine, lambda: hog.num_output_tokens > 0)
    ended = fill(engine, 40)
    engine.add(tokens(60 * BLOCK, first=4), 1)
    step_until(engine, lambda: depth_of(engine, ended) == 40)
    assert not hog.is_finished() and not unstored
    come_to_rest(engine)


def test_no_running_request_is_preempted_for_the_queue(engines: Engines, unstored: Counter[str]) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=0.1)
    runs = [engine.add(tokens(3, first=3 + index), 5 * BLOCK) for index in range(3)]
    step_until(engine, lambda: all(run.num_output_tokens > 0 for run in runs))
    hold(engine, STORE)
    ended = fill(engine, 50)
    assert engine.side.stores.backlog.num_queued == 50 - (CACHE + 1) // 2
    step_until(engine, lambda: all(run.is_finished() for run in runs))
    assert engine.counts["preemptions"] == 0
    release(engine)
    come_to_rest(engine)
    assert unstored["gave_way"] and depth_of(engine, ended) == 50 - unstored["gave_way"]


def test_requests_without_a_turn_in_a_step_find_room_in_the_next(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pipeline parallelism each step schedules some of those that run; the others may still prefill."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=0.1)
    runs = [engine.add(tokens(3, first=3 + index), 20) for index in range(3)]
    step_until(engine, lambda: all(run.num_output_tokens > 0 for run in runs))
    hold(engine, STORE)
    fill(engine, 40)
    engine.step()
    assert engine.side.stores.backlog.num_queued == 8
    plan = engine.side.stores.plan

    def plan_for_others(output: SchedulerOutput, num_admitted: int) -> list[Order]:
        scheduled = {run.request_id: 1 for run in runs[1:]}
        return plan(
            replace(output, num_scheduled_tokens=scheduled, total_num_scheduled_tokens=2), num_admitted
        )

    monkeypatch.setattr(engine.side.stores, "plan", plan_for_others)
    engine.step()
    assert engine.side.stores.backlog.num_queued == 0 and unstored == {"gave_way": 8}
    monkeypatch.undo()
    come_to_rest(engine)


def test_a_restored_request_finds_room_for_the_rest_of_its_prompt(
    engines: Engines, unstored: Counter[str]
) -> None:
    """The scheduler does not ask about it again when its KV is there, and others have come meanwhile."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, max_num_seqs=2)
    head = tokens(4 * BLOCK, first=5)
    serve(engine, head)
    assert engine.reset(connector=False)
    hold(engine, STORE)
    hold(engine, LOAD)
    fill(engine, 56)
    restored = engine.add(head + tokens(8 * BLOCK, first=6), 1)
    step_until(engine, lambda: restored.status == LOADING)
    other = engine.add(tokens(8 * BLOCK - 1, first=7), 40)
    step_until(engine, lambda: other.num_output_tokens > 0)
    for copier in engine.copiers:
        copier.held.discard(LOAD)
    step_until(engine, restored.is_finished, max_steps=5)
    assert not other.is_finished() and unstored
    come_to_rest(engine)


def test_while_a_request_lacks_more_than_the_queue_has_no_store_begins(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would keep it waiting for one more copy."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=0.1)
    steps = [0]
    monkeypatch.setattr(amounts, "holdable_blocks", lambda _, num_held, **__: len(steps) - num_held)
    hold(engine, STORE)
    fill(engine, 60)
    other = engine.add(prompts(1, 60 * BLOCK - 1)[0], 1)
    while len(steps) < 20:
        steps.append(len(steps))
        engine.step()
    assert engine.side.stores.holds.num_held == 7 and not unstored, "it has stored on after half a second"
    release(engine)
    step_until(engine, other.is_finished, max_steps=4)
    come_to_rest(engine)


def test_a_reset_drops_the_queue(engines: Engines, unstored: Counter[str]) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    fill(engine, 60)
    queued = engine.side.stores.backlog.num_queued
    assert engine.reset() is False and queued
    assert unstored == {"reset": queued} and not engine.side.stores.backlog.num_queued
    come_to_rest(engine)
    assert unstored == {"reset": 60}, "what was in flight is lost as well"
    assert engine.side.allocator.num_resident == 0 and engine.reset() is True


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STUCK])
def test_an_outage_drops_the_queue(engines: Engines, unstored: Counter[str], fault: Fault) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    engine.copiers[0].force(STORE, *[fault] * 60)
    fill(engine, 60)
    assert engine.side.stores.backlog.num_queued
    for _ in range(8):
        step_until(engine, fill(engine, 3).is_finished)
    step_until(engine, lambda: not engine.side.stores.backlog.num_queued)
    assert unstored["cut_off" if fault is Fault.FAIL else "outage"]
    engine.copiers[0].relent()
    come_to_rest(engine)


def test_copies_behind_one_that_failed_are_counted(engines: Engines, unstored: Counter[str]) -> None:
    """They end well, one after the other, and what is before them has left the pool."""
    one_by_one = CopySchedule(bytes_per_poll=64)
    engine = engines(
        gpu_blocks=CACHE + 1, cpu_slots=300, chunk=5 * BLOCK, copies=one_by_one, step_seconds=0.01
    )
    hold(engine, STORE)
    engine.copiers[0].force(STORE, Fault.FAIL)
    ended = fill(engine, 20)
    assert len(engine.side.ledger) == 4 and not engine.side.stores.backlog.num_queued
    come_to_rest(engine)
    assert depth_of(engine, ended) == 0 and unstored == {"outage": 5, "cut_off": 15}


def test_a_siblings_failed_load_drops_the_queue(engines: Engines, unstored: Counter[str]) -> None:
    """What was computed on top of it cannot be told from the rest."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    ended = fill(engine, 60)
    assert engine.side.stores.backlog.num_queued
    engine.side.receive(None, {1})
    come_to_rest(engine)
    assert depth_of(engine, ended) == 0 and unstored["outage"]


def test_a_queue_that_does_not_move_is_dropped(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=1.0)
    monkeypatch.setattr(amounts, "holdable_blocks", lambda *_, **__: 0)
    fill(engine, 60)
    for _ in range(29):
        engine.step()
        assert not engine.is_idle(), "its stores travel on steps"
    for _ in range(3):
        engine.step()
    assert engine.is_idle() and unstored == {"overdue": 60}
    come_to_rest(engine)


def test_what_the_policy_declines_is_counted_and_not_tried_for_ever(
    engines: Engines, unstored: Counter[str]
) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=10, chunk=CACHE * BLOCK, eviction_policy="fifo")
    ended = fill(engine, 60)
    engine.drain(100)
    assert depth_of(engine, ended) == 10 and unstored == {"not_admitted": 50}


def test_an_idle_time_without_steps_drops_nothing(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in its caller's process steps when it is called."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    ended = fill(engine, 60)
    clock, idle = engine.side.stores.backlog._clock, 3600.0
    monkeypatch.setattr(engine.side.stores.backlog, "_clock", lambda: clock() + idle)
    come_to_rest(engine)
    assert depth_of(engine, ended) == 60 and not unstored


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_prompt_blocks", [1, 60])
def test_an_aborted_request_is_stored_as_far_as_it_was_computed(
    engines: Engines, unstored: Counter[str], num_prompt_blocks: int, overlapped: bool
) -> None:
    """Its client has gone; or an answer ended with a stop string, which only the front end sees."""
    engine = engines(
        gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, overlapped=overlapped, answer_run=100
    )
    request = engine.add(prompts(1, num_prompt_blocks * BLOCK)[0], 15)
    step_until(engine, lambda: request.num_output_tokens > 2 * BLOCK)
    engine.abort(request.request_id)
    come_to_rest(engine)
    assert num_prompt_blocks + 2 <= depth_of(engine, request) == full_blocks(request)
    assert not unstored


def test_a_prompt_that_is_aborted_half_way_is_stored_half(engines: Engines, unstored: Counter[str]) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=20 * BLOCK + 1)
    hold(engine, STORE)
    request = engine.add(prompts(1, 60 * BLOCK)[0], 8)
    step_until(engine, lambda: request.num_computed_tokens == 2 * (20 * BLOCK + 1))
    engine.abort(request.request_id)
    come_to_rest(engine)
    assert depth_of(engine, request) == 40 and not unstored


def test_a_request_that_is_aborted_before_it_resumes_is_not_stored(
    engines: Engines, unstored: Counter[str]
) -> None:
    """It ran and was preempted; its KV is on its way back into other blocks, with nothing in them yet."""
    engine = engines(gpu_blocks=10, cpu_slots=50, policy="priority", max_num_seqs=2)
    hog, victim = engine.add(tokens(4), 31), engine.add(tokens(12, first=1), 16, priority=2)
    step_until(engine, lambda: victim.num_preemptions > 0)
    hold(engine, LOAD)
    step_until(engine, lambda: victim.status == LOADING)
    assert hog.is_finished() or hog.num_output_tokens
    engine.side.allocator.drop(victim.block_hashes, 0)  # as when another's load of it fails
    engine.abort(victim.request_id)
    assert engine.side.allocator.known_depth(victim.block_hashes, 3) == 0
    come_to_rest(engine)
    assert depth_of(engine, victim) == 0


@pytest.mark.parametrize("num_cached", [0, 20])
def test_what_the_gpu_has_of_a_waiting_request_counts_as_lacking(
    engines: Engines, unstored: Counter[str], num_cached: int
) -> None:
    """Its cached blocks lie among the free ones: taking them leaves as few to others as new ones would."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK, step_seconds=0.1)
    begins = tokens(20 * BLOCK, first=3)
    if num_cached:
        serve(engine, begins)
    hold(engine, STORE)
    fill(engine, 40)
    assert engine.side.stores.backlog.num_queued == 8
    other = engine.add(begins + tokens(8 * BLOCK - 1, first=5), 2)
    steps = 0
    while not other.num_output_tokens:
        engine.step()
        steps += 1
    assert steps == 7, "half a second of patience, and a step each to give way and to compute"
    assert unstored == {"gave_way": 28 - 24 + 1}, "more than it lacks, and one to go on with"
    come_to_rest(engine)


def test_nothing_gives_way_to_a_request_that_lacks_no_blocks(
    engines: Engines, unstored: Counter[str]
) -> None:
    """It waits for a step that can compute all of it: without chunks, beside one that runs, there is none."""
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=20 * BLOCK, step_seconds=0.1)
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    runs = engine.add(tokens(3), 20)
    step_until(engine, lambda: runs.num_output_tokens > 0)
    hold(engine, STORE)
    for ended in [engine.add(prompt, 1) for prompt in prompts(2, 19 * BLOCK)]:
        step_until(engine, ended.is_finished)
    before = unstored.copy()
    assert engine.side.stores.backlog.num_queued
    other = engine.add(prompts(1, 20 * BLOCK)[0], 1)
    step_until(engine, runs.is_finished)
    assert not other.num_output_tokens and unstored == before
    come_to_rest(engine)


def test_what_follows_blocks_that_were_evicted_is_counted(engines: Engines, unstored: Counter[str]) -> None:
    """A prompt is stored, and evicted while its request answers. It is not stored a second time."""
    engine = engines(gpu_blocks=129, cpu_slots=20, chunk=64 * BLOCK, eviction_policy="lru", answer_run=BLOCK)
    answers = engine.add(prompts(1, 4 * BLOCK)[0], 24 * BLOCK + 1)
    step_until(engine, lambda: depth_of(engine, answers) == 4)
    engine.add(prompts(1, 20 * BLOCK)[0], 1)
    step_until(engine, answers.is_finished)
    come_to_rest(engine)
    assert unstored == {"cut_off": full_blocks(answers) - 4}


def test_blocks_of_requests_that_are_over_count_when_their_store_fails(
    engines: Engines, unstored: Counter[str]
) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    ended = fill(engine, 20)
    engine.copiers[0].held.clear()
    engine.side.stores._spoil_jobs()
    come_to_rest(engine)
    assert depth_of(engine, ended) == 0 and unstored == {"outage": 20}


def test_few_stores_begin_at_once_however_many_requests_end(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(gpu_blocks=2000, cpu_slots=2000, chunk=2000 * BLOCK, max_num_seqs=100, answer_run=100)
    requests = [engine.add(tokens(1, first=number), 40) for number in range(100)]
    step_until(engine, lambda: all(request.num_output_tokens > 3 * BLOCK for request in requests))
    began: list[int] = []
    begin_step = engine.side.build_plan

    def watched(output: SchedulerOutput) -> StepPlan:
        plan = begin_step(output)
        began.append(sum(order.route == STORE for order in plan.orders))
        return plan

    monkeypatch.setattr(engine.side, "build_plan", watched)
    for request in requests:
        engine.abort(request.request_id)
    come_to_rest(engine)
    assert sum(began) == 100 and max(began) <= 32, "16 as they end, and 16 in the step after that"
    assert all(depth_of(engine, request) == 3 for request in requests) and not unstored


def test_nothing_that_was_noted_before_a_siblings_load_failed_is_stored(
    engines: Engines, unstored: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes back what was computed on top of the blocks, and computes it anew."""
    engine = engines(gpu_blocks=600, cpu_slots=900, chunk=16, max_num_seqs=16, answer_run=100)
    others = [engine.add(tokens(3, first=3 + number), 200) for number in range(15)]
    step_until(engine, lambda: all(request.num_output_tokens > 0 for request in others))
    with monkeypatch.context() as patch:
        patch.setattr(amounts, "holdable_blocks", lambda *_, **__: 0)
        request = engine.add(prompts(1, 15 * BLOCK)[0], 4)
        step_until(engine, lambda: request.num_computed_tokens == 10 * BLOCK)
        table = table_of(engine, request)
        engine.scheduler._update_requests_with_invalid_blocks(engine.scheduler.running, {table[1]}, {})
        engine.side.receive(None, {table[1]})
        for rank in engine.ranks:
            rank.cells[:, table[1:10]] = 12345
    step_until(engine, request.is_finished)  # after every step, what is resident is looked at
    come_to_rest(engine)


def test_what_two_of_the_queue_share_is_stored_once(engines: Engines, unstored: Counter[str]) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    prompt = prompts(1, 60 * BLOCK)[0]
    hold(engine, STORE)
    both = [engine.add(prompt, 1) for _ in range(2)]
    step_until(engine, lambda: all(request.is_finished() for request in both))
    assert engine.side.stores.backlog.num_queued == 2 * (60 - (CACHE + 1) // 2)
    come_to_rest(engine)
    assert depth_of(engine, both[1]) == 60 == engine.side.allocator.num_resident
    assert engine.side.metrics._shown["queued_blocks"] == 0, "the gauge stands still"
    assert not unstored


def test_the_queue_shows_in_the_metrics(engines: Engines) -> None:
    engine = engines(gpu_blocks=CACHE + 1, cpu_slots=300, chunk=CACHE * BLOCK)
    hold(engine, STORE)
    fill(engine, 60)
    engine.side.take_metrics()
    engine.side.stores.reset()
    assert engine.side.take_metrics()["unstored_blocks_reset"] == 60 - (CACHE + 1) // 2
    come_to_rest(engine)
