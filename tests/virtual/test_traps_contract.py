"""What vLLM's contract asks of a connector, tried on the real scheduler; numbered as in docs/traps.md."""

import contextlib
import inspect
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from offload.errors import UnsupportedError
from offload.messages import LOAD, STORE, Route
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualSettings
from offload.testing.virtual.settings import make_kv_cache_config, make_vllm_config
from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.wire import FactsEnvelope
from tests.virtual.driver import (
    LOADING,
    Engines,
    come_to_rest,
    depth_of,
    forget_gpu,
    hold,
    release,
    serve,
    step_until,
    table_of,
    tokens,
    warm,
    watch,
)


def test_trap_07_loads_are_fenced_before_the_forward_pass_and_stores_behind_it(engines: Engines) -> None:
    """A load waits for zeroing of its target, but not for the forward pass; a store waits for both."""
    engine = engines()
    warm(engine, tokens(20))
    copier, happened = engine.copiers[0], []
    for name in ("fence", "submit"):
        original = getattr(copier, name)

        def logged(*arguments: Any, name: str = name, original: Any = original) -> None:
            happened.append((name, next(way for way in arguments if isinstance(way, Route))))
            original(*arguments)

        setattr(copier, name, logged)
    forward = engine.runner._forward
    engine.runner._forward = lambda *step: happened.append("forward") or forward(*step)  # type: ignore
    engine.add(tokens(20), 1)
    step_until(engine, lambda: engine.counts["loads"] == 1)
    assert happened == [("fence", LOAD), "forward", ("submit", LOAD)]
    happened.clear()
    engine.add(tokens(8, first=1), 1)
    engine.step()
    assert happened == ["forward", ("fence", STORE), ("submit", STORE)]
    come_to_rest(engine)


def test_trap_08_a_producer_only_role_is_refused() -> None:
    vllm_config = make_vllm_config(VirtualSettings())
    vllm_config.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(UnsupportedError, match="kv_role"):
        CpuOffloadConnector(vllm_config, KVConnectorRole.WORKER, make_kv_cache_config(VirtualSettings()))


def test_trap_11_where_the_engine_turned_prefix_caching_off_the_connector_is_refused() -> None:
    settings = VirtualSettings()
    vllm_config = make_vllm_config(settings)
    vllm_config.cache_config.enable_prefix_caching = False
    with pytest.raises(UnsupportedError, match="prefix caching is off"):
        Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=make_kv_cache_config(settings),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=settings.block_size,
        )


def test_trap_12_resets_answer_with_booleans(engines: Engines) -> None:
    engine = engines()
    assert engine.scheduler.connector.reset_cache() is True
    assert engine.scheduler.reset_prefix_cache(False, True) is True


def test_trap_18_offers_are_whole_blocks_within_the_prompt(engines: Engines) -> None:
    engine = engines()
    warm(engine, tokens(40))
    connector = engine.scheduler.connector
    for length in range(1, 41):
        request = engine.add(tokens(length), 1)
        offered, is_async = connector.get_num_new_matched_tokens(request, 0)
        assert offered == length // 4 * 4 and is_async is (offered > 0)
        engine.abort(request.request_id)
    come_to_rest(engine)


@pytest.mark.parametrize(
    "fate", ["goes on", "aborted", "aborted as it ends", "reset", "failed", "failed, aborted"]
)
def test_trap_17_a_load_is_reported_once_whatever_becomes_of_its_request(engines: Engines, fate: str) -> None:
    """The scheduler dies of a report for a request that runs or that it no longer knows."""
    engine = engines(num_ranks=2)
    warm(engine, tokens(20))
    if "failed" in fate:
        engine.copiers[1].force(LOAD, Fault.FAIL)
    hold(engine, LOAD)
    reported: list[str] = []
    receive = engine.scheduler.connector.update_connector_output

    def watched(output: KVConnectorOutput) -> None:
        reported.extend(output.finished_recving or ())
        receive(output)

    engine.scheduler.connector.update_connector_output = watched
    request, other = engine.add(tokens(20), 8), engine.add(tokens(9, first=1), 12)
    step_until(engine, lambda: request.status == LOADING and other.num_output_tokens > 1)
    if fate.endswith("aborted"):
        engine.abort(request.request_id)
    elif fate == "reset":
        engine.reset()
    engine.step()
    assert not reported, "reported while it may still write"
    release(engine)
    engine.step([request.request_id] if fate == "aborted as it ends" else [])
    come_to_rest(engine)
    assert reported == [request.request_id] and other.num_output_tokens == 12


