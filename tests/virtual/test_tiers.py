"""A tier below the pool, the product's own flows and lanes over a medium in memory."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from offload.errors import OperatorError
from offload.messages import Route
from offload.observe.metrics import Metrics
from offload.scheduler.tiers.cold_end import ColdEnd
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit
from offload.testing.media.faulty import MediumFault
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings
from offload.testing.virtual import engine as virtual_engine
from offload.testing.virtual.run import run_seed
from offload.testing.virtual.tier import FETCH, SPILL, VirtualTier
from offload.vllm import kv_events
from offload.worker.media.base import MediumJob, Verb
from tests.seeds import OTHER_SEEDS, seeds_of_runs
from tests.virtual.driver import come_to_rest, forget_gpu, publish_events, serve, step_until, tokens, watch
from tests.virtual.test_event_storms import watch_events

BLOCK = 4
SLOTS = 96
POSITIONS = 4
"""Of an extent."""
PROMPT = tokens(63 * BLOCK + 2)
WHOLE = 15 * POSITIONS * BLOCK
"""Tokens of its extents."""
LIMITS = TierLimits(least_tokens=2 * BLOCK)
ASKED = ("route_probed_extents", "route_found_extents")


class Tiered:
    """An engine whose pool holds a prompt and a half, with a tier that holds many."""

    def __init__(
        self,
        num_ranks: int = 1,
        num_places: int = 200,
        limits: TierLimits = LIMITS,
        positions: int = POSITIONS,
        **settings: Any,
    ) -> None:
        self.tier = self.make_tier(num_places, positions, limits)
        self.settings = {"cpu_slots": SLOTS, "gpu_blocks": 140, "num_ranks": num_ranks, **settings}
        self.start()

    def make_tier(self, num_places: int, positions: int, limits: TierLimits) -> VirtualTier:
        return VirtualTier(num_places, positions=positions, limits=limits)

    def start(self) -> None:
        """A new engine over what the tier has kept."""
        settings = VirtualSettings(places=(self.tier.place,), **self.settings)
        self.engine = VirtualEngine(settings, random.Random(0))
        self.counts = Counter[Route]()
        """Bytes by route."""
        self.asked: list[int] = [0, 0]
        """Extents that requests asked the tier for, and those of them that it had."""
        count = self.engine.side.metrics.count

        def counted(name: str, amount: float = 1, route: Route | None = None) -> None:
            if route is not None and name == "route_bytes":
                self.counts[route] += int(amount)
            if route == FETCH and name in ASKED:
                self.asked[ASKED.index(name)] += int(amount)
            count(name, amount, route)

        self.engine.side.metrics.count = counted  # type: ignore[method-assign]

    def restart(self) -> None:
        """The engine ends as if it were killed, and another begins."""
        self.engine.close()
        self.start()

    def evict(self) -> None:
        """Neither the GPU nor the pool has the prompt any longer."""
        for first in (7, 8, 9):
            for _ in range(2):
                serve(self.engine, tokens(63 * BLOCK, first=first))
        forget_gpu(self.engine)

    def ask(self, prompt: list[int] = PROMPT) -> int:
        """Tokens that are computed for the prompt."""
        computed = watch(self.engine)
        request = serve(self.engine, prompt)
        return computed[request.request_id]

    def fault(self, verb: Verb, fault: MediumFault) -> None:
        """Let all such jobs have it."""

        def choose(job: MediumJob) -> MediumFault:
            return fault if job.verb is verb else MediumFault.NONE

        self.tier.choose = choose


@pytest.fixture(params=[(1, 1.0), (3, 1.0), (3, 0.0)], ids=["one rank", "three ranks", "one by one"])
def tiered(request: pytest.FixtureRequest) -> Iterator[Tiered]:
    num_ranks, share = request.param
    tiered = Tiered(num_ranks, fetch_gpu_share=share)
    yield tiered
    tiered.tier.choose = None
    for medium in tiered.tier.media:
        medium.let_go()
    come_to_rest(tiered.engine)
    tiered.engine.close()


def test_what_the_pool_has_evicted_comes_back(tiered: Tiered) -> None:
    assert tiered.ask() == len(PROMPT)
    tiered.evict()
    assert tiered.ask() == len(PROMPT) - WHOLE


def test_it_comes_back_after_a_restart(tiered: Tiered) -> None:
    assert tiered.ask() == len(PROMPT)
    tiered.restart()
    assert tiered.ask() == len(PROMPT) - WHOLE


def test_a_longer_prompt_goes_on_behind_it(tiered: Tiered) -> None:
    tiered.ask()
    tiered.restart()
    longer = PROMPT[:WHOLE] + tokens(30, first=5)
    assert tiered.ask(longer) == 30
    tiered.restart()
    assert tiered.ask(longer) == 30 - 30 // (POSITIONS * BLOCK) * POSITIONS * BLOCK


def test_after_a_reset_nothing_comes_back_until_a_restart(tiered: Tiered) -> None:
    """The engine has other weights now. A restart loads the first ones again."""
    tiered.ask()
    tiered.evict()
    assert tiered.engine.reset()
    assert tiered.ask() == len(PROMPT)
    other = tokens(63 * BLOCK + 2, first=3)
    tiered.ask(other)
    tiered.evict()
    assert tiered.ask(other) == len(PROMPT) - WHOLE, "what was written since"
    tiered.restart()
    assert tiered.ask() == len(PROMPT) - WHOLE
    assert tiered.ask(other) == len(PROMPT), "what was written since is of no use"


def test_weights_with_a_name_find_what_they_have_written(tiered: Tiered) -> None:
    """And nothing of others, whichever engine has loaded them."""
    last = [*PROMPT[:-1], 1]
    tiered.ask()
    tiered.evict()
    for version, computed in (("one", len(PROMPT)), ("two", len(PROMPT)), ("one", len(PROMPT) - WHOLE)):
        assert tiered.engine.load_weights(version)
        assert tiered.ask() == computed
        tiered.evict()
    assert tiered.engine.reset()
    assert tiered.ask() == len(PROMPT), "nobody has said which weights these are"
    tiered.evict()
    tiered.restart()
    assert tiered.ask() == len(PROMPT) - WHOLE, "those that are loaded at the start"
    tiered.evict()
    for version, computed in (
        ("two", len(PROMPT) - WHOLE),
        ("three", len(PROMPT)),
        ("one", len(PROMPT) - WHOLE),
    ):
        assert tiered.engine.load_weights(version)
        assert tiered.ask(last) == computed
        tiered.evict()


def test_a_name_is_of_one_reset(tiered: Tiered) -> None:
    """One that comes before it costs misses."""
    weights = tiered.engine.side.weights
    with pytest.raises(OperatorError, match="nothing was reset"):
        weights.name("early")
    tiered.engine.reset()
    assert weights.name("early") == weights.name("early", after=1) == 1
    tiered.engine.reset()
    tiered.ask()
    tiered.evict()
    with pytest.raises(OperatorError, match="something was computed"):
        weights.name("late")
    assert tiered.engine.load_weights("early")
    assert tiered.ask() == len(PROMPT), "what was computed after the second reset has no name"
    with pytest.raises(OperatorError, match="are named 'early'"):
        weights.name("late")


def test_two_requests_wait_for_one_fetch(tiered: Tiered) -> None:
    tiered.ask()
    tiered.evict()
    engine = tiered.engine
    computed = watch(engine)
    requests = [engine.add(PROMPT, 1), engine.add(PROMPT[:-1], 1)]
    engine.drain()
    first, second = (computed[each.request_id] for each in requests)
    assert first == len(PROMPT) - WHOLE
    assert second <= first
    nbytes = WHOLE // BLOCK * engine.settings.slot_bytes * engine.settings.num_ranks
    assert tiered.counts[FETCH] == nbytes, "each byte comes once"


def test_it_is_fetched_while_its_request_waits_for_its_turn(tiered: Tiered) -> None:
    tiered.ask()
    tiered.restart()
    engine = tiered.engine
    serve(engine, tokens(3))
    long = engine.add(tokens(120 * BLOCK, first=2), 1)
    engine.step()
    engine.scheduler.max_num_running_reqs = 1
    waiting = engine.add(PROMPT, 1)
    engine.step()
    assert not long.is_finished() and tiered.counts[FETCH], "nobody has asked for it yet"
    computed = watch(engine)
    engine.drain()
    assert computed[waiting.request_id] == len(PROMPT) - WHOLE


@pytest.mark.parametrize(
    "fault", [MediumFault.FAIL, MediumFault.SHORT, MediumFault.TORN, MediumFault.REFUSE, MediumFault.LOSE]
)
def test_a_fault_is_a_miss(tiered: Tiered, fault: MediumFault) -> None:
    tiered.fault(Verb.PUT if fault is MediumFault.LOSE else Verb.GET, fault)
    tiered.ask()
    tiered.evict()
    assert len(PROMPT) - WHOLE < tiered.ask() <= len(PROMPT)


def test_a_byte_that_changed_below_is_found(tiered: Tiered) -> None:
    tiered.ask()
    tiered.evict()
    for medium in tiered.tier.media:
        for kept in medium.inner.kept.values():  # type: ignore[attr-defined]
            kept.content[1] ^= 1
    assert tiered.ask() == len(PROMPT)
    tiered.evict()
    assert tiered.ask() == len(PROMPT) - WHOLE, "it was written again"


def test_a_rank_that_lost_its_part_is_found_at_a_restart() -> None:
    tiered = Tiered(3)
    tiered.ask()
    lost = tiered.tier.media[1].inner
    del lost.kept[max(lost.kept)]  # type: ignore[attr-defined]
    tiered.restart()
    assert tiered.ask() == len(PROMPT) - WHOLE + POSITIONS * BLOCK
    tiered.engine.close()


def test_orphans_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what is lost nothing can be of use: at a fetch, and at a start."""
    num_orphans: list[int] = []
    count = Metrics.count

    def counted(self: Metrics, name: str, amount: float = 1, route: Route | None = None) -> None:
        if name == "route_orphaned_extents":
            assert route == FETCH
            num_orphans.append(int(amount))
        count(self, name, amount, route)

    monkeypatch.setattr(Metrics, "count", counted)
    tiered = Tiered(1, limits=LIMITS._replace(admit=Admit.ALL))
    request = serve(tiered.engine, PROMPT)
    tiered.evict()
    [medium] = tiered.tier.media
    kept = medium.inner.kept  # type: ignore[attr-defined]
    names = tiered.tier.spills._grid.names(request.block_hashes)
    by_name = {each.label.name.tobytes(): place for place, each in kept.items()}
    places = [by_name[each] for each in names]
    kept[places[10]].content[1] ^= 1
    num_orphans.clear()
    tiered.ask()
    assert sum(num_orphans) == 15 - 10 - 1
    tiered.restart()
    [medium] = tiered.tier.media
    lost = places[3]
    tiered.engine.close()
    del medium.inner.kept[lost]  # type: ignore[attr-defined]
    num_orphans.clear()
    tiered.start()
    assert num_orphans == [15 - 3 - 1]
    tiered.engine.close()


