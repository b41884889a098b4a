"""A disk and a store below one pool: asked in order, each admits for itself, and nothing goes round."""

import random
from collections import Counter
from typing import Any

import pytest

from offload.messages import Route
from offload.scheduler.fetched import Fetched
from offload.scheduler.tiers.fetches import Fetches
from offload.settings import Admit
from offload.testing.media.faulty import MediumFault
from offload.testing.media.store import MemoryStore
from offload.testing.virtual import VirtualEngine, VirtualSettings, store, tier
from offload.testing.virtual.run import run_seed
from offload.testing.virtual.store import VirtualStore
from offload.testing.virtual.tier import VirtualTier
from offload.worker.media.base import Verb
from tests.seeds import OTHER_SEEDS
from tests.virtual.driver import come_to_rest, forget_gpu, serve, step_until, tokens, watch
from tests.virtual.test_tiers import BLOCK, LIMITS, POSITIONS, PROMPT, SLOTS, WHOLE

REST = len(PROMPT) - WHOLE
ALL = LIMITS._replace(admit=Admit.ALL)
STEP = 0.005
"""Seconds."""
LONGER = tokens(80 * BLOCK + 2)
"""Begins with the prompt."""


class Both:
    """An engine with a disk, and a store below it, in memory."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"cpu_slots": SLOTS, "gpu_blocks": 140, "step_seconds": STEP, **settings}
        self.disk = VirtualTier(200, positions=POSITIONS, limits=ALL)
        self.start(MemoryStore())

    def start(self, shared: MemoryStore, disk: VirtualTier | None = None) -> None:
        """A new engine over what the disk has kept, or another disk, and this store."""
        self.disk = disk or self.disk
        self.store = VirtualStore(store=shared, positions=POSITIONS, limits=ALL)
        settings = VirtualSettings(places=(self.disk.place, self.store.place), **self.settings)
        self.engine = VirtualEngine(settings, random.Random(0))
        self.counts = Counter[Route]()
        """Bytes by route."""
        count = self.engine.side.metrics.count

        def counted(name: str, amount: float = 1, route: Route | None = None) -> None:
            if route is not None and name == "route_bytes":
                self.counts[route] += int(amount)
            count(name, amount, route)

        self.engine.side.metrics.count = counted  # type: ignore[method-assign]

    def ask(self, prompt: list[int] = PROMPT) -> int:
        """Tokens that are computed for the prompt."""
        computed = watch(self.engine)
        request = serve(self.engine, prompt)
        come_to_rest(self.engine)
        return computed[request.request_id]

    def end(self) -> None:
        come_to_rest(self.engine)
        self.engine.close()


def test_each_admits_for_itself_and_the_first_that_has_it_is_read() -> None:
    both = Both()
    assert both.ask() == len(PROMPT)
    assert both.counts[tier.SPILL] == both.counts[store.SPILL] > 0
    both.engine.close()
    both.start(both.store.store)
    assert both.ask() == REST
    assert both.counts[tier.FETCH] > 0
    assert both.counts[store.FETCH] == 0
    both.end()


def test_the_next_is_asked_for_what_the_first_lacks() -> None:
    both = Both()
    both.ask()
    both.engine.close()
    both.start(both.store.store, VirtualTier(200, positions=POSITIONS, limits=ALL))
    assert both.ask() == REST
    assert both.counts[tier.FETCH] == 0
    assert both.counts[store.FETCH] > 0
    both.end()


@pytest.mark.parametrize("from_disk", [True, False])
def test_what_came_from_one_is_not_written_to_another(from_disk: bool) -> None:
    both = Both()
    both.ask()
    both.engine.close()
    if from_disk:
        both.start(MemoryStore())
    else:
        both.start(both.store.store, VirtualTier(200, positions=POSITIONS, limits=ALL))
    up, down = (tier.FETCH, store.SPILL) if from_disk else (store.FETCH, tier.SPILL)
    assert both.ask() == REST
    forget_gpu(both.engine)
    both.ask()
    assert both.counts[up] > 0
    assert both.counts[down] == 0
    num_bytes = both.counts[up]
    assert both.ask(LONGER) < len(LONGER) - WHOLE + 1
    assert both.counts[down] > num_bytes, "what is computed behind it is, and what leads there"
    both.end()


def test_what_was_computed_again_is_written() -> None:
    """Its slots were filled from below once, and then by the GPU."""
    both = Both()
    both.ask()
    both.engine.close()
    both.start(MemoryStore())
    both.ask()
    for first in (7, 8, 9):
        both.ask(tokens(63 * BLOCK, first=first))
    forget_gpu(both.engine)
    both.disk.choose = lambda job: MediumFault.FAIL if job.verb is Verb.GET else MediumFault.NONE
    before = both.counts[store.SPILL]
    assert both.ask() == len(PROMPT)
    assert both.counts[store.SPILL] > before
    both.end()


def most_filling(both: Both, *prompts: list[int]) -> int:
    """Slots that are being filled at once, at most, while nothing of what is fetched comes."""
    for place in (both.disk, both.store):
        place.choose = lambda job: MediumFault.STUCK if job.verb is Verb.GET else MediumFault.NONE
    requests = [both.engine.add(prompt, 1) for prompt in prompts]
    most = 0
    for _ in range(20):
        both.engine.step()
        most = max(most, both.engine.side.allocator.num_filling)
    for place in (both.disk, both.store):
        place.choose = None
        for medium in place.media:
            medium.let_go()
    step_until(both.engine, lambda: all(each.is_finished() for each in requests), 1000)
    return most


@pytest.mark.parametrize("is_shared", [True, False])
def test_fetches_of_both_fill_a_quarter_of_the_pool(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_shared``: as it is; else each tier has a quarter of its own, to see that this would be noticed."""
    if not is_shared:
        monkeypatch.setattr(Fetches, "_num_coming", property(lambda self: self._num_filling))
        monkeypatch.setattr(
            Fetched, "num_ahead", property(lambda self: 0, lambda self, value: None), raising=False
        )
    other = tokens(63 * BLOCK, first=7)
    both = Both()
    both.ask()
    disk = both.disk
    both.engine.close()
    both.start(MemoryStore(), VirtualTier(200, positions=POSITIONS, limits=ALL))
    both.ask(other)
    both.engine.close()
    both.start(both.store.store, disk)
    most = most_filling(both, PROMPT, other)
    assert most == SLOTS // 4 * (1 if is_shared else 2)
    both.end()


def test_random_histories_with_several() -> None:
    moved = Counter[str]()
    for seed in range(24):
        moved += run_seed(seed, 150, kind="several").counts
    if OTHER_SEEDS == 0:
        extents = {what: count for what, count in moved.items() if "extents" in what}
        assert len(extents) == 5 and min(extents.values()) > 20, f"too little has happened: {extents}"
