"""Restores that follow a fetch: what a tier brings goes on to the GPU, with no step of the engine between."""

from collections.abc import Iterator

import pytest

from offload.messages import LOAD
from offload.testing.media.faulty import MediumFault
from offload.testing.virtual import MODELS
from offload.testing.virtual.tier import FETCH
from offload.worker.media.base import MediumJob, Verb
from tests.virtual.driver import come_to_rest, hold, release, serve, step_until, tokens, watch
from tests.virtual.test_tiers import BLOCK, LIMITS, POSITIONS, PROMPT, SLOTS, WHOLE, Tiered

AT_ONCE = LIMITS._replace(pool_share=1.0)
"""All of the prompt is fetched at once."""
EXTENT = POSITIONS * BLOCK
"""Tokens of an extent."""


RANKS: dict[str, dict[str, int]] = {
    "one rank": {},
    "three ranks": {"num_ranks": 3},
    "two replicas": {"num_ranks": 2, "replicas": 2},
    "pairs of replicas": {"num_ranks": 4, "replicas": 2},
}


@pytest.fixture(params=RANKS)
def tiered(request: pytest.FixtureRequest) -> Iterator[Tiered]:
    """A prompt is in the tier, and nowhere else; a fetch has a job for each extent."""
    tiered = Tiered(**RANKS[request.param], limits=AT_ONCE, fetch_gpu_share=1.0)
    tiered.ask()
    tiered.restart()
    tiered.tier.fetches._part_slots = POSITIONS
    tiered.engine.side.restores.first_part = POSITIONS
    yield tiered
    for medium in tiered.tier.media:
        medium.let_go()
    come_to_rest(tiered.engine)
    tiered.engine.close()


def fault_from(tiered: Tiered, index: int, fault: MediumFault, *ranks: int) -> None:
    """The jobs that get extents from that one on have it, on these ranks, or on all.

    Replicas take turns, the first with the first extent.
    """
    seen: dict[int, int] = {}
    first = index // tiered.engine.settings.replicas
    for rank, medium in enumerate(tiered.tier.media):

        def choose(job: MediumJob, rank: int = rank) -> MediumFault:
            if job.verb is not Verb.GET or (ranks and rank not in ranks):
                return MediumFault.NONE
            seen[rank] = seen.get(rank, 0) + job.num_extents
            return fault if seen[rank] > first else MediumFault.NONE

        medium._choose = choose


def routes(tiered: Tiered) -> set[str]:
    """Of the jobs in flight."""
    return {job.flow.route.verb for job in tiered.engine.side.ledger}


def test_a_restore_begins_in_the_step_of_its_fetch(tiered: Tiered) -> None:
    fault_from(tiered, 0, MediumFault.LATE)
    computed = watch(tiered.engine)
    request = tiered.engine.add(PROMPT, 1)
    tiered.engine.step()
    assert routes(tiered) == {FETCH.verb, LOAD.verb}
    (restore,) = tiered.engine.side.restores
    assert restore.follows and restore.pin is None
    tiered.engine.drain()
    assert computed[request.request_id] == len(PROMPT) - WHOLE


def test_what_has_come_is_on_the_gpu_before_the_rest_has_come(tiered: Tiered) -> None:
    fault_from(tiered, 6, MediumFault.STUCK)
    tiered.engine.add(PROMPT, 1)
    for _ in range(4):
        tiered.engine.step()
    (restore,) = tiered.engine.side.restores
    assert restore.num_blocks_landed == 6 * POSITIONS
    assert routes(tiered) == {FETCH.verb, LOAD.verb}


