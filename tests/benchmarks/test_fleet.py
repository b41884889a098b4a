"""The simulation of fleets: its load, its engines, what choosers are told, and what is found."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.choosers import POLICIES, chooser_of
from benchmarks.fleet.engines import SECONDS_PER_TOKEN, Asked, FleetEngine
from benchmarks.fleet.load import conversations, load_of
from benchmarks.fleet.simulation import Simulation
from benchmarks.fleet.trees import EngineTrees, EventIndex, deep_bytes
from benchmarks.trace_replay.prefill import PrefillModel
from benchmarks.trace_replay.replay import TraceClock
from offload.observe.trace import TraceRequest, read_trace
from offload.proxy.policies import Request
from tests.benchmarks.conftest import Refusal, Run


def line_of(request: TraceRequest) -> str:
    """As it is in a file."""
    told = {"timestamp": 1000 * request.timestamp_seconds, "input_length": request.input_length}
    return json.dumps({**told, "output_length": request.output_length, "hash_ids": request.hash_ids})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "talks_trace.jsonl"
    file.write_text("\n".join(line_of(each) for each in conversations(40, 5, 0)))
    return file


def test_a_load_is_copied_and_played_as_fast_as_it_takes(trace: Path) -> None:
    requests = read_trace(trace)
    load = load_of("talks", requests, engines=4, per_engine=100, share=0.5)
    assert load.copies == 2 and len(load.requests) == 400
    assert len({each.hash_ids[0] for each in load.requests}) == 2, "copies share no block"
    seconds = PrefillModel().seconds(each.input_length for each in load.requests)
    lasts = requests[-1].timestamp_seconds / load.speed
    assert seconds / (4 * lasts) == pytest.approx(0.5)
    times = [each.timestamp_seconds for each in load.requests]
    assert times == sorted(times)


def asked(number: int, length: int, at: float, output: int = 10) -> Asked:
    chain = [place.to_bytes(16) for place in range(length)]
    return Asked(number, chain, 512 * length + 1, output, at)


class Told:
    """A chooser that notes what it is told."""

    def __init__(self, clock: TraceClock) -> None:
        self._clock = clock
        self.seen: list[tuple[str, float]] = []

    async def choose(self, asked: Asked) -> int:
        self.seen.append(("came", self._clock.seconds))
        return 0

    def began(self, asked: Asked, engine: int) -> None:
        self.seen.append(("began", self._clock.seconds))

    def ended(self, asked: Asked, engine: int) -> None:
        self.seen.append(("ended", self._clock.seconds))

    def told(self, engine: int, events: object) -> None:
        self.seen.append(("told", self._clock.seconds))


def test_prompts_are_computed_one_by_one_and_found_by_the_next() -> None:
    clock = TraceClock()
    engine = FleetEngine.make("e", 100, clock, has_events=True)
    told = Told(clock)
    first, second = asked(0, 8, 1.0), asked(1, 10, 1.001)
    asyncio.run(Simulation([engine], told, clock, 0.2).run([first, second]))
    model = PrefillModel()
    whole = model.seconds([8 * 512 + 1])
    rest = model.seconds([10 * 512 + 1]) - model.seconds([8 * 512])
    assert (first.found, second.found) == (0, 8 * 512)
    assert first.first_at == pytest.approx(1 + whole)
    assert second.first_at == pytest.approx(1 + whole + rest)
    assert engine.busy_seconds == pytest.approx(whole + rest)
    times = dict(told.seen)
    assert times["told"] == pytest.approx(second.first_at + 0.2)
    assert times["ended"] == pytest.approx(second.first_at + 10 * SECONDS_PER_TOKEN)
    engine.check()


def test_an_index_of_events_says_what_the_trees_say() -> None:
    clock, rng = TraceClock(), random.Random(0)
    engines = [FleetEngine.make(f"e{at}", 30, clock, has_events=True) for at in range(5)]
    index, trees = EventIndex([each.name for each in engines]), EngineTrees(engines)
    names = [each.name for each in engines]

    async def both(chain: list[bytes]) -> None:
        request = Request("", "", 0, [], (), {"chain": chain}, None)
        known = await trees.depths([], request, names)
        assert await index.depths([], request, names) == {name: at for name, at in known.items() if at}

    for number in range(300):
        at = rng.randrange(5)
        root = rng.randrange(6)
        chain = [(100 * root + place).to_bytes(16) for place in range(rng.randrange(1, 12))]
        one = Asked(number, chain, 512 * len(chain) + 1, 1, 0.0)
        engines[at].begin(one)
        index.take(at, engines[at].end(one))
        asyncio.run(both(chain))
    assert any(each.allocator.num_evicted for each in engines)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all(policy: str, trace: Path) -> None:
    clock = TraceClock()
    engines = [FleetEngine.make(f"http://e{at}", 50, clock, policy == "events") for at in range(3)]
    chooser = chooser_of(policy, engines)
    requests = [asked(number, number % 20 + 1, number / 10) for number in range(60)]
    asyncio.run(Simulation(engines, chooser, clock, 0.1).run(requests))
    assert all(each.first_at > each.arrived_at for each in requests)
    assert sum(each.num_requests for each in engines) == 60 == len(chooser.spent_ns)
    assert (chooser.num_bytes() > 0) is (policy in ("prefix", "events"))


def test_a_fleet_that_looks_for_prefixes_finds_more(run: Run, trace: Path) -> None:
    options = ("--trace", str(trace), "--engines", "4", "--per-engine", "50", "--pool-blocks", "100")
    rows = {row["policy"]: row for row in run(fleet, *options).rows}
    assert set(rows) == set(POLICIES)
    for name in ("prefix", "trees", "events"):
        assert rows[name]["found"] > 1.3 * rows["round_robin"]["found"]
        assert rows[name]["found"] <= rows[name]["found_by_one"] + 0.1
    assert rows["events"]["events_per_request"] > 0


def test_what_is_kept_is_counted_once() -> None:
    text = b"x" * 1000
    assert 1000 < deep_bytes({"a": text, "b": [text, text]}) < 2000


def test_a_trace_that_is_none_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    assert "--trace" in refusal(fleet, "--trace", str(tmp_path / "nothing"))
    assert "whole numbers" in refusal(fleet, "--trace", "x", "--engines", "0")
