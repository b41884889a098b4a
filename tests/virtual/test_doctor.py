"""``kv-offload doctor`` by what engines say: of each fault its finding, and of a healthy engine none."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm

from offload.cli import main
from offload.config import OffloadConfig
from offload.doctor.command import BY_ITS_WORD, examine
from offload.doctor.finding import Finding
from offload.messages import LOAD, STORE
from offload.operator.client import engines_in
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine
from offload.vllm.operator import Operator
from offload.vllm.peers import PROBE
from offload.worker.transfer import DEADLINE_SECONDS
from tests.virtual.driver import (
    Engines,
    come_to_rest,
    finish,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
)
from tests.virtual.test_peers import Pair
from tests.virtual.test_tiers import LIMITS, Tiered

PROMPT = tokens(40)
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvo") as path:
        yield Path(path) / "run"


@pytest.fixture
def ask(directory: Path) -> Iterator[Ask]:
    """What a virtual engine says of itself, through its socket."""
    made: list[Operator] = []

    def ask(engine: VirtualEngine, **settings: Any) -> dict[str, Any]:
        connector: Any = engine.scheduler.connector
        config = OffloadConfig.from_mapping(
            {"cpu_gib": 1, "operator_socket": str(directory / str(len(made))), **settings}
        )
        (directory / str(len(made))).mkdir(parents=True)
        operator = Operator(
            connector._vllm_config, config, connector._places, engine.side.weights, connector._target
        )
        made.append(operator)
        operator.learn([rank.side.facts.memory for rank in engine.ranks if rank.side is not None])
        operator.tell(engine.side)
        operator.check_invariants()
        [found] = engines_in(directory / str(len(made) - 1))
        told: dict[str, Any] = found.ask("status")
        return told

    yield ask
    for operator in made:
        operator.close()


def findings(told: dict[str, Any]) -> dict[str, Finding]:
    """By name; each once."""
    found = [finding for check in BY_ITS_WORD for finding in check(told)]
    assert all(finding.saw and finding.do for finding in found)
    names = {finding.name: finding for finding in found}
    assert len(names) == len(found)
    return names


def test_a_healthy_engine_has_none(
    engines: Engines, ask: Ask, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on its machine, by the command, for people and for scripts."""
    engine = engines(num_ranks=2)
    warm(engine, PROMPT)
    serve(engine, PROMPT)
    told = ask(engine)
    assert told["counters"]["total"]["restored_tokens"] == 40 == told["counters"]["lately"]["restored_tokens"]
    assert told["counters"]["total"]["prompt_tokens"] == 80
    assert len(told["memory"]) == 2
    examined = examine(told)
    assert not examined.unseen
    assert {finding.name for finding in examined.findings} <= {"memory-short"}, "of this machine"
    status = main(["doctor", "--operator-socket", str(directory / "0"), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["engines"] == [told["engine"]] and status == bool(shown["findings"])
    assert main(["doctor", "--operator-socket", str(directory / "0")]) == status
    assert f"engine   {told['engine']}: " in capsys.readouterr().out


def test_before_its_first_step_it_says_what_it_could_not_see(engines: Engines, directory: Path) -> None:
    connector: Any = engines().scheduler.connector
    config = OffloadConfig(cpu_gib=1, operator_socket=str(directory))
    operator = Operator(
        connector._vllm_config, config, connector._places, connector._weights, connector._target
    )
    [found] = engines_in(directory)
    examined = examine(found.ask("status"))
    operator.close()
    assert not examined.findings
    assert ["yet to be made" in text for text in examined.unseen] == [True]


def test_an_engine_that_came_to_rest_shows_nothing_in_flight(engines: Engines, directory: Path) -> None:
    """Although it says how it stands at the beginning of steps, and it makes none any more."""
    engine = engines()
    connector: Any = engine.scheduler.connector
    config = OffloadConfig(cpu_gib=1, operator_socket=str(directory))
    operator = connector._operator = Operator(
        connector._vllm_config, config, connector._places, connector._weights, connector._target
    )
    hold(engine, STORE)
    finish(engine, PROMPT)
    step_until(engine, lambda: len(engine.side.ledger) > 0)
    operator._next = 0.0
    engine.step()
    [found] = engines_in(directory)
    assert found.ask("status")["jobs"]["num_in_flight"] > 0
    come_to_rest(engine)
    told = found.ask("status")
    assert told["jobs"]["num_in_flight"] == 0 and told["pool"]["num_used_blocks"] > 0
    operator.close()


@pytest.mark.parametrize(("cpu_slots", "is_found"), [(16, True), (200, False)])
def test_a_pool_that_is_too_small(engines: Engines, ask: Ask, cpu_slots: int, is_found: bool) -> None:
    engine = engines(cpu_slots=cpu_slots, gpu_blocks=40, eviction_policy="lru")
    for first in range(12):
        serve(engine, tokens(48, first))
    found = findings(ask(engine))
    assert ("pool-too-small" in found) is is_found
    if is_found:
        saw = found["pool-too-small"].saw
        assert "16 blocks" in saw and "cache 40" in saw and "0.0%" in saw
        gib = 4 * 40 * engine.side._common.slot_bytes / 2**30
        assert f"cpu_gib, to begin with to {gib:.3g}," in found["pool-too-small"].do
        assert "kv-offload resize" in found["pool-too-small"].do


def test_a_route_that_pauses_and_a_copy_that_hangs(engines: Engines, ask: Ask) -> None:
    engine = engines()
    engine.copiers[0].force(STORE, Fault.STUCK)
    serve_beside(engine, PROMPT)
    step_until(engine, lambda: engine.side.ledger.num_given_up > 0, int(DEADLINE_SECONDS) + 20)
    found = findings(ask(engine))
    assert {"route-paused", "stuck-jobs"} == found.keys()
    assert "gpu_to_pool pauses" in found["route-paused"].saw
    assert found["stuck-jobs"].saw.startswith("1 copies")
    engine.copiers[0].let_go()
    come_to_rest(engine)


def serve_beside(engine: VirtualEngine, prompt: list[int]) -> None:
    request = engine.add(prompt, 1)
    step_until(engine, request.is_finished)


def test_jobs_that_fail(engines: Engines, ask: Ask) -> None:
    """Not so many in a row that they pause."""
    engine = engines(gpu_blocks=60)
    for first in range(16):
        if first % 2:
            engine.copiers[0].force(STORE, Fault.FAIL)
        serve(engine, tokens(16, first))
    found = findings(ask(engine))
    assert found.keys() == {"failing-jobs"}
    assert "gpu_to_pool 8" in found["failing-jobs"].saw


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_that_are_not_those_stored(engines: Engines, ask: Ask, num_ranks: int) -> None:
    engine = engines(num_ranks=num_ranks)
    engine.copiers[-1].force(STORE, Fault.WRONG_BYTES)
    warm(engine, PROMPT)
    serve(engine, PROMPT)
    found = findings(ask(engine))
    assert found.keys() == {"checksums-differ"}
    assert "pool_to_gpu 1;" in found["checksums-differ"].saw


def test_bytes_below_that_are_not_those_kept(ask: Ask) -> None:
    tiered = Tiered()
    tiered.ask()
    tiered.evict()
    for medium in tiered.tier.media:
        for kept in medium.inner.kept.values():  # type: ignore[attr-defined]
            kept.content[1] ^= 1
    tiered.ask()
    found = findings(ask(tiered.engine))
    assert "checksums-differ" in found and "_to_pool" in found["checksums-differ"].saw
    tiered.engine.close()


def test_a_copy_that_fails_otherwise_is_no_broken_one(engines: Engines, ask: Ask) -> None:
    engine = engines()
    warm(engine, PROMPT)
    engine.copiers[0].force(LOAD, Fault.END_SHORT)
    serve(engine, PROMPT)
    told = ask(engine)
    assert told["counters"]["total"]["failed_jobs"] == 1
    assert not findings(told)


def test_stores_that_are_dropped(engines: Engines, ask: Ask) -> None:
    """Copies do not keep up, and requests need the blocks."""
    engine = engines(gpu_blocks=60, cpu_slots=400, max_num_seqs=2)
    hold(engine, STORE)
    for first in range(12):
        serve_beside(engine, tokens(100, first))
    release(engine)
    come_to_rest(engine)
    found = findings(ask(engine))
    assert found.keys() == {"stores-dropped"}
    assert "did not keep up" in found["stores-dropped"].saw


@pytest.mark.parametrize(("dropped", "is_found"), [(95, False), (105, True)])
def test_a_tenth_of_what_is_stored_may_be_dropped(
    engines: Engines, ask: Ask, dropped: int, is_found: bool
) -> None:
    """As the alert counts it: beside what is stored, not as a part of both."""
    engine = engines()
    warm(engine, PROMPT)
    told = ask(engine)
    block_bytes = told["pool"]["num_bytes"] / told["pool"]["num_blocks"]
    told["counters"]["lately"].update(stored_bytes=1000 * block_bytes, unstored_blocks_gave_way=dropped)
    assert ("stores-dropped" in findings(told)) == is_found


def test_a_vllm_that_was_not_tested(engines: Engines, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert findings(ask(engine)).keys() == {"vllm-not-tested"}


def test_an_engine_of_another_release(engines: Engines, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ask(engines())
    monkeypatch.setattr("offload.doctor.engine.own_version", lambda: "9.9")
    found = findings(told)
    assert found.keys() == {"other-version"}
    assert "9.9 is installed" in found["other-version"].saw


@pytest.mark.parametrize("seed", ["", "7"])
def test_hashes_that_differ_after_each_start(
    engines: Engines, ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: str
) -> None:
    engine = engines()
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    engine.scheduler.connector._vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert not findings(ask(engine))
    found = findings(ask(engine, record_trace=str(tmp_path / "trace.jsonl")))
    assert found.keys() == (set() if seed else {"hashes-unseeded"})


@pytest.mark.parametrize(("host", "is_found"), [("127.0.0.1", False), ("10.0.0.1", True)])
def test_a_fleet_in_clear(engines: Engines, ask: Ask, tmp_path: Path, host: str, is_found: bool) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    told = ask(engines(), listen=f"{host}:7000", fleet_key_file=str(key))
    assert findings(told).keys() == ({"fleet-in-clear"} if is_found else set())


def test_a_tier_that_is_private_since_a_reset(ask: Ask) -> None:
    tiered = Tiered()
    tiered.ask()
    assert not findings(ask(tiered.engine))
    assert tiered.engine.reset()
    tiered.ask()
    assert findings(ask(tiered.engine)).keys() == {"tier-private"}
    tiered.engine.close()


def test_a_budget_that_is_spent(ask: Ask) -> None:
    tiered = Tiered(num_places=10, limits=LIMITS._replace(bytes_per_day=1.0))
    label = next(flow.route.target for flow in tiered.engine.side.flows if flow.route.verb == "spill")
    tiered.ask()
    told = ask(tiered.engine)
    told["tiers"][0]["tier"] = label
    assert not findings(told)
    for first in range(20, 30):
        tiered.ask(tokens(250, first=first))
    told = ask(tiered.engine)
    told["tiers"][0]["tier"] = label
    assert "tier-budget-spent" in findings(told)
    tiered.engine.close()


def test_a_peer_that_is_away(ask: Ask) -> None:
    pair = Pair()
    pair.compute()
    pair.ask()
    assert not findings(ask(pair.decode))
    pair.fleet.cut_off(0)
    pair.ask(tokens(100, 5))  # which finds that out
    pair.decode.ranks[0].side._engine._lanes[PROBE].clock = lambda: 1e9  # type: ignore[union-attr]
    pair.plainly(tokens(100, 6))
    found = findings(ask(pair.decode))
    assert "peer-not-connected" in found
    assert pair.fleet.address(0).shown in found["peer-not-connected"].saw
