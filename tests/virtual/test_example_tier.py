"""The example of docs/tier-example.md is a medium as all are, and serves an engine."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offload.testing.virtual import VirtualEngine, VirtualSettings
from tests.offload.worker.media.bench import EXTENT, PLACES, Pool, get, run
from tests.virtual.driver import come_to_rest, forget_gpu, serve, tokens, watch

BLOCK = 4
PROMPT = tokens(63 * BLOCK + 2)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def example() -> Any:
    [code] = re.findall(r"```python\n(.+?)```", (DOCS / "tier-example.md").read_text(), re.DOTALL)
    module = ModuleType("example")
    exec(compile(code, "tier-example.md", "exec"), module.__dict__)
    return module


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def medium(example: Any, pool: Pool, tmp_path: Path) -> Iterator[Any]:
    medium = example.FileMedium(tmp_path / "files", pool.slots, EXTENT, PLACES)
    yield medium
    assert medium.close(30)


def test_what_was_put_comes_back(medium: Any, pool: Pool) -> None:
    before = pool.read([1, 2, 3])
    assert run(medium, pool.put(1, [(0, 1, [1, 2]), (5, 1, [3])])).num_good == 2
    pool.fill(range(8))
    end = run(medium, get(2, [(0, 1, [4, 5]), (5, 1, [6])]))
    assert end.error is None and pool.read([4, 5, 6]) == before
    assert not medium.is_off


def test_what_is_wrong_is_a_failed_end(medium: Any, pool: Pool, tmp_path: Path) -> None:
    assert run(medium, get(1, [(0, 1, [1])])).num_good == 0, "nothing lies there"
    assert run(medium, pool.put(2, [(PLACES, 2, [1])])).num_good == 0, "there is no such place"
    rotten = pool.put(3, [(0, 3, [1])])
    pool.fill([1])
    assert run(medium, rotten).num_good == 0, "the pool's bytes have changed"
    assert run(medium, pool.put(4, [(0, 4, [1])])).num_good == 1
    assert run(medium, pool.put(3, [(0, 3, [1])])).num_good == 0, "an older job"
    (tmp_path / "files" / "0").write_bytes(b"short")
    assert run(medium, get(5, [(0, 4, [2])])).num_good == 0, "the file has changed"
    (tmp_path / "files" / "0").unlink()
    assert run(medium, get(6, [(0, 4, [2])])).num_good == 0, "the file is gone"


def wait_for_threads(example: Any) -> None:
    """A virtual engine's steps take no time, and threads do: each poll waits for all that is under way."""
    medium, under_way = example.FileMedium, set[int]()
    submit, poll = medium.submit, medium.poll

    def counted(self: Any, job: Any) -> None:
        under_way.add(job.job_id)
        submit(self, job)

    def waiting(self: Any) -> list[Any]:
        ended = poll(self)
        while under_way - {end.job_id for end in ended}:
            ended += poll(self)
        under_way.clear()
        return ended

    medium.submit, medium.poll = counted, waiting


def test_an_engine_is_served_from_it(example: Any, tmp_path: Path) -> None:
    wait_for_threads(example)
    settings = VirtualSettings(places=(example.place_of(tmp_path / "files"),), cpu_slots=96, gpu_blocks=140)
    engine = VirtualEngine(settings, random.Random(0))

    def ask(prompt: list[int]) -> int:
        computed = watch(engine)
        return computed[serve(engine, prompt).request_id]

    assert ask(PROMPT) == len(PROMPT)
    come_to_rest(engine)
    for first in (7, 8, 9):
        for _ in range(2):
            serve(engine, tokens(63 * BLOCK, first=first))
    forget_gpu(engine)
    come_to_rest(engine)
    assert ask(PROMPT) == len(PROMPT) - 15 * 4 * BLOCK
    engine.close()