def test_a_fetch_that_hangs_keeps_its_slots_and_nobody_waiting(tiered: Tiered) -> None:
    tiered.ask()
    tiered.evict()
    engine = tiered.engine
    tiered.fault(Verb.GET, MediumFault.STUCK)
    request = engine.add(PROMPT, 1)
    step_until(engine, request.is_finished, 80)
    assert tiered.tier.fetches.breaker.is_outage
    tiered.tier.choose = None
    for medium in tiered.tier.media:
        medium.let_go()
    engine.drain()
    assert engine.side.allocator.num_filling + engine.side.allocator.num_leaving == 0


def test_what_hangs_on_its_way_down_keeps_nobody_waiting(tiered: Tiered) -> None:
    tiered.fault(Verb.PUT, MediumFault.STUCK)
    request = tiered.engine.add(PROMPT, 1)
    step_until(tiered.engine, request.is_finished, 40)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_any_model_goes_on_from_below_after_a_restart(model: str, share: float) -> None:
    """A prompt is computed from its last checkpoint on, and so is one that goes on behind it."""
    sizes = {"gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "positions": 8}
    tiered = Tiered(2, groups=MODELS[model], fetch_gpu_share=share, **sizes)
    prompt = tokens(150)
    assert tiered.ask(prompt) == 150
    tiered.restart()
    size = tiered.engine.settings.block_tokens
    left = 150 % size or size
    left += 150 // size * size % (8 * size) if model == "plain" else 0  # of no whole extent
    assert tiered.ask(prompt) == left
    tiered.restart()
    assert tiered.ask([*prompt, *tokens(20, first=5)]) == left + 20
    come_to_rest(tiered.engine)
    tiered.engine.close()


@pytest.mark.parametrize("is_private", [False, True])
def test_a_reset_while_bytes_move(tiered: Tiered, is_private: bool) -> None:
    tiered.ask()
    tiered.evict()
    if is_private:
        tiered.engine.reset()
        tiered.ask()
        tiered.evict()
    tiered.fault(Verb.GET, MediumFault.LATE)
    request = tiered.engine.add(PROMPT, 1)
    tiered.engine.step()
    assert [job.flow.route for job in tiered.engine.side.ledger] == [FETCH]
    assert tiered.engine.reset()
    tiered.engine.drain()
    assert request.is_finished()
    assert not tiered.tier.fetches.breaker.is_outage


def test_a_full_tier_evicts(tiered: Tiered) -> None:
    small = Tiered(num_places=20)
    for first in range(12):
        small.ask(tokens(40 * BLOCK, first=first))
    assert small.tier.spills._directory.num_used == 20
    small.restart()
    found = [small.ask(tokens(40 * BLOCK, first=first)) for first in range(12)]
    assert sum(each < 40 * BLOCK for each in found) >= 2
    come_to_rest(small.engine)
    small.engine.close()


def test_second_use_writes_what_is_asked_for_again() -> None:
    tiered = Tiered(limits=LIMITS._replace(admit=Admit.SECOND_USE))
    tiered.ask()
    assert not tiered.tier.spills._directory.num_used
    forget_gpu(tiered.engine)
    tiered.ask()
    tiered.evict()
    assert tiered.ask() == len(PROMPT) - WHOLE
    tiered.engine.close()


def test_the_policy_of_a_tier_hears_of_a_request_once(tiered: Tiered) -> None:
    uses: list[int] = []
    directory = tiered.tier.spills._directory
    directory.touch = lambda names: uses.append(len(names))  # type: ignore[method-assign]
    tiered.ask()
    tiered.evict()
    uses.clear()
    tiered.ask()
    assert tiered.counts[FETCH]
    tiered.ask(tokens(63 * BLOCK, first=30))
    assert uses == [15, 15], "what it has, and what it has not"


@pytest.mark.parametrize("admit", Admit)
def test_a_full_tier_takes_what_the_pool_is_about_to_evict(admit: Admit) -> None:
    limits = LIMITS._replace(policy="lru", admit=admit, bytes_per_day=1e12)
    tiered = Tiered(num_places=20, limits=limits, eviction_policy="lru")
    prompts = [tokens(20 * BLOCK + 2, first=first) for first in range(20)]
    spills = tiered.tier.spills

    def num_below(prompt: list[int]) -> int:
        request = serve(tiered.engine, prompt)
        forget_gpu(tiered.engine)
        return spills._directory.depth(spills._grid.names(request.block_hashes))

    for prompt in prompts[:8]:
        for _ in range(2):
            num_below(prompt)
    assert not spills._directory.has_room
    at_once = [num_below(prompt) for prompt in prompts[8:]]
    assert at_once == [5 if admit is Admit.ALL else 0] * 12
    # the pool has the last four and a little, and with ``ALL`` the tier has the same four
    assert (tiered.ask(prompts[-5]) == 2) is (admit is Admit.POLICY)
    tiered.engine.close()


def _with_one_that_waits(**limits: Any) -> tuple[Tiered, Any, list[bytes]]:
    """A full tier, and the extents of ``PROMPT``, which wait until the pool is about to evict them."""
    more = {"policy": "lru", "bytes_per_day": 1e12} | limits
    tiered = Tiered(num_places=30, limits=LIMITS._replace(**more), eviction_policy="lru")
    for first in (20, 21):
        tiered.ask(tokens(63 * BLOCK, first=first))
        forget_gpu(tiered.engine)
    request, spills = serve(tiered.engine, PROMPT), tiered.tier.spills
    come_to_rest(tiered.engine)
    names = spills._grid.names(request.block_hashes)
    assert not spills._directory.depth(names)
    return tiered, spills, names


def test_a_shutdown_writes_what_waits() -> None:
    tiered, spills, names = _with_one_that_waits()
    tiered.engine.side._engine.is_ending = lambda: True  # type: ignore[method-assign]
    assert tiered.engine.side.has_pending_work, "it steps on"
    come_to_rest(tiered.engine)
    assert spills._directory.depth(names) == 15
    assert not tiered.engine.side.has_pending_work
    tiered.restart()
    assert tiered.ask() == len(PROMPT) - WHOLE
    tiered.engine.close()


def test_a_shutdown_takes_no_longer_than_it_may() -> None:
    tiered, spills, names = _with_one_that_waits(shutdown_seconds=0.0)
    tiered.engine.side._engine.is_ending = lambda: True  # type: ignore[method-assign]
    assert not tiered.engine.side.has_pending_work
    assert not spills._directory.depth(names)
    tiered.engine.close()


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_events_tell_what_the_disk_has(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    """In vLLM's words, at every moment: also after a restart, and after a reset. xxhash is half as long."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    make = virtual_engine.make_vllm_config

    def make_vllm_config(*arguments: Any, **named: Any) -> Any:
        made = make(*arguments, **named)
        made.cache_config.prefix_caching_hash_algo = algorithm
        return made

    monkeypatch.setattr(virtual_engine, "make_vllm_config", make_vllm_config)

    publish_events(monkeypatch)
    monkeypatch.setattr(kv_events, "MAX_HASHES", 4)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    limits = LIMITS._replace(policy="lru", admit=Admit.ALL, bytes_per_day=1e12)
    tiered = Tiered(num_places=40, limits=limits, eviction_policy="lru")
    steps = watch_events(tiered.engine)
    told: set[bytes] = set()
    seen: list[Any] = []

    def take() -> None:
        come_to_rest(tiered.engine)
        while tiered.engine.scheduler.connector._events.is_behind:
            tiered.engine.scheduler.connector.take_events()
        for event in [event for step in steps for event in step if event.medium == "STORAGE"]:
            seen.append(event)
            assert event.locality == "LOCAL"
            if isinstance(event, BlockStored):
                assert event.block_size == POSITIONS * BLOCK
                assert event.parent_block_hash is None or event.parent_block_hash in told
                assert not told & set(event.block_hashes)
                told.update(event.block_hashes)
            else:
                assert set(event.block_hashes) <= told
                told.difference_update(event.block_hashes)
        steps.clear()

    prompts = [PROMPT, *(tokens(63 * BLOCK, first=first) for first in (20, 21, 22, 23))]
    requests = []
    for prompt in prompts * 2:
        requests.append(serve(tiered.engine, prompt))
        forget_gpu(tiered.engine)
        take()
        directory = tiered.tier.spills._directory
        assert len(told) == directory.num_used
        for request in requests:
            names = tiered.tier.spills._grid.names(request.block_hashes)
            hashes = request.block_hashes[POSITIONS - 1 :: POSITIONS]
            assert {len(each) for each in hashes} == {16 if algorithm == "xxhash" else 32}
            assert [each in told for each in hashes[: len(names)]] == [
                number < directory.depth(names) for number in range(len(names))
            ]
    assert any(isinstance(event, BlockRemoved) for event in seen)
    num_kept = len(told)
    told.clear()
    tiered.restart()
    steps = watch_events(tiered.engine)
    serve(tiered.engine, [1] * BLOCK)
    take()
    assert len(told) == num_kept > 0
    assert tiered.engine.scheduler.connector.reset_cache()
    take()
    assert not told
    tiered.engine.close()


def test_a_budget_bounds_what_is_written() -> None:
    tiered = Tiered(num_places=10, limits=LIMITS._replace(bytes_per_day=1.0))
    tiered.ask()
    assert tiered.tier.spills._directory.num_used == 10, "the first fill is free"
    for first in range(20, 30):
        tiered.ask(tokens(63 * BLOCK, first=first))
    puts = {each for medium in tiered.tier.media for each in medium.inner.kept}  # type: ignore[attr-defined]
    assert len(puts) == 10
    forget_gpu(tiered.engine)
    assert tiered.ask() == len(PROMPT) - 10 * POSITIONS * BLOCK, "and nothing has taken its place"
    tiered.engine.close()


def test_each_route_counts_its_bytes(tiered: Tiered) -> None:
    tiered.ask()
    tiered.evict()
    tiered.ask()
    nbytes = WHOLE // BLOCK * tiered.engine.settings.slot_bytes * tiered.engine.settings.num_ranks
    assert tiered.counts[FETCH] == nbytes
    assert tiered.counts[SPILL] >= nbytes


def test_extents_that_requests_ask_for_are_counted_once_each(tiered: Tiered) -> None:
    tiered.ask()
    assert tiered.asked == [15, 0], "the tier had nothing"
    tiered.evict()
    tiered.asked = [0, 0]
    tiered.ask()
    assert tiered.asked == [15, 15]
    forget_gpu(tiered.engine)
    tiered.ask()
    assert tiered.asked == [15, 15], "the pool has them"
    tiered.restart()
    tiered.asked = [0, 0]
    tiered.ask(PROMPT[:WHOLE] + tokens(2 * POSITIONS * BLOCK, first=5))
    assert tiered.asked == [17, 15]


def test_a_request_that_may_load_little_is_not_counted(tiered: Tiered) -> None:
    """What it finds says nothing of what is there."""
    tiered.ask()
    tiered.restart()
    serve(tiered.engine, PROMPT, hints={"max_load_tokens": 8 * BLOCK})
    assert tiered.counts[FETCH]
    assert tiered.asked == [0, 0]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_extents_of_any_model_are_counted(model: str) -> None:
    tiered = Tiered(positions=8, groups=MODELS[model], gpu_blocks=300, cpu_slots=600, chunk=64)
    tiered.ask(tokens(150))
    asked, found = tiered.asked
    assert asked and not found
    tiered.restart()
    tiered.ask(tokens(150))
    assert tiered.asked == [asked, asked]
    tiered.engine.close()


# Random histories

TURNS = 150


def random_history(seed: int) -> VirtualTier:
    """Faults, resets and aborts on all four routes; the audit looks at every byte."""
    rng = random.Random(seed)
    rate = rng.choice([0.0, 0.0, 0.1])
    never = (MediumFault.NONE, MediumFault.WRONG_BYTES)  # a medium checks what it has read
    faults = [each for each in MediumFault if each not in never]

    def choose(job: MediumJob) -> MediumFault:
        return rng.choice(faults) if rng.random() < rate else MediumFault.NONE

    tier = VirtualTier(
        rng.choice([6, 60]),
        positions=rng.choice([1, 2, 4]),
        limits=TierLimits(
            rng.choice(["hazard", "lru"]), rng.choice(list(Admit)), rng.choice([None, 1e5]), least_tokens=4
        ),
        choose=choose,
        stuck_polls=50,
    )
    settings = VirtualSettings(
        cpu_slots=rng.choice([16, 24, 48]),
        gpu_blocks=rng.choice([14, 24]),
        num_ranks=rng.choice([1, 2]),
        overlapped=rng.random() < 0.5,
        seals_of_blocks=rng.random() < 0.5,
        block_outermost=rng.random() < 0.5,
        tier=tier,
        fetch_gpu_share=rng.choice([0.0, 1.0, 1.0]),
    )
    run_seed(seed, TURNS, settings)
    return tier


def test_random_histories_with_a_tier() -> None:
    moved = Counter[Verb]()
    seeds = seeds_of_runs(0, 32)
    for seed in seeds:
        for medium in random_history(seed).media:
            moved.update(medium.moved)
    if OTHER_SEEDS == 0:
        enough = 100 * len(seeds) / 32
        assert all(moved[verb] > enough for verb in (Verb.PUT, Verb.GET)), f"too little has happened: {moved}"


@pytest.mark.parametrize(
    ("cpu_slots", "num_left"), [(2048, 8), (SLOTS, 0)], ids=["little waits", "much waits"]
)
def test_a_step_with_other_jobs_leaves_spills_to_later_ones(cpu_slots: int, num_left: int) -> None:
    tiered = Tiered(cpu_slots=cpu_slots)
    engine, spills = tiered.engine, tiered.tier.spills
    step_until(engine, engine.add(PROMPT, 1).is_finished, 10)
    assert spills._chains and not spills._num_bytes
    for number in range(num_left + 1):
        assert not spills._num_bytes and not spills._directory.num_used, f"spilled after {number} steps"
        engine.add(tokens(2 * BLOCK, first=100 + number), 1)  # its prompt is stored in this step
        before = engine.side.ledger.num_opened
        engine.step()
        assert engine.side.ledger.num_opened > before
    assert spills._num_bytes or spills._directory.num_used
    come_to_rest(engine)
    assert tiered.counts[SPILL] == WHOLE // BLOCK * engine.side._common.slot_bytes
    engine.close()


def test_what_is_about_to_be_evicted_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = Tiered(cpu_slots=2048)
    engine, spills = tiered.engine, tiered.tier.spills
    step_until(engine, engine.add(PROMPT, 1).is_finished, 10)
    [chain] = spills._chains.values()
    due = [[chain]]
    monkeypatch.setattr(ColdEnd, "due", lambda self: due.pop() if due else [])
    engine.add(tokens(2 * BLOCK, first=100), 1)
    before = engine.side.ledger.num_opened
    engine.step()
    assert engine.side.ledger.num_opened > before
    assert spills._num_bytes or spills._directory.num_used
    come_to_rest(engine)
    engine.close()


def test_a_step_without_other_jobs_spills_at_once() -> None:
    tiered = Tiered(cpu_slots=2048)
    step_until(tiered.engine, tiered.engine.add(PROMPT, 1).is_finished, 10)
    tiered.engine.step()
    assert tiered.tier.spills._num_bytes or tiered.tier.spills._directory.num_used
    come_to_rest(tiered.engine)
    tiered.engine.close()
