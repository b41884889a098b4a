"""A store that others write, too, below the pool: real flows and lanes, over media that share memory."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from offload.scheduler.tiers.beliefs import FRESH_SECONDS, KEEP_SECONDS
from offload.scheduler.tiers.probes import LATE_SECONDS, MOST_QUESTIONS, WAIT_SECONDS
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit
from offload.testing.media.faulty import MediumFault
from offload.testing.media.store import MemoryStore
from offload.testing.virtual import MODELS, VirtualSettings
from offload.testing.virtual.run import run_seed
from offload.testing.virtual.store import FETCH, PROBE, SPILL, VirtualStore
from offload.worker.media.base import MediumJob, Verb
from tests.seeds import OTHER_SEEDS, seeds_of_runs
from tests.virtual import test_tiers
from tests.virtual.driver import come_to_rest, forget_gpu, step_until, tokens, watch
from tests.virtual.test_tiers import BLOCK, POSITIONS, PROMPT, WHOLE, Tiered

STEP = 0.005
"""Seconds."""
REST = len(PROMPT) - WHOLE
EXTENT = POSITIONS * BLOCK
"""Tokens of one."""


class Stored(Tiered):
    """An engine over a store, which it shares with others that are given it."""

    tier: VirtualStore

    def __init__(self, num_ranks: int = 1, *, store: MemoryStore | None = None, **others: Any) -> None:
        self.store = MemoryStore() if store is None else store
        super().__init__(num_ranks, **{"step_seconds": STEP} | others)

    def make_tier(self, num_places: int, positions: int, limits: TierLimits) -> VirtualStore:
        return VirtualStore(store=self.store, positions=positions, limits=limits)

    def wait(self, seconds: float) -> None:
        """Let that time go by, with nothing to do."""
        self.engine.history.step += int(seconds / STEP) + 1

    def end(self) -> None:
        self.tier.choose = None
        for medium in self.tier.media:
            medium.let_go()
        come_to_rest(self.engine)
        self.engine.close()


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    stored = Stored(request.param)
    yield stored
    stored.end()


def test_what_one_engine_computed_the_other_restores(stored: Stored) -> None:
    assert stored.ask() == len(PROMPT)
    other = Stored(stored.engine.settings.num_ranks, store=stored.store)
    assert other.ask() == REST
    assert other.counts[FETCH] == stored.counts[SPILL]
    other.end()


def test_engines_that_run_beside_each_other_share() -> None:
    store = MemoryStore()
    both = [Stored(2, store=store, cpu_slots=400) for _ in range(2)]
    stored, other = both
    prompts = [tokens(63 * BLOCK + 2, first=first) for first in range(4)]
    assert [stored.ask(each) for each in prompts[:2]] == [len(PROMPT)] * 2
    assert [other.ask(each) for each in prompts] == [REST, REST, len(PROMPT), len(PROMPT)]
    assert [stored.ask(each) for each in prompts[2:]] == [REST] * 2
    for each in both:
        each.end()


def test_what_is_there_is_not_put_again(stored: Stored) -> None:
    stored.ask()
    num_kept = len(stored.store.kept)
    other = Stored(stored.engine.settings.num_ranks, store=stored.store)
    other.ask()
    assert not other.counts[SPILL], "it has seen that it is there"
    assert (len(stored.store.kept), stored.store.num_present) == (num_kept, 0)
    other.wait(KEEP_SECONDS)
    other.evict()
    other.ask()
    assert len(stored.store.kept) >= num_kept
    other.end()


def test_what_two_compute_at_once_is_kept_once(stored: Stored) -> None:
    other = Stored(stored.engine.settings.num_ranks, store=stored.store)
    for each in (stored, other):
        each.engine.add(PROMPT, 1)
    for _ in range(30):
        for each in (stored, other):
            each.engine.step()
    assert len(stored.store.kept) == 15 * stored.engine.settings.num_ranks
    assert stored.store.num_present == 15 * stored.engine.settings.num_ranks
    other.end()


def test_after_a_reset_each_finds_its_own_alone(stored: Stored) -> None:
    """Weights are others now. What is there is left to engines with the first ones."""
    stored.ask()
    stored.evict()
    plain = dict(stored.store.kept)
    assert stored.engine.reset()
    assert stored.ask() == len(PROMPT)
    other = tokens(63 * BLOCK + 2, first=3)
    stored.ask(other)
    stored.evict()
    assert stored.ask(other) == REST, "what was written since"
    second = Stored(stored.engine.settings.num_ranks, store=stored.store)
    assert second.ask(other) == len(PROMPT), "what was written since is nobody else's"
    second.evict()
    assert second.engine.reset()
    assert second.ask(other) == len(PROMPT), "nor is it of another that was reset"
    assert plain.items() <= stored.store.kept.items(), "nothing was taken away"
    second.end()
    stored.restart()
    assert stored.ask() == REST
    assert stored.store.kept


def test_weights_with_a_name_find_what_any_engine_has_written(stored: Stored) -> None:
    test_tiers.test_weights_with_a_name_find_what_they_have_written(stored)
    other = Stored(stored.engine.settings.num_ranks, store=stored.store)
    for version, computed in (("one", REST), ("four", len(PROMPT)), ("two", REST)):
        assert other.engine.load_weights(version)
        assert other.ask() == computed
        other.evict()
    other.end()


def test_a_second_reset_hides_what_came_after_the_first(stored: Stored) -> None:
    stored.engine.reset()
    stored.ask()
    stored.evict()
    assert stored.ask() == REST
    stored.evict()
    stored.engine.reset()
    assert stored.ask() == len(PROMPT)


@pytest.mark.parametrize("index", [0, 7, 14])
def test_what_one_rank_lacks_nobody_has(stored: Stored, index: int) -> None:
    """The store has evicted one rank's part. What follows it is computed, and put again."""
    stored.ask()
    stored.restart()
    rank = stored.engine.settings.num_ranks - 1
    [key] = [key for key, each in stored.store.kept.items() if key.rank == rank and each.depth == index]
    stored.store.evict(key)
    first = stored.ask()
    assert REST + (15 - index) * EXTENT <= first <= len(PROMPT)
    assert not stored.tier.fetches.breaker.is_outage
    stored.restart()
    assert stored.ask() == REST, "it was put again"


