"""KV on disk survives the engine: the next one serves its first ask from there."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(5 * 8 * BLOCK_SIZE + 20, seed=1)
OTHER = prompt_of(5 * 8 * BLOCK_SIZE + 20, seed=2)
WHOLE = 5 * 8 * BLOCK_SIZE
"""Tokens of the whole extents of a prompt; one is 8 blocks of 128 KiB."""


def settings(path: Path, **tier: Any) -> dict[str, Any]:
    return {"cpu_gib": 0.0625, "tiers": [{"kind": "disk", "path": str(path), "gib": 0.1, **tier}]}


def start(path: Path, number: int, **arguments: Any) -> EngineProcess:
    return EngineProcess(path / f"engine{number}.log", settings(path / "tier"), **arguments)


def ask(engine: EngineProcess, prompt: list[int] = PROMPT) -> Answer:
    [answer] = engine.run(Engine.ask, [prompt])
    engine.run(Engine.settle)
    return answer


def test_a_restarted_engine_serves_from_disk(tmp_path: Path) -> None:
    with start(tmp_path, 1) as engine:
        cold = ask(engine)
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine)
    assert cold.num_cached == 0
    with start(tmp_path, 2) as engine:
        first = ask(engine)
        assert engine.run(Engine.forget_gpu)
        again = ask(engine)
    assert first.num_cached == WHOLE
    assert difference(first, cold) < TOLERANCE
    assert restored.num_cached == again.num_cached == WHOLE
    assert difference(first, restored) == difference(again, restored) == 0