@pytest.mark.parametrize("hook", ["fence", "submit", "poll"])
@pytest.mark.parametrize("way", [LOAD, STORE])
def test_trap_20_an_exception_below_is_a_failed_job(engines: Engines, way: Route, hook: str) -> None:
    engine = engines()
    if way is LOAD:
        warm(engine, tokens(20))

    def broken(*arguments: object) -> None:
        raise OSError("the device is gone")

    original = getattr(engine.copiers[0], hook)
    setattr(engine.copiers[0], hook, broken)
    request = engine.add(tokens(20, first=way is STORE), 4)
    step_until(engine, request.is_finished)
    assert request.num_output_tokens == 4
    setattr(engine.copiers[0], hook, original)
    come_to_rest(engine)


def test_trap_21_the_constructor_takes_what_the_factory_passes() -> None:
    names = list(inspect.signature(CpuOffloadConnector.__init__).parameters)
    assert names == ["self", "vllm_config", "role", "kv_cache_config"]
    transfer = make_vllm_config(VirtualSettings()).kv_transfer_config
    assert KVConnectorFactory.supports_hma_config(transfer), "models with several groups lose their allocator"


def test_trap_22_before_the_first_step_nothing_of_ours_runs(engines: Engines) -> None:
    """vLLM captures CUDA graphs then, which other threads' or streams' calls would break."""
    threads = set(threading.enumerate())
    engine = engines()
    assert set(threading.enumerate()) == threads
    copier = engine.copiers[0]
    assert not copier._now and not copier._tasks, "the copier was asked"


def test_trap_35_all_ranks_use_the_least_number_of_slots_any_of_them_has(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CpuOffloadConnector.get_handshake_metadata
    fewer = itertools.count(step=7)

    def tell(connector: CpuOffloadConnector) -> FactsEnvelope:
        facts = told(connector).facts
        return FactsEnvelope(replace(facts, num_slots=facts.num_slots - next(fewer)))

    monkeypatch.setattr(CpuOffloadConnector, "get_handshake_metadata", tell)
    engine = engines(num_ranks=2)
    assert engine.side.allocator.capacity == engine.settings.cpu_slots - 7
    connector, facts = engine.scheduler.connector, engine.ranks[0].connector._worker.facts
    connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): FactsEnvelope(facts), (1, 0): FactsEnvelope(replace(facts, num_slots=facts.num_slots - 7))}
    )
    with pytest.raises(UnsupportedError, match="restart the engine"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): FactsEnvelope(facts)})
    assert connector._scheduler is engine.side, "it was made anew"


