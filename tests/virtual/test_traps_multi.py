"""Traps under vLLM's MultiConnector; numbered as in docs/traps.md.

Two of our connectors are its children, each with a pool of its own. One is the sibling, whose copies take
no time; the other is the one that the engine checks.
"""

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from offload.messages import LOAD, WorkerReport
from offload.testing.copiers.inline import InlineCopier
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.testing.virtual.audit import Audit
from offload.testing.virtual.rank import VirtualRank
from offload.testing.virtual.settings import make_vllm_config
from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.stats import OffloadStats
from offload.vllm.wire import NOTHING, ReportEnvelope
from offload.worker.copiers import Copier
from tests.virtual.driver import (
    LOADING,
    come_to_rest,
    depth_of,
    forget_gpu,
    serve,
    step_until,
    tokens,
    warm,
    watch,
)

Pairs = Callable[..., tuple[VirtualEngine, CpuOffloadConnector]]


@pytest.fixture
def pairs(engines: Callable[..., VirtualEngine], monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Makes engines, and with each the sibling on the scheduler's side; ``ours`` is the checked child."""

    def make(ours: int, **settings: Any) -> tuple[VirtualEngine, CpuOffloadConnector]:
        for side in ("_scheduler", "_worker"):
            of_ours = property(lambda multi, side=side: getattr(multi.sub_connectors[ours], side))
            monkeypatch.setattr(MultiConnector, side, of_ours, raising=False)
        see_plan = Audit.see_plan
        monkeypatch.setattr(Audit, "see_plan", lambda audit, plan: see_plan(audit, plan.metadata[ours]))
        # A worker's own connector is the MultiConnector, so that a child hands out no handshake.
        monkeypatch.setattr("offload.vllm.connector.has_kv_transfer_group", lambda: True)
        monkeypatch.setattr("offload.vllm.connector.get_kv_transfer_group", object)
        order = itertools.cycle(range(2))

        def make_copier(rank: VirtualRank, *_: Any) -> Copier:
            return rank.copier if next(order) == ours else InlineCopier()

        monkeypatch.setattr(VirtualRank, "make_copier", make_copier)
        monkeypatch.setattr("offload.testing.virtual.engine.make_vllm_config", with_two_children)
        engine = engines(**settings)
        assert isinstance(engine.scheduler.connector, MultiConnector)
        return engine, engine.scheduler.connector.sub_connectors[1 - ours]

    return make


def with_two_children(settings: VirtualSettings) -> VllmConfig:
    vllm_config = make_vllm_config(settings)
    transfer = vllm_config.kv_transfer_config
    child = {
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    transfer.kv_connector = "MultiConnector"
    transfer.kv_connector_extra_config = {"connectors": [child, child]}
    transfer.kv_load_failure_policy = "recompute"
    return vllm_config


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("also_ours", [True, False])
def test_trap_42_a_load_of_a_sibling_is_none_of_ours(pairs: Pairs, also_ours: bool, num_ranks: int) -> None:
    """We see its report, have perhaps offered the same, and store what it supplied."""
    engine, sibling = pairs(ours=1, num_ranks=num_ranks)
    warm(engine, tokens(20))
    if not also_ours:
        engine.side.reset()
    assert sibling._scheduler is not None
    theirs, ours = watch_loads(sibling._scheduler.ledger), watch_loads(engine.side.ledger)
    computed = watch(engine)
    request = serve(engine, tokens(20))
    assert (len(theirs), len(ours)) == (1, 0) and computed[request.request_id] == 1
    come_to_rest(engine)
    assert depth_of(engine, request) == 5 and not len(sibling._scheduler.ledger)


def test_trap_42_while_a_sibling_has_no_answer_nothing_is_begun(pairs: Pairs) -> None:
    """Its None defers the request, however often we have been asked before it was."""
    engine, sibling = pairs(ours=0)
    warm(engine, tokens(20))
    loads, computed = watch_loads(engine.side.ledger), watch(engine)
    answer = sibling.get_num_new_matched_tokens
    sibling.get_num_new_matched_tokens = lambda request, num_local: (None, False)  # type: ignore
    request = engine.add(tokens(20), 1)
    for _ in range(5):
        engine.step()
        assert not loads and not engine.side.allocator._pins and request.status != LOADING
    sibling.get_num_new_matched_tokens = answer  # type: ignore[method-assign]
    step_until(engine, request.is_finished)
    assert len(loads) == 1 and computed[request.request_id] == 1
    come_to_rest(engine)


def test_trap_42_statistics_are_rebuilt_by_the_name_of_the_class(pairs: Pairs) -> None:
    engine, _ = pairs(ours=0, log_stats=True)
    stored = 0
    make_stats = engine.scheduler.make_stats

    def watched(spec_stats: Any, stats: Any, *rest: Any, **more: Any) -> Any:
        nonlocal stored
        if stats is not None:
            data = pickle.loads(pickle.dumps(stats.to_dict()))
            rebuilt = MultiConnector.build_kv_connector_stats(data)
            assert rebuilt is not None and isinstance(rebuilt["CpuOffloadConnector"], OffloadStats)
            stored += rebuilt.reduce()["CpuOffloadConnector"]["stored_bytes"]
        return make_stats(spec_stats, stats, *rest, **more)

    engine.scheduler.make_stats = watched
    warm(engine, tokens(20))
    assert stored == 2 * 5 * engine.settings.slot_bytes


def test_trap_76_in_a_pipeline_the_stage_with_most_layers_says_how_many_slots_there_are(
    pairs: Pairs,
) -> None:
    """No handshake tells of a child's ranks: their facts travel with their first reports."""
    engine, sibling = pairs(ours=0, num_ranks=2, stages=2, num_layers=1)
    least = engine.settings.cpu_slots // 2
    assert [rank.side.facts.num_slots for rank in engine.ranks] == [2 * least, least]
    assert engine.side.allocator.capacity == least and sibling._scheduler.allocator.capacity == least
    for first in range(2 * least // 5):
        warm(engine, tokens(20, first))
        computed = watch(engine)
        request = serve(engine, tokens(20, first))
        assert computed[request.request_id] == 1
    come_to_rest(engine)


def test_trap_76_while_a_rank_has_not_told_nothing_is_planned(pairs: Pairs) -> None:
    """Requests are served, and the engine stays awake until it has."""
    engine, _ = pairs(ours=0, num_ranks=2, stages=2)
    ours = engine.scheduler.connector.sub_connectors[0]
    connector = CpuOffloadConnector(ours._vllm_config, KVConnectorRole.SCHEDULER, ours._kv_cache_config)
    assert not connector.has_pending_push_work(), "there is no engine yet"
    connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)
    warm(engine, tokens(20))
    request = engine.add(tokens(20), 1)
    for told in ([], [0], [1]):
        facts = [engine.ranks[rank].connector.sub_connectors[0]._worker.facts for rank in told]
        envelope = ReportEnvelope(WorkerReport(), facts)
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=envelope))
        has_all = told == [1]
        assert (connector._scheduler is not None) is has_all
        assert connector.has_pending_push_work() is not has_all
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.update_state_after_alloc(request, None, 0)  # type: ignore[arg-type]
        assert connector.build_connector_meta(SchedulerOutput.make_empty()) is NOTHING
    come_to_rest(engine)


@pytest.mark.parametrize("early", ["finishes", "goes on"])
def test_trap_76_who_was_admitted_before_is_not_known_and_does_no_harm(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, early: str
) -> None:
    """A request that the first step of an engine has computed already: its blocks are not stored."""
    requests = []

    def add_first(engine: VirtualEngine) -> None:
        requests.append(engine.add(tokens(20), 1 if early == "finishes" else 6))
        find_side(engine)

    find_side = VirtualEngine._find_side
    monkeypatch.setattr(VirtualEngine, "_find_side", add_first)
    engine, _ = pairs(ours=0, num_ranks=2)
    come_to_rest(engine)
    assert requests[0].is_finished() and not engine.side.allocator.num_resident
    forget_gpu(engine)
    warm(engine, tokens(20))
    computed = watch(engine)
    request = serve(engine, tokens(20))
    assert computed[request.request_id] == 1


def watch_loads(ledger: Any) -> list[Any]:
    """Loads that are opened there from now on."""
    opened: list[Any] = []
    open_job = ledger.open

    def watched(flow: Any, *arguments: Any) -> Any:
        job = open_job(flow, *arguments)
        if flow.route == LOAD:
            opened.append(job)
        return job

    ledger.open = watched
    return opened