def num_jobs(stored: Stored, verb: Verb) -> int:
    """That all media of this engine were given."""
    return sum(medium.num_jobs[verb] for medium in stored.tier.media)


def empty_pool(stored: Stored) -> None:
    """Neither the GPU nor the pool has anything any longer."""
    forget_gpu(stored.engine)
    stored.engine.side.allocator.evict(stored.engine.side.allocator.num_resident)


def test_what_is_gone_is_not_offered_again(stored: Stored) -> None:
    """It was seen, and evicted after that. Nobody puts it again, and it is asked for once."""
    stored.ask()
    empty_pool(stored)
    for key in list(stored.store.kept):
        stored.store.evict(key)
    stored.fault(Verb.PUT, MediumFault.REFUSE)
    assert stored.ask() == len(PROMPT)
    gets = num_jobs(stored, Verb.GET)
    assert gets, "it was believed to be there"
    for _ in range(3):
        empty_pool(stored)
        assert stored.ask() == len(PROMPT)
    assert num_jobs(stored, Verb.GET) == gets


def test_a_store_that_lies_is_believed_once(stored: Stored) -> None:
    stored.tier.choose = lambda job: {Verb.PROBE: MediumFault.LIE, Verb.PUT: MediumFault.REFUSE}.get(
        job.verb, MediumFault.NONE
    )
    assert stored.ask() == len(PROMPT)
    gets = num_jobs(stored, Verb.GET)
    assert gets, "it was believed"
    empty_pool(stored)
    assert stored.ask() == len(PROMPT)
    assert num_jobs(stored, Verb.GET) == gets


def test_wrong_bytes_are_dropped_there_and_put_again(stored: Stored) -> None:
    stored.ask()
    stored.restart()
    [first, *_] = (each for each in stored.store.kept.values() if not each.depth)
    first.content[1] ^= 1
    num_kept = len(stored.store.kept)
    assert stored.ask() == len(PROMPT)
    stored.restart()
    assert len(stored.store.kept) == num_kept
    assert stored.ask() == REST