@pytest.mark.parametrize("num_blocks", [2 * POSITIONS, 2 * POSITIONS + 2])
def test_what_the_gpu_has_of_it_is_not_loaded(tiered: Tiered, num_blocks: int) -> None:
    """The pool fetches it, for it keeps chains from their beginning on."""
    serve(tiered.engine, PROMPT[: num_blocks * BLOCK])
    tiered.engine.side.allocator.evict(SLOTS)
    before = tiered.counts[LOAD]
    assert tiered.ask() == len(PROMPT) - WHOLE
    settings = tiered.engine.settings
    nbytes = (WHOLE // BLOCK - num_blocks) * settings.slot_bytes * settings.num_ranks
    assert tiered.counts[LOAD] - before == nbytes


def test_as_many_blocks_follow_as_may() -> None:
    """Of 140 GPU blocks the prompt takes 60."""
    for share, follows in ((59 / 140, False), (61 / 140, True)):
        tiered = Tiered(limits=AT_ONCE, fetch_gpu_share=share)
        tiered.ask()
        tiered.restart()
        tiered.fault(Verb.GET, MediumFault.LATE)
        request = tiered.engine.add(PROMPT, 1)
        tiered.engine.step()
        assert (LOAD.verb in routes(tiered)) == follows
        step_until(tiered.engine, request.is_finished)
        tiered.engine.close()


@pytest.mark.parametrize("fault", [MediumFault.FAIL, MediumFault.REFUSE, MediumFault.SHORT, MediumFault.TORN])
@pytest.mark.parametrize("ranks", [(), (0,)], ids=["all ranks", "first rank"])
def test_what_came_before_a_fault_is_used(tiered: Tiered, fault: MediumFault, ranks: tuple[int, ...]) -> None:
    fault_from(tiered, 6, fault, *ranks)
    failed: list[int] = []
    tiered.engine.side.restores.breaker.failed = lambda task, hangs=False: failed.append(task)  # type: ignore[method-assign]
    computed = watch(tiered.engine)
    request = tiered.engine.add(PROMPT, 1)
    step_until(tiered.engine, request.is_finished, 60)  # nobody waits for a deadline
    tiered.engine.drain()
    assert computed[request.request_id] == len(PROMPT) - 6 * EXTENT
    assert not failed, "nothing is wrong with the way to the GPU"
    assert tiered.ask() <= len(PROMPT) - 6 * EXTENT


def test_a_fetch_that_hangs_holds_nobody_up_for_ever(tiered: Tiered) -> None:
    fault_from(tiered, 6, MediumFault.STUCK)
    request = tiered.engine.add(PROMPT, 1)
    step_until(tiered.engine, request.is_finished, 80)
    for medium in tiered.tier.media:
        medium.let_go()
    tiered.engine.drain()
    allocator = tiered.engine.side.allocator
    assert allocator.num_filling + allocator.num_leaving == 0


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_reset_voids_both(tiered: Tiered, num_steps: int) -> None:
    fault_from(tiered, 6, MediumFault.LATE)
    computed = watch(tiered.engine)
    request = tiered.engine.add(PROMPT, 1)
    for _ in range(num_steps):
        tiered.engine.step()
    was_there = request.num_computed_tokens
    if tiered.engine.reset():
        tiered.engine.drain()
        assert computed[request.request_id] in (len(PROMPT), len(PROMPT) - was_there)
    tiered.engine.drain()
    assert request.is_finished()


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_who_goes_away_leaves_what_comes_to_others(tiered: Tiered, num_steps: int) -> None:
    fault_from(tiered, 6, MediumFault.LATE)
    request = tiered.engine.add(PROMPT, 1)
    for _ in range(num_steps):
        tiered.engine.step()
    tiered.engine.abort(request.request_id)
    come_to_rest(tiered.engine)
    fetched = tiered.counts[FETCH]
    assert tiered.ask() == len(PROMPT) - WHOLE
    assert tiered.counts[FETCH] == fetched, "it was in the pool"


def test_a_second_request_waits_for_the_restore_of_the_first(tiered: Tiered) -> None:
    fault_from(tiered, 0, MediumFault.LATE)
    engine = tiered.engine
    requests = [engine.add(PROMPT, 1), engine.add(PROMPT[:-1], 1)]
    engine.step()
    assert len(list(engine.side.restores)) == 1
    engine.drain()
    assert all(request.is_finished() for request in requests)
    nbytes = WHOLE // BLOCK * engine.settings.slot_bytes * engine.settings.num_ranks
    assert tiered.counts[LOAD] == nbytes
    assert tiered.counts[FETCH] == nbytes // engine.settings.replicas


def test_what_has_been_followed_stays_as_long_as_it_is_read(tiered: Tiered) -> None:
    """Once a fetch has landed its followers have pins: nothing that they read is evicted."""
    hold(tiered.engine, LOAD)
    request = tiered.engine.add(PROMPT, 1)
    for _ in range(6):
        tiered.engine.step()
    (restore,) = tiered.engine.side.restores
    assert routes(tiered) == {LOAD.verb} and restore.pin is not None
    assert len(restore.pin.slots) == WHOLE // BLOCK
    allocator = tiered.engine.side.allocator
    assert allocator.num_resident == WHOLE // BLOCK and not allocator.evict(allocator.capacity)
    release(tiered.engine)
    tiered.engine.drain()
    assert request.is_finished()


@pytest.mark.parametrize("fault", [MediumFault.LATE, MediumFault.FAIL, MediumFault.TORN])
@pytest.mark.parametrize("model", [model for model in MODELS if model != "plain"])
def test_any_model_follows_to_its_checkpoint_or_computes(model: str, fault: MediumFault) -> None:
    sizes = {"gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "positions": 8, "limits": AT_ONCE}
    tiered = Tiered(2, groups=MODELS[model], fetch_gpu_share=1.0, **sizes)
    prompt = tokens(150)
    tiered.ask(prompt)
    tiered.restart()
    fault_from(tiered, 0, fault)
    computed = watch(tiered.engine)
    request = tiered.engine.add(prompt, 1)
    tiered.engine.step()
    if fault is MediumFault.LATE:
        assert LOAD.verb in routes(tiered)
    tiered.engine.drain()
    size = tiered.engine.settings.block_tokens
    left = 150 % size or size
    assert computed[request.request_id] == (left if fault is MediumFault.LATE else 150)
    come_to_rest(tiered.engine)
    tiered.engine.close()


@pytest.mark.parametrize("model", MODELS)
def test_what_comes_is_not_offered_to_whom_the_gpu_gives_more(model: str) -> None:
    """Another request has computed beyond it meanwhile, and asked for nothing of it."""
    sizes = {"gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "positions": 8, "limits": AT_ONCE}
    tiered = Tiered(groups=MODELS[model], fetch_gpu_share=1.0, **sizes)
    prompt = tokens(150)
    tiered.ask(prompt)
    tiered.restart()
    fault_from(tiered, 0, MediumFault.STUCK)
    tiered.engine.add(prompt, 1)
    longer = [*prompt, *tokens(60, first=5)]
    computing = tiered.engine.add(longer, 1, hints={"cpu_offload_load": False})
    step_until(tiered.engine, computing.is_finished, 40)
    assert FETCH.verb in routes(tiered)
    request = tiered.engine.add([*longer, *tokens(9, first=7)], 1)
    step_until(tiered.engine, request.is_finished, 40)
    for medium in tiered.tier.media:
        medium.let_go()
    come_to_rest(tiered.engine)
    tiered.engine.close()


def test_a_bad_slot_that_is_found_before_its_fetch_has_ended_everywhere_is_dropped() -> None:
    """A byte rots on the first rank while the second still fetches: its position is not resident then."""
    tiered = Tiered(2, limits=AT_ONCE, fetch_gpu_share=1.0, verify_loads="always")
    tiered.ask()
    tiered.restart()
    hold(tiered.engine, LOAD, 0)
    fault_from(tiered, 0, MediumFault.STUCK, 1)
    request = tiered.engine.add(PROMPT, 1, hints={"cpu_offload_store": False})
    tiered.engine.step()
    (restore,) = tiered.engine.side.restores
    (arrival, *_) = tiered.engine.side.restores._arrivals.path(restore.chain, len(restore.chain))
    tiered.engine.ranks[0].rot(int(arrival.plan.slots[7, 0]), 0)
    release(tiered.engine)
    for _ in range(4):
        tiered.engine.step()
    tiered.tier.media[1].let_go()
    come_to_rest(tiered.engine)
    assert request.is_finished()
    assert tiered.engine.side.allocator.resident_depth(restore.chain) <= 7
    tiered.engine.close()
