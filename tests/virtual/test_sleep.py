"""An engine that sleeps takes the memory of its KV cache away, and gives other memory back (vLLM 0.33 on)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.config import OffloadConfig
from offload.messages import STORE
from offload.operator.client import engines_in
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine
from offload.testing.virtual.rank import VirtualRank
from offload.vllm.operator import Operator
from offload.worker import side as worker_side
from tests.virtual.driver import (
    Engines,
    come_to_rest,
    depth_of,
    finish,
    hold,
    release,
    serve,
    tokens,
    warm,
)
from tests.virtual.test_stores import Stored
from tests.virtual.test_tiers import PROMPT as LONG
from tests.virtual.test_tiers import WHOLE, Tiered

SIZES: dict[str, Any] = {"gpu_blocks": 40, "cpu_slots": 64, "num_ranks": 2}
PROMPT = tokens(40)
NUM_BLOCKS = 10


def fall_asleep(engine: VirtualEngine) -> None:
    """What vLLM's workers do, and then nothing is left in their caches."""
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
    for rank in engine.ranks:
        rank.cells[:] = 0


def wake_up(engine: VirtualEngine) -> None:
    """What vLLM's workers do, and its engine core after that."""
    for rank in engine.ranks:
        rank.connector.restore_kv_caches()
    facts = {(0, index): rank.connector.get_handshake_metadata() for index, rank in enumerate(engine.ranks)}
    engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(facts)


def move(rank: VirtualRank) -> None:
    """The tensors that the connector was given get other memory."""
    assert rank.side is not None
    caches = rank.side._kv_caches.values()
    memory = torch.zeros(next(iter(caches)).untyped_storage().nbytes(), dtype=torch.uint8)
    for cache in caches:
        cache.set_(memory.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())
    words = memory.numpy().view(np.uint64)
    rank.cells = np.lib.stride_tricks.as_strided(words, rank.cells.shape, rank.cells.strides)


def copied(engine: VirtualEngine) -> int:
    """Bytes copied so far, on all ranks."""
    return sum(copier.copied.total() for copier in engine.copiers)


@pytest.mark.parametrize("moves", [False, True], ids=["where it was", "elsewhere"])
def test_what_is_in_the_pool_is_restored_to_where_the_cache_is(engines: Engines, moves: bool) -> None:
    """If somebody empties the pool, it is vLLM, by a reset of the connector."""
    engine = engines(**SIZES)
    warm(engine, PROMPT)
    fall_asleep(engine)
    if moves:
        for rank in engine.ranks:
            move(rank)
    wake_up(engine)
    assert engine.scheduler.connector._scheduler is engine.side, "the pool's contents are forgotten"
    before = copied(engine)
    serve(engine, PROMPT)
    assert copied(engine) - before == 2 * NUM_BLOCKS * engine.settings.slot_bytes
    other = serve(engine, tokens(40, 1))
    assert depth_of(engine, other) == NUM_BLOCKS, "nothing is stored any more"
    come_to_rest(engine)


def test_orders_in_between_fail_and_nothing_is_copied(engines: Engines) -> None:
    engine = engines(**SIZES)
    warm(engine, PROMPT)
    fall_asleep(engine)
    before = copied(engine)
    for prompt in (PROMPT, tokens(40, 1)):
        assert serve(engine, prompt, 3).num_output_tokens == 3
    assert copied(engine) == before
    wake_up(engine)
    come_to_rest(engine)


def test_orders_from_before_fail_too(engines: Engines) -> None:
    """Where stores are submitted when the next step begins."""
    engine = engines(**SIZES, samples_late=True)
    finish(engine, PROMPT)
    assert all(rank.side is not None and rank.side._behind for rank in engine.ranks)
    fall_asleep(engine)
    before = copied(engine)
    come_to_rest(engine)
    assert copied(engine) == before
    wake_up(engine)


def test_copies_under_way_are_waited_for_and_reported(engines: Engines) -> None:
    engine = engines(**SIZES, copies=CopySchedule(bytes_per_poll=16))
    request = finish(engine, PROMPT)
    fall_asleep(engine)
    assert engine.jobs, "all has been reported before"
    assert copied(engine) == 2 * NUM_BLOCKS * engine.settings.slot_bytes
    wake_up(engine)
    come_to_rest(engine)
    assert depth_of(engine, request) == NUM_BLOCKS


