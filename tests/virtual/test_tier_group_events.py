"""KV events of tiers of hybrid models, on vLLM's real scheduler: they say what is below."""

from collections import defaultdict
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.request import Request

from offload.scheduler.tiers import spills
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit
from offload.testing.virtual import MODELS
from offload.testing.virtual import engine as virtual_engine
from offload.vllm import kv_events
from tests.virtual.driver import come_to_rest, forget_gpu, publish_events, serve, tokens
from tests.virtual.test_event_storms import watch_events
from tests.virtual.test_group_events import HYBRIDS, KINDS
from tests.virtual.test_stores import Stored
from tests.virtual.test_tiers import Tiered

SLOTS = 5
"""Of an extent: some bags take two."""
LIMITS = TierLimits(policy="lru", admit=Admit.ALL, bytes_per_day=1e12, least_tokens=4)
SIZES = {"positions": SLOTS, "limits": LIMITS, "gpu_blocks": 300, "cpu_slots": 600, "chunk": 64}
PROMPTS = [tokens(150), [*tokens(70), *tokens(53, first=3)], tokens(9, first=4), tokens(101, first=5)]

Held = dict[int, dict[Any, int]]
"""By group and hash: tokens up to there."""


class Told:
    """A subscriber to what an engine says of what is below its pool."""

    def __init__(self, tiered: Tiered, locality: str) -> None:
        self._tiered, self._locality = tiered, locality
        self._steps = watch_events(tiered.engine)
        self.held: Held = defaultdict(dict)
        self.num_removed = 0

    def take(self) -> Held:
        """All that is known now."""
        engine = self._tiered.engine
        come_to_rest(engine)
        while engine.scheduler.connector._events.is_behind:
            engine.scheduler.connector.take_events()
        engine.scheduler.connector._events.check_invariants()
        for event in [each for step in self._steps for each in step if each.medium == "STORAGE"]:
            assert event.locality == self._locality
            self._hear(event)
        self._steps.clear()
        return {group_id: held for group_id, held in self.held.items() if held}

    def _hear(self, event: Any) -> None:
        held, group = self.held[event.group_idx], self._tiered.engine.settings.groups[event.group_idx]
        assert len(set(event.block_hashes)) == len(event.block_hashes) > 0
        if isinstance(event, BlockRemoved):
            self.num_removed += len(event.block_hashes)
            for each in event.block_hashes:
                del held[each]
            return
        assert isinstance(event, BlockStored)
        assert event.kv_cache_spec_kind == KINDS[group.kind]
        assert event.kv_cache_spec_sliding_window == (group.reach if group.kind == "window" else None)
        assert not held.keys() & set(event.block_hashes)
        if group.kind == "full":
            assert event.parent_block_hash is None or event.parent_block_hash in held
        else:
            assert event.parent_block_hash is None and len(event.block_hashes) == 1
        held.update(dict.fromkeys(event.block_hashes, event.block_size))


def below(tiered: Tiered, requests: list[Request]) -> Held:
    """What is below of these requests, which are all there were. Each depth is looked at by itself."""
    engine, flow = tiered.engine, tiered.tier.spills
    groups, size = engine.settings.groups, engine.side.block_size
    directory, grid = flow._directory, flow._grid
    found: Held = defaultdict(dict)
    for request in requests:
        chain = list(engine.side._engine.chain(request))
        for depth in range(1, len(chain) + 1):
            num_bag = engine.side._engine.groups.num_in_bag(depth)
            path, end = grid.path(chain, depth, num_bag), chain[depth - 1]
            num_below = directory.depth(path.names)
            for group_id, group in enumerate(groups):
                if group.kind == "full" and num_below >= path.num_prefix:
                    found[group_id][end] = (depth % grid.positions or grid.positions) * size
                first = group.first_read(depth * size) // group.block_size * group.block_size
                if group.kind != "full" and num_bag and num_below == len(path.names) and first < depth * size:
                    found[group_id][end] = depth * size - first
    return dict(found)


@pytest.fixture(autouse=True)
def with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_events(monkeypatch)
    monkeypatch.setattr(kv_events, "MAX_HASHES", 4)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.mark.parametrize("model", HYBRIDS)
def test_events_of_every_group_tell_what_the_disk_has(model: str) -> None:
    """At every moment, while it evicts; then after a restart, and after a reset."""
    check_a_disk(model)


def test_hashes_of_half_the_length_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of xxhash; names of extents are as long as the others."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    make = virtual_engine.make_vllm_config

    def make_vllm_config(*arguments: Any, **named: Any) -> Any:
        made = make(*arguments, **named)
        made.cache_config.prefix_caching_hash_algo = "xxhash"
        return made

    monkeypatch.setattr(virtual_engine, "make_vllm_config", make_vllm_config)
    assert {len(each) for each in check_a_disk("window")} == {16}


@pytest.mark.parametrize("model", ["window", "states"])
def test_a_path_is_told_of_that_is_written_by_several_jobs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "_JOB_BYTES", 1)
    check_a_disk(model)


def check_a_disk(model: str) -> set[bytes]:
    """Returns all hashes that were told."""
    num_places = {"states": 3, "windows": 5}.get(model, 8)
    tiered = Tiered(2, num_places=num_places, groups=MODELS[model], **SIZES)
    told, requests, hashes = Told(tiered, "LOCAL"), list[Request](), set[bytes]()
    for prompt in [each for each in PROMPTS if model != "windows" or len(each) > 20] * 2:  # see below
        requests.append(serve(tiered.engine, prompt))
        forget_gpu(tiered.engine)
        held = told.take()
        assert held == below(tiered, requests)
        hashes.update(*held.values())
    assert told.num_removed
    kept = {group_id: dict(each) for group_id, each in held.items()}
    tiered.restart()
    told = Told(tiered, "LOCAL")
    serve(tiered.engine, [1])
    assert told.take() == kept == below(tiered, requests)
    assert tiered.engine.scheduler.connector.reset_cache()
    assert not told.take()
    tiered.engine.close()
    return hashes


def test_a_short_bag_without_full_attention_is_not_told_after_a_restart() -> None:
    """Nothing says how deep it is. It is served all the same."""
    tiered, prompt = Tiered(2, groups=MODELS["windows"], **SIZES), tokens(9)
    told = Told(tiered, "LOCAL")
    request = serve(tiered.engine, prompt)
    assert told.take() == below(tiered, [request]) != {}
    tiered.restart()
    told = Told(tiered, "LOCAL")
    assert tiered.ask(prompt) == 1
    assert below(tiered, [request]) and not told.take()
    assert tiered.engine.scheduler.connector.reset_cache()
    assert not told.take()
    tiered.engine.close()


@pytest.mark.parametrize("model", HYBRIDS)
def test_events_of_every_group_tell_what_was_written_to_a_store(model: str) -> None:
    stored = Stored(2, groups=MODELS[model], **SIZES)
    told, requests = Told(stored, "REMOTE"), list[Request]()
    for prompt in PROMPTS:
        requests.append(serve(stored.engine, prompt))
        forget_gpu(stored.engine)
        assert told.take() == below(stored, requests)
    assert stored.engine.reset()
    assert not told.take()
    stored.end()
