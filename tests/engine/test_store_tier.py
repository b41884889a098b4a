"""KV in a store that engines share: what one computed the other restores, and none is ever wrong."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.mooncake_config import MOONCAKE
from offload.testing.engines.hybrids import HYBRIDS, tiny_hybrid
from offload.vllm.tiers import store_extent_slots
from tests.engine.answers import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    TOLERANCE,
    Answer,
    difference,
    largest_difference,
    prompt_of,
)
from tests.engine.engine import Engine, model_directory
from tests.engine.process import EngineProcess
from tests.engine.test_hybrid import QUESTIONS as HYBRID_QUESTIONS
from tests.engine.test_hybrid import settings_of
from tests.mooncake import MooncakeServer
from tests.stores import SERVERS, StoreServer

pytestmark = pytest.mark.engine

EXTENT = store_extent_slots(BLOCK_BYTES, 1)
"""Blocks of one."""
NUM_EXTENTS = 2
WHOLE = NUM_EXTENTS * EXTENT * BLOCK_SIZE
"""Tokens of the whole extents of a prompt."""
PROMPT, OTHER, THIRD = (prompt_of(WHOLE + 20, seed=seed) for seed in (1, 2, 3))

_WAIT_SECONDS = 60.0


Server = StoreServer | MooncakeServer


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind, path = getattr(request, "param", "redis"), tmp_path / "store"
    server = MooncakeServer(path) if kind == MOONCAKE else StoreServer(kind, path)
    yield server
    server.kill()


def start(
    path: Path, server: Server, number: int, *, cpu_gib: float = 0.125, **arguments: Any
) -> EngineProcess:
    """An engine whose requests wait for answers however busy this machine is."""
    tier = server.settings | {"wait_seconds": 10}
    settings = {"cpu_gib": cpu_gib, "tiers": [tier]}
    return EngineProcess(path / f"engine{number}.log", settings, **{"fork": True} | arguments)


def ask(engine: EngineProcess, prompt: list[int]) -> Answer:
    [answer] = engine.run(Engine.ask, [prompt])
    return answer


def wait_until_kept(engine: EngineProcess, server: Server, num_keys: int) -> None:
    """Until the server has so many extents."""
    until = time.monotonic() + _WAIT_SECONDS
    while len(server.all_keys()) < num_keys:
        engine.run(Engine.settle)
        assert time.monotonic() < until, engine.log()
    engine.run(Engine.settle)


@pytest.mark.parametrize("server", [*SERVERS, MOONCAKE], indirect=True)
def test_what_one_engine_computed_the_other_restores(server: Server, tmp_path: Path) -> None:
    with start(tmp_path, server, 1) as one, start(tmp_path, server, 2) as other:
        cold = ask(one, PROMPT)
        assert cold.num_cached == 0
        wait_until_kept(one, server, NUM_EXTENTS)
        sent = server.num_sent if isinstance(server, StoreServer) else None
        restored = ask(other, PROMPT)
        assert restored.num_cached == WHOLE
        assert difference(restored, cold) < TOLERANCE
        if isinstance(server, StoreServer) and sent is not None:
            nbytes = server.num_sent - sent
            assert 0 <= nbytes - WHOLE // BLOCK_SIZE * BLOCK_BYTES < 65536, "each byte came once"
        ask(other, OTHER)
        wait_until_kept(other, server, 2 * NUM_EXTENTS)
        assert ask(one, OTHER).num_cached == WHOLE
        server.kill()
        assert ask(one, THIRD).num_cached == 0, "every request is answered without it"
        assert difference(ask(one, PROMPT), cold) < TOLERANCE
        assert ask(other, prompt_of(300, seed=9)).num_cached == 0
        server.start()
        if isinstance(server, MooncakeServer):
            server.pause()  # and engines end while it hangs


@pytest.mark.parametrize("server", ["redis", MOONCAKE], indirect=True)
def test_all_in_flight_are_answered_when_the_server_is_killed(server: Server, tmp_path: Path) -> None:
    """Each fetches what the other has written, and computes more. They step only when they are told to."""
    one_has, other_has, news = (
        [prompt_of(WHOLE + 20, seed=2 * of + each) for each in (0, 1)] for of in (5, 6, 7)
    )
    with (
        start(tmp_path, server, 1, in_process=True) as one,
        start(tmp_path, server, 2, in_process=True) as other,
    ):
        cold_one = one.run(Engine.ask, one_has)
        wait_until_kept(one, server, 2 * NUM_EXTENTS)
        cold_other = other.run(Engine.ask, other_has)
        wait_until_kept(other, server, 4 * NUM_EXTENTS)
        asked_one = [one.run(Engine.add, prompt, 4) for prompt in [*other_has, news[0]]]
        asked_other = [other.run(Engine.add, prompt, 4) for prompt in [*one_has, news[1]]]
        one.run(Engine.step)
        while not other.run(Engine.step):
            pass  # until it has the first token of a request: one of four
        server.kill()
        answers_one, answers_other = one.run(Engine.finish, asked_one), other.run(Engine.finish, asked_other)
        cold_news = [ask(other, news[0]), ask(one, news[1])]
    cold = [*cold_other, cold_news[0], *cold_one, cold_news[1]]
    assert all(answer.num_cached == 0 and len(answer.tokens) == 4 for answer in cold)
    assert largest_difference([*answers_one, *answers_other], cold) < TOLERANCE


@pytest.mark.parametrize("server", ["redis", MOONCAKE], indirect=True)
def test_a_reset_hides_what_is_there_and_keeps_it_for_others(server: Server, tmp_path: Path) -> None:
    """Weights are updated, and an engine with the first ones is started after that."""
    with start(tmp_path, server, 1) as engine:
        cold = ask(engine, PROMPT)
        wait_until_kept(engine, server, NUM_EXTENTS)
        assert engine.run(Engine.forget_all)
        assert ask(engine, PROMPT).num_cached == 0, "this engine does not find it"
        ask(engine, OTHER)
        wait_until_kept(engine, server, 3 * NUM_EXTENTS)
        assert engine.run(Engine.forget_gpu)
    with start(tmp_path, server, 2) as engine:
        first = ask(engine, PROMPT)
        assert first.num_cached == WHOLE
        assert difference(first, cold) < TOLERANCE
        assert ask(engine, OTHER).num_cached == 0, "nobody finds what was written since"


def test_other_weights_find_nothing(server: Server, tmp_path: Path) -> None:
    with start(tmp_path, server, 1) as engine:
        ask(engine, PROMPT)
        wait_until_kept(engine, server, NUM_EXTENTS)
    model = tmp_path / "model"
    shutil.copytree(model_directory(), model)
    [weights] = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with start(tmp_path, server, 2, model=model) as engine:
        assert ask(engine, PROMPT).num_cached == 0


def test_a_hybrid_model_goes_on_at_a_checkpoint_of_another_engine(server: Server, tmp_path: Path) -> None:
    kind = next(iter(HYBRIDS))
    question = HYBRID_QUESTIONS[0]
    arguments = settings_of(HYBRIDS[kind]) | {"model": tiny_hybrid(kind)}
    with start(tmp_path, server, 1, cpu_gib=0.25, **arguments) as engine:
        cold = ask(engine, question)
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine, question)
        wait_until_kept(engine, server, 1)
        time.sleep(1)  # it is asked for checkpoints until it has had time to spill them
        engine.run(Engine.settle)
    with start(tmp_path, server, 2, cpu_gib=0.25, **arguments) as engine:
        first = ask(engine, question)
    assert cold.num_cached == 0 < restored.num_cached
    assert first.num_cached == restored.num_cached
    assert difference(first, restored) == 0


def test_ranks_with_the_same_kv_write_it_once(server: Server, tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 2, "model": model_directory(kv_heads=1)}
    with start(tmp_path, server, 1, **arguments) as engine:
        cold = ask(engine, PROMPT)
        extent = store_extent_slots(BLOCK_BYTES // 2, 1) * BLOCK_SIZE
        num_extents = len(PROMPT) // extent
        wait_until_kept(engine, server, num_extents)
        assert len(server.all_keys()) == num_extents
    with start(tmp_path, server, 2, **arguments) as engine:
        first = ask(engine, PROMPT)
    assert first.num_cached == num_extents * extent
    assert difference(first, cold) < TOLERANCE
