"""Engines beside each other whose pools outlive them read from each other, in real shared memory."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.scheduler.tiers.tier import TierLimits
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings
from offload.testing.virtual.region import VirtualRegion, sibling_place
from offload.vllm.lasting_pool import FETCH, PROBE
from offload.worker.pool.siblings import OpenSibling
from tests.virtual.driver import come_to_rest, forget_gpu, tokens
from tests.virtual.test_regions import BLOCK, OTHER, PROMPT, SLOTS, WHOLE, Lives, check_pool

REST = len(PROMPT) - WHOLE
SAME_JOB = 1 << 62
"""In the place of a generation: the same job of another life."""


def columns_of(model: str) -> int:
    """Slots of a position."""
    return VirtualSettings(groups=MODELS[model]).columns


class Beside(Lives):
    """An engine over a path that it shares with others."""

    def __init__(
        self, num_ranks: int = 1, *, region: VirtualRegion | None = None, columns: int = 1, **settings: Any
    ) -> None:
        self.region = VirtualRegion() if region is None else region
        self.is_guest = region is not None
        more = {"places": (sibling_place(columns),), "step_seconds": 0.005}
        self.settings = {"cpu_slots": SLOTS, "gpu_blocks": 140, "num_ranks": num_ranks, **more, **settings}
        self.start()

    def another(self, **settings: Any) -> "Beside":
        """An engine beside it."""
        return Beside(**(self.settings | {"region": self.region} | settings))

    @property
    def paths(self) -> list[Path]:
        """Directories of its regions, by rank."""
        lasting = [rank.side._lasting for rank in self.engine.ranks if rank.side is not None]
        return [each.home.path for each in lasting if each is not None]

    def counted(self, name: str, route: Any = FETCH) -> float:
        """A counter of that route, since the last call."""
        return self.counts.pop((name, route), 0)

    def start(self) -> None:
        super().start()
        metrics, self.counts = self.engine.side.metrics, Counter[Any]()
        count = metrics.count

        def counted(name: str, amount: float = 1, route: Any = None) -> None:
            self.counts[name, route] += amount  # type: ignore[assignment]
            count(name, amount, route)

        metrics.count = counted  # type: ignore[method-assign]

    def wait(self, seconds: float) -> None:
        """Let that time go by, with nothing to do."""
        self.engine.history.step += int(seconds / 0.005) + 1

    def end(self) -> None:
        come_to_rest(self.engine)
        check_pool(self.engine)
        self.engine.close()
        if not self.is_guest:
            self.region.close()


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def first(request: pytest.FixtureRequest) -> Iterator[Beside]:
    first = Beside(request.param)
    yield first
    first.end()


def test_what_one_engine_computed_the_other_restores(first: Beside) -> None:
    assert first.ask() == len(PROMPT)
    second = first.another()
    assert second.ask() == REST
    all_bytes = WHOLE // BLOCK * second.engine.settings.slot_bytes * len(second.paths)
    assert second.counted("route_bytes") == all_bytes
    assert second.ask(OTHER) == len(OTHER)
    forget_gpu(first.engine)
    first.wait(6)
    assert first.ask(OTHER) == 2, "and the other way round"
    second.end()


@pytest.mark.parametrize("share", [0.07, 0.1, 0.25])
def test_a_fetch_may_end_inside_an_extent(first: Beside, share: float) -> None:
    """As there is room for no more at once. What is read ends at the position that names it."""
    first.ask()
    limits = TierLimits(least_tokens=1, pool_share=share)
    place = sibling_place(extent_bytes=4 * first.engine.settings.slot_bytes, limits=limits)
    second = first.another(places=(place,))
    second.engine.add(PROMPT, 1)
    for _ in range(40):
        second.engine.step()
        check_pool(second.engine)
    assert second.counted("route_bytes") > 0
    second.end()


def test_what_was_fetched_outlives_the_engine_that_fetched_it(first: Beside) -> None:
    first.ask()
    second = first.another()
    second.ask()
    second.restart()
    chain = second.engine.side.allocator.resident_depth
    assert second.ask() == REST and second.counted("route_bytes") == 0 and chain
    second.end()


def test_one_that_is_dead_and_one_that_was_restarted_are_read(first: Beside) -> None:
    first.ask()
    second = first.another()
    first.engine.close()
    assert second.ask() == REST
    second.end()
    first.start()
    third = first.another()
    assert third.ask() == REST
    third.end()


def test_what_a_sibling_stores_after_a_reset_is_nobody_elses(first: Beside) -> None:
    first.ask()
    assert first.engine.reset()
    first.ask(OTHER)
    second = first.another()
    assert second.ask(OTHER) == len(OTHER), "of other weights"
    second.end()


def test_after_a_reset_siblings_have_nothing(first: Beside) -> None:
    first.ask()
    second = first.another()
    assert second.engine.reset()
    assert second.ask() == len(PROMPT)
    assert second.counted("route_probed_extents", PROBE) == 0, "nobody is asked"
    second.end()


def test_nobody_waits_where_there_is_no_sibling() -> None:
    first = Beside()
    first.ask(OTHER)
    assert first.counted("route_probed_extents", PROBE) == 1 + 20
    first.ask()
    assert first.counted("route_probed_extents", PROBE) == 0
    first.end()


def test_one_that_comes_later_is_found() -> None:
    first = Beside()
    first.ask(OTHER)
    second = first.another()
    second.ask()
    first.wait(6)
    assert first.ask() == REST
    second.end()
    first.end()


def changed_slot(engine: VirtualEngine, rank: int = 0, position: int = 10) -> tuple[Any, int]:
    """A rank of an engine, and the slot of a position of ``PROMPT`` there."""
    chain = next(iter(engine.side.allocator._tree.nodes())).hashes
    slot = int(engine.side.allocator.lookup(list(chain)).slots[position, 0])
    side = engine.ranks[rank].side
    assert side is not None and side._lasting is not None
    return side._lasting._table, slot


def during(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], *, slot: int | None = None, after: bool = False
) -> None:
    """Do something to a sibling while that slot of it is copied, or the first one."""
    original, left = OpenSibling.read, [work]

    def read(self: OpenSibling, first: int, into: memoryview) -> bool:
        is_meant = slot is None or first <= slot < first + len(into) // self.shape.slot_bytes
        found = after or original(self, first, into)
        while left and is_meant:
            left.pop()()
        return original(self, first, into) if after else found

    monkeypatch.setattr(OpenSibling, "read", read)


@pytest.mark.parametrize("after", [False, True], ids=["behind the copy", "before the copy"])
@pytest.mark.parametrize("generation", [-1, 7, SAME_JOB])
def test_a_slot_that_is_filled_again_under_the_copy_is_missed(
    monkeypatch: pytest.MonkeyPatch, after: bool, generation: int
) -> None:
    """It is no fault: the route goes on. Bytes are as they were, so generations alone can tell."""
    first = Beside()
    first.ask()
    table, slot = changed_slot(first.engine)
    if generation == SAME_JOB:
        generation = int(table.seals.fills[slot]) + (8 << 40)
    before = int(table.seals.fills[slot])

    def fill() -> None:
        table.seals.fills[slot] = generation

    during(monkeypatch, fill, slot=slot, after=after)
    second = first.another()
    assert second.ask() > REST
    assert second.counted("route_missed_blocks") > 0
    assert not second.counted("route_failed_jobs")
    table.seals.fills[slot] = before
    second.end()
    first.end()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_byte_that_changed_there_costs_a_miss(rank: int) -> None:
    first = Beside(3, verify_loads="never")  # so nothing finds it later
    first.ask()
    _, slot = changed_slot(first.engine, rank)
    first.engine.ranks[rank].rot(slot, 3)
    first.engine.counts["rot"] += 1
    second = first.another()
    assert second.ask() >= len(PROMPT) - 10 * BLOCK
    second.end()
    first.end()


@pytest.mark.parametrize("how", ["deleted", "shrunk", "empty", "file gone", "another file", "superblock"])
def test_a_region_that_is_taken_away_costs_a_miss(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_known in (False, True):
        first = Beside(2)
        first.ask()
        second = first.another()
        [path, _] = first.paths
        first.engine.close()

        def work(path: Path = path) -> None:
            if how == "deleted":
                shutil.rmtree(path)
            elif how in ("shrunk", "empty"):
                os.truncate(path / "pool", 4096 if how == "shrunk" else 0)
            elif how == "superblock":
                (path / "superblock").write_bytes(b"?")
            else:
                size = (path / "pool").stat().st_size
                (path / "pool").unlink()
                if how == "another file":
                    (path / "pool").write_bytes(bytes(size))

        if is_known:
            during(monkeypatch, work)
        else:
            work()
        computed = second.ask()
        assert computed > REST or (is_known and how in ("deleted", "file gone", "another file", "superblock"))
        second.end()
        monkeypatch.undo()
        first.start()
        first.end()


def test_a_region_of_another_namespace_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its sizes may be the same."""
    first = Beside()
    first.ask()
    [path] = first.paths
    content = (path / "superblock").read_bytes()
    second = first.another()
    side = second.engine.ranks[0].side
    assert side is not None and side._lasting is not None
    home = side._lasting.home
    monkeypatch.setattr(side._lasting, "home", home._replace(identity="another"))
    [lane, _] = [lane for lane in side._engine._lanes.values() if lane.route in (FETCH, PROBE)]
    siblings = lane.copier.medium._siblings
    assert len(siblings.look()) == 1
    siblings._home = side._lasting.home
    siblings._rests_until = 0.0
    assert siblings.look() == () and content
    second.end()
    first.end()