def test_a_copy_that_hangs_forbids_it(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "_CLOSE_SECONDS", 0.0)
    engine = engines(**SIZES)
    hold(engine, STORE)
    request = finish(engine, PROMPT)
    for rank in engine.ranks:
        with pytest.raises(RuntimeError, match=r"2 copies .* have not ended .*Wake the engine up"):
            rank.connector.unregister_kv_caches()
    release(engine)
    come_to_rest(engine)
    assert depth_of(engine, request) == NUM_BLOCKS, "the engine did not go on as before"
    fall_asleep(engine)
    wake_up(engine)


def test_each_may_be_told_twice_or_not_at_all(engines: Engines) -> None:
    engine = engines(**SIZES)
    wake_up(engine)
    warm(engine, PROMPT)
    fall_asleep(engine)
    fall_asleep(engine)
    wake_up(engine)
    wake_up(engine)
    request = serve(engine, PROMPT)
    assert depth_of(engine, request) == NUM_BLOCKS and engine.counts["loads"] == 1
    for rank in engine.ranks:
        rank.connector.shutdown()
    fall_asleep(engine)
    for rank in engine.ranks:
        rank.connector.restore_kv_caches()


@pytest.fixture(params=[Tiered, Stored], ids=["disk", "store"])
def tiered(request: pytest.FixtureRequest) -> Iterator[Tiered]:
    tiered: Tiered = request.param(2, cpu_slots=200)
    yield tiered
    come_to_rest(tiered.engine)
    tiered.engine.close()


def nap(tiered: Tiered, level: int) -> None:
    """As vLLM's engine core does it: from level 1 on it resets connectors before. Level 2 drops weights."""
    engine = tiered.engine
    come_to_rest(engine)
    generation = engine.generation
    if level:
        assert engine.reset()
    if level < 2:
        engine.generation = generation
    fall_asleep(engine)
    wake_up(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_nothing_of_a_tier_is_read_until_a_restart(tiered: Tiered, level: int) -> None:
    """At level 1 the weights are the same, and we are told the same as at level 2."""
    rest = len(LONG) - WHOLE
    assert tiered.ask(LONG) == len(LONG)
    nap(tiered, level)
    assert tiered.ask(LONG) == len(LONG)
    tiered.evict()
    assert tiered.ask(LONG) == rest, "what was written since is this engine's"
    tiered.restart()
    assert tiered.ask(LONG) == rest


def test_after_a_light_sleep_all_is_read(tiered: Tiered) -> None:
    assert tiered.ask(LONG) == len(LONG)
    tiered.evict()
    nap(tiered, 0)
    assert tiered.ask(LONG) == len(LONG) - WHOLE


def test_orders_of_a_tier_fail_while_the_engine_sleeps(tiered: Tiered) -> None:
    """What comes up from it reaches the pool, and no cache that has no memory."""
    tiered.ask(LONG)
    tiered.evict()
    come_to_rest(tiered.engine)
    fall_asleep(tiered.engine)
    before = copied(tiered.engine)
    assert tiered.ask(LONG) == len(LONG)
    assert copied(tiered.engine) == before
    wake_up(tiered.engine)


def test_weights_are_named_at_the_operator_socket_while_the_engine_sleeps(tiered: Tiered) -> None:
    """What was written under the name before is read under it, and under no other."""
    rest = len(LONG) - WHOLE
    engine = tiered.engine
    connector = engine.scheduler.connector
    with tempfile.TemporaryDirectory(prefix="kvo") as directory:
        config = OffloadConfig(cpu_gib=1, operator_socket=str(Path(directory) / "run"))
        operator = Operator(connector._vllm_config, config, [], engine.side.weights, connector._target)
        [found] = engines_in(Path(directory) / "run")
        for version, computed in (("one", len(LONG)), ("two", len(LONG)), ("one", rest)):
            come_to_rest(engine)
            assert engine.reset()
            engine.generation = {"one": 1001, "two": 1002}[version]
            fall_asleep(engine)
            after = found.ask("weights")["num_resets"]
            assert found.ask("reset", weights_version=version, after=after)["version"] == version
            wake_up(engine)
            assert tiered.ask(LONG) == computed
            tiered.evict()
        operator.close()