@pytest.mark.parametrize("fault", [MediumFault.FAIL, MediumFault.SHORT, MediumFault.TORN, MediumFault.REFUSE])
@pytest.mark.parametrize("verb", list(Verb))
def test_a_fault_is_a_miss(stored: Stored, verb: Verb, fault: MediumFault) -> None:
    stored.fault(verb, fault)
    stored.ask()
    stored.restart()
    least = REST if (verb, fault) == (Verb.PUT, MediumFault.FAIL) else REST + 1  # it was there before
    assert least <= stored.ask() <= len(PROMPT)


# Time


def test_an_answer_that_is_late_serves_the_next() -> None:
    stored = Stored()
    stored.ask()
    stored.restart()
    stored.fault(Verb.PROBE, MediumFault.STUCK)
    began = stored.engine.clock()
    computed = watch(stored.engine)
    request = stored.engine.add(PROMPT, 1)
    step_until(stored.engine, lambda: request.request_id in computed, 20)
    assert stored.engine.clock() - began <= WAIT_SECONDS + 3 * STEP
    step_until(stored.engine, request.is_finished, 20)
    assert computed[request.request_id] == len(PROMPT)
    stored.tier.choose = None
    for medium in stored.tier.media:
        medium.let_go()
    step_until(stored.engine, lambda: not stored.tier.probes._open, 5)
    stored.fault(Verb.PROBE, MediumFault.REFUSE)
    empty_pool(stored)
    assert stored.ask() == REST
    stored.end()


def hang(stored: Stored) -> None:
    """Let the store never answer, until that is known."""
    stuck, refused = MediumFault.STUCK, MediumFault.REFUSE
    stored.tier.choose = lambda job: stuck if job.verb is Verb.PROBE else refused
    request = stored.engine.add(tokens(2 * EXTENT, first=99), 1)
    step_until(stored.engine, request.is_finished, 20)
    stored.wait(LATE_SECONDS)
    stored.engine.step()
    assert stored.tier.probes.breaker.is_outage


def test_nobody_waits_for_a_store_that_hangs() -> None:
    stored = Stored()
    hang(stored)
    for first in range(5):
        began = stored.engine.num_steps
        request = stored.engine.add(tokens(20 * BLOCK, first=first), 1)
        step_until(stored.engine, request.is_finished, 20)
        assert stored.engine.num_steps - began <= 4
    assert not stored.engine.side.has_pending_work or stored.tier.spills.is_busy
    stored.end()


def test_questions_are_bounded() -> None:
    stored = Stored()
    stored.fault(Verb.PROBE, MediumFault.STUCK)
    requests = [stored.engine.add(tokens(2 * EXTENT, first=first), 1) for first in range(MOST_QUESTIONS + 20)]
    stored.engine.step()
    assert len(stored.tier.probes._open) == MOST_QUESTIONS
    step_until(stored.engine, lambda: all(each.is_finished() for each in requests), 1000)
    stored.end()


def test_what_was_seen_is_not_asked_for_again_at_once(stored: Stored) -> None:
    stored.ask()
    num_asked = num_jobs(stored, Verb.PROBE)
    stored.evict()
    before = num_jobs(stored, Verb.PROBE)
    stored.ask()
    assert num_jobs(stored, Verb.PROBE) == before > num_asked
    stored.evict()
    stored.wait(FRESH_SECONDS)
    before = num_jobs(stored, Verb.PROBE)
    stored.ask()
    assert num_jobs(stored, Verb.PROBE) > before


def steps_of(places: bool) -> list[list[tuple[str, int]]]:
    """What each step schedules of a day's requests, by request."""
    stored = Stored(cpu_slots=2000)  # what is on its way down keeps nothing from being stored
    if not places:
        stored.engine.close()
        stored.engine = type(stored.engine)(VirtualSettings(**stored.settings), random.Random(0))
    else:
        hang(stored)
    engine = stored.engine
    rng = random.Random(5)
    trace: list[list[tuple[str, int]]] = []
    requests, names = [], dict[str, str]()
    schedule = engine.scheduler.schedule

    def seen(*arguments: Any, **keywords: Any) -> Any:
        output = schedule(*arguments, **keywords)
        trace.append([(names[each], count) for each, count in output.num_scheduled_tokens.items()])
        return output

    engine.scheduler.schedule = seen
    for number in range(40):
        request = engine.add(tokens(rng.randrange(4, 60) * BLOCK, first=rng.randrange(12)), 4)
        requests.append(request)
        names[request.request_id] = str(number)
        for _ in range(rng.randrange(3)):
            engine.step()
    step_until(engine, lambda: all(each.is_finished() for each in requests), 1000)
    seen_so_far = trace.copy()
    if places:
        stored.end()
    return seen_so_far