def test_what_one_rank_lacks_nobody_has() -> None:
    first = Beside(3)
    first.ask()
    table, slot = changed_slot(first.engine, 2)
    before = int(table.seals.fills[slot])
    table.seals.fills[slot] = -1
    second = first.another()
    assert second.ask() == len(PROMPT) - 10 * BLOCK
    table.seals.fills[slot] = before
    second.end()
    first.end()


def test_ranks_that_share_a_pool_fetch_each_its_part() -> None:
    first = Beside(4, replicas=2)
    first.ask()
    second = first.another()
    assert second.ask() == REST
    second.end()
    first.end()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("model", list(MODELS))
def test_models_of_any_kind(model: str, replicas: int) -> None:
    groups = MODELS[model]
    settings = {"groups": groups, "gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "replicas": replicas}
    first = Beside(2, columns=columns_of(model), **settings)
    prompt = tokens(150)
    assert first.ask(prompt) == 150
    forget_gpu(first.engine)
    restored = first.ask(prompt)
    second = first.another(columns=columns_of(model))
    assert second.ask(prompt) == restored
    second.restart()
    assert second.ask(prompt) == restored, "and what it had before"
    second.end()
    first.end()


@pytest.mark.parametrize("model", ["windows", "states"])
def test_a_model_without_full_attention_finds_its_own_again(model: str) -> None:
    lives = Beside(2, columns=0, groups=MODELS[model], gpu_blocks=300, cpu_slots=600, chunk=64)
    prompt = tokens(150)
    assert lives.ask(prompt) == 150
    forget_gpu(lives.engine)
    restored = lives.ask(prompt)
    assert restored < 150
    lives.restart()
    assert lives.ask(prompt) == restored
    assert lives.counted("route_bytes") > 0
    lives.end()