def test_trap_36_of_a_released_chain_the_gpu_reuses_the_tail_first(engines: Engines) -> None:
    engine = engines()
    hold(engine, STORE)
    request = engine.add(tokens(20), 2)
    step_until(engine, lambda: bool(table_of(engine, request)))
    table = table_of(engine, request)
    step_until(engine, request.is_finished)
    come_to_rest(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert free[-5:] == table[4::-1]


def test_trap_38_best_effort_and_never_delaying(engines: Engines) -> None:
    engine = engines()
    assert engine.scheduler.requires_kv_delivery is False
    request = engine.add(tokens(20), 1)
    assert engine.scheduler.connector.request_finished(request, []) == (False, None)


@pytest.mark.parametrize("overlapped", [False, True], ids=["step by step", "overlapped"])
def test_trap_38_a_request_may_end_while_preempted(engines: Engines, overlapped: bool) -> None:
    """By an abort only: a consumer of KV is not preempted while a step of it is under way."""
    engine = engines(gpu_blocks=10, cpu_slots=50, overlapped=overlapped)
    requests = [engine.add(tokens(12, first), count) for first, count in enumerate((16, 15, 16, 17))]
    step_until(engine, lambda: any(request.status == RequestStatus.PREEMPTED for request in requests))
    victim = next(request for request in requests if request.status == RequestStatus.PREEMPTED)
    assert not table_of(engine, victim)
    engine.abort(victim.request_id)
    come_to_rest(engine)
    assert all(request.is_finished() for request in requests)


def test_trap_39_with_one_group_there_is_one_hash_per_block() -> None:
    settings = VirtualSettings()
    vllm_config, kv_cache_config = make_vllm_config(settings), make_kv_cache_config(settings)
    sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    assert sizes == (settings.block_size, settings.block_size)
    vllm_config.cache_config.prefix_match_unit = settings.block_size // 2
    with contextlib.suppress(ValueError):  # a finer hash is refused, or (before 0.32) not made
        sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    assert sizes == (settings.block_size, settings.block_size)


def test_trap_41_messages_survive_the_way_between_processes(engines: Engines) -> None:
    """Every engine here pickles them, once for all ranks; a report without jobs must not count as one."""
    engine = engines(num_ranks=2)
    hold(engine, STORE, 1)
    request = engine.add(tokens(20), 2)
    step_until(engine, request.is_finished)
    for _ in range(5):
        engine.step()
    assert depth_of(engine, request) == 0, "one rank of two has reported"
    come_to_rest(engine)
    assert depth_of(engine, request) == 5
    assert all(rank.side.take_report() is None for rank in engine.ranks)


def test_trap_43_statistics_count_what_was_moved(engines: Engines) -> None:
    engine = engines(log_stats=True)
    seen: list[dict[str, float]] = []
    original = engine.scheduler.make_stats

    def make_stats(spec_stats: Any, connector_stats: Any, *rest: Any, **more: Any) -> Any:
        seen.append(dict(connector_stats.data) if connector_stats else {})
        return original(spec_stats, connector_stats, *rest, **more)

    engine.scheduler.make_stats = make_stats
    warm(engine, tokens(20))
    serve(engine, tokens(20))
    totals = {name: sum(data.get(name, 0) for data in seen) for name in ("stored_bytes", "restored_tokens")}
    assert totals == {"stored_bytes": 5 * engine.settings.slot_bytes, "restored_tokens": 20}


def test_trap_43_blocks_are_announced_with_their_medium(engines: Engines) -> None:
    engine = engines(cpu_slots=6)
    engine.side.allocator._log.is_on = True
    connector = engine.scheduler.connector
    seen = []
    original = connector.take_events
    connector.take_events = lambda: seen.extend(events := list(original())) or events
    first = serve(engine, tokens(20))
    serve(engine, tokens(20, first=1))
    assert {event.medium for event in seen} == {"CPU"}
    stored = [event for event in seen if isinstance(event, BlockStored)]
    removed = [event for event in seen if isinstance(event, BlockRemoved)]
    assert sum(len(event.block_hashes) for event in stored) == 10
    assert sum(len(event.block_hashes) for event in removed) == 4
    assert depth_of(engine, first) == 1
    engine.reset()
    seen.clear()
    serve(engine, tokens(3))  # events travel on steps
    assert [type(event) for event in seen] == [BlockRemoved] * len(seen), "a reset has no event of a medium"
    assert sum(len(event.block_hashes) for event in seen) == 6


@pytest.mark.parametrize(("overlapped", "loaded", "hit"), [(False, 2, 1), (True, 4, 2)])
def test_trap_46_a_load_costs_a_step_more_than_a_hit_on_the_gpu(
    engines: Engines, overlapped: bool, loaded: int, hit: int
) -> None:
    """Two with overlapped steps. It starts behind the forward pass of the step that admits the request; a
    copy that takes no time is noticed in that same step, and the next one scheduled computes."""
    engine = engines(overlapped=overlapped)
    warm(engine, tokens(20))
    for num_steps in (loaded, hit):
        request, before = engine.add(tokens(21), 1), engine.num_steps
        step_until(engine, request.is_finished)
        assert engine.num_steps - before == num_steps
        come_to_rest(engine)
    assert engine.counts["loads"] == 1


def test_trap_82_who_needs_every_token_computed_is_stored_and_waits_for_nothing(engines: Engines) -> None:
    """Pooling of each token, or log-probabilities of a prompt. vLLM ignores what is offered for it."""
    engine = engines()
    warm(engine, tokens(20))
    hold(engine, LOAD)
    loading = engine.add(tokens(20), 1)
    step_until(engine, lambda: loading.status == LOADING)
    computed = watch(engine)
    request = engine.add([*tokens(20), *tokens(8, first=1)], 1, is_pooled=True)
    request.skip_reading_prefix_cache = True
    step_until(engine, request.is_finished)
    assert computed[request.request_id] == 28 and loading.status == LOADING
    come_to_rest(engine)
    assert depth_of(engine, request) == 7 and engine.counts["loads"] == 1


def test_hints_of_a_request_are_heeded(engines: Engines) -> None:
    engine = engines()
    unstored = serve(engine, tokens(20), hints={"cpu_offload_store": False})
    assert depth_of(engine, unstored) == 0
    warm(engine, tokens(20, first=1))
    computed = watch(engine)
    unloaded = serve(engine, tokens(20, first=1), hints={"cpu_offload_load": False})
    assert computed[unloaded.request_id] == 20


def test_decode_blocks_are_left_out_on_request(engines: Engines) -> None:
    engine = engines(store_decode_blocks=False)
    request = serve(engine, tokens(20), 12)
    assert depth_of(engine, request) == 5
    forget_gpu(engine)
    hold(engine, LOAD)
    again = engine.add(tokens(20), 1)
    step_until(engine, lambda: again.status == LOADING)
    come_to_rest(engine)