def test_steps_are_those_without_a_tier_when_the_store_never_answers() -> None:
    assert steps_of(True) == steps_of(False)


# Checkpoints


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_any_model_goes_on_from_a_store(model: str, replicas: int) -> None:
    """Also where each of two ranks has some of the checkpoints."""
    sizes = {"groups": MODELS[model], "gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "positions": 8}
    stored = Stored(2, replicas=replicas, **sizes)
    prompt = tokens(150)
    assert stored.ask(prompt) == 150
    other = Stored(2, replicas=replicas, store=stored.store, **sizes)
    size = stored.engine.settings.block_tokens
    left = 150 % size or size
    left += 150 // size * size % (8 * size) if model == "plain" else 0  # of no whole extent
    assert other.ask(prompt) == left
    other.restart()
    assert other.ask([*prompt, *tokens(20, first=5)]) == left + 20
    for each in (other, stored):
        each.end()


def test_a_checkpoint_of_which_a_part_is_gone_is_not_offered_again() -> None:
    stored = Stored(2, groups=MODELS["window"], gpu_blocks=300, cpu_slots=600, chunk=64, positions=8)
    prompt = tokens(150)
    stored.ask(prompt)
    stored.restart()
    key = min(stored.store.kept, key=lambda key: stored.store.kept[key].depth)
    stored.store.evict(key)
    assert stored.ask(prompt) == 150
    gets = num_jobs(stored, Verb.GET)
    stored.end()
    assert gets


# Random histories

TURNS = 150


def random_history(seed: int) -> VirtualStore:
    """Faults, evictions by the store, resets and aborts; the audit looks at every byte."""
    rng = random.Random(seed)
    rate, lost = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.1, 0.3])
    faults = [each for each in MediumFault if each not in (MediumFault.NONE, MediumFault.WRONG_BYTES)]

    def choose(job: MediumJob) -> MediumFault:
        return rng.choice(faults) if rng.random() < rate else MediumFault.NONE

    def disturb(store: MemoryStore) -> None:
        if rng.random() < lost:
            if rng.random() < 0.5:
                store.evict_deepest()
            elif store.kept:
                store.evict(rng.choice(list(store.kept)))
        elif rng.random() < lost / 4 and store.kept:
            store.kept[rng.choice(list(store.kept))].content[3] ^= 1
            tier.num_faults += 1

    tier = VirtualStore(
        positions=rng.choice([1, 2, 4]),
        limits=TierLimits(admit=rng.choice(list(Admit)), least_tokens=4, wait_seconds=0.2),
        choose=choose,
        disturb=disturb,
        stuck_polls=50,
        num_lives=rng.choice([1, 2]),
    )
    settings = VirtualSettings(
        cpu_slots=rng.choice([16, 24, 48]),
        gpu_blocks=rng.choice([14, 24]),
        num_ranks=rng.choice([1, 2]),
        overlapped=rng.random() < 0.5,
        seals_of_blocks=rng.random() < 0.5,
        block_outermost=rng.random() < 0.5,
        step_seconds=rng.choice([0.05, 1.0]),
        tier=tier,
    )
    run_seed(seed, TURNS, settings)
    return tier


def test_random_histories_with_a_store() -> None:
    moved = Counter[Verb]()
    seeds = seeds_of_runs(0, 12)
    for seed in seeds:
        for medium in random_history(seed).media:
            moved.update(medium.moved)
    if OTHER_SEEDS == 0:
        enough = 50 * len(seeds) / 12
        assert all(moved[verb] > enough for verb in Verb), f"too little has happened: {moved}"


def test_each_route_counts() -> None:
    stored = Stored()
    stored.ask()
    nbytes = WHOLE // BLOCK * stored.engine.settings.slot_bytes
    assert stored.counts[SPILL] == nbytes and not stored.counts[PROBE]
    stored.end()
