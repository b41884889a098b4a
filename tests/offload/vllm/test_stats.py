"""Our metrics through vLLM's log line and Prometheus registration."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from packaging.version import Version
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from offload.messages import GPU_ROUTES, LOAD, STORE, Route
from offload.observe.metrics import METRICS, Metrics
from offload.vllm import stats
from offload.vllm.plugin import CONNECTOR, register
from offload.vllm.stats import OffloadPromMetrics, OffloadStats

TRANSFER = KVTransferConfig(
    kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config={"cpu_gib": 1}
)


class TestStats:
    def test_counters_add_up_and_gauges_are_replaced(self) -> None:
        stats = OffloadStats(data={"stored_bytes": 5, "pool_used_blocks": 9})
        merged = stats.aggregate(
            OffloadStats(data={"stored_bytes": 7, "pool_used_blocks": 4, "failed_jobs": 1})
        )
        assert merged.data == {"stored_bytes": 12, "pool_used_blocks": 4, "failed_jobs": 1}

    def test_aggregating_does_not_change_the_other(self) -> None:
        other = OffloadStats(data={"stored_bytes": 7})
        OffloadStats(data={"stored_bytes": 5}).aggregate(other)
        assert other.data == {"stored_bytes": 7}

    def test_reduced_stats_name_every_metric(self) -> None:
        reduced = OffloadStats(data={"stored_bytes": 5, "route_bytes:gpu_to_pool": 5}).reduce()
        plain = {spec.name: 0 for spec in METRICS if not spec.label}
        assert reduced == {**plain, "stored_bytes": 5, "route_bytes:gpu_to_pool": 5}

    def test_counts_of_a_route_add_up(self) -> None:
        stats = OffloadStats(data={"route_bytes:gpu_to_pool": 5, "route_paused:gpu_to_pool": 1})
        stats.aggregate(OffloadStats(data={"route_bytes:gpu_to_pool": 2, "route_paused:gpu_to_pool": 0}))
        assert stats.data == {"route_bytes:gpu_to_pool": 7, "route_paused:gpu_to_pool": 0}

    def test_empty(self) -> None:
        stats = OffloadStats()
        assert stats.is_empty()
        stats.data["stored_bytes"] = 5
        assert not stats.is_empty()
        stats.reset()
        assert stats.is_empty()

    def test_data_is_plain(self) -> None:
        metrics = Metrics()
        metrics.count("stored_bytes", 5)
        metrics.show("pool_blocks", 10)
        assert OffloadStats(data=metrics.take()).to_dict() == {"stored_bytes": 5, "pool_blocks": 10}


@pytest.fixture
def page() -> Callable[[], dict[str, float]]:
    """Reads a metrics page that ``prom`` fills: sample to value."""
    registry = CollectorRegistry()

    def read() -> dict[str, float]:
        lines = generate_latest(registry).decode().splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in samples if "_created{" not in name}

    read.registry = registry  # type: ignore[attr-defined]
    return read


@pytest.fixture
def prom(page: Any, monkeypatch: pytest.MonkeyPatch) -> KVConnectorProm:
    """vLLM's own plumbing, for two engines, on a registry of its own."""
    register()
    for name, kind in (("_gauge_cls", Gauge), ("_counter_cls", Counter), ("_histogram_cls", Histogram)):
        monkeypatch.setattr(KVConnectorProm, name, partial(kind, registry=page.registry))
    config: Any = SimpleNamespace(kv_transfer_config=TRANSFER)
    return KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})


def sample(name: str, engine: int = 0, route: Route | None = None) -> str:
    suffix = "_total" if name in {spec.name for spec in METRICS if spec.is_counter} else ""
    label = "" if route is None else f',route="{route.label}"'
    return f'vllm:cpu_offload_{name}{suffix}{{engine="{engine}",model_name="tiny"{label}}}'


def test_every_metric_is_on_the_page_from_the_start(
    prom: KVConnectorProm, page: Callable[[], dict[str, float]]
) -> None:
    assert isinstance(prom.prom_metrics, OffloadPromMetrics)
    assert page() == {
        sample(spec.name, engine, route): 0
        for spec in METRICS
        for engine in (0, 1)
        for route in (GPU_ROUTES if spec.by_route else (None,))
        if spec.by_route or not spec.label
    }


def test_the_page_has_descriptions(prom: KVConnectorProm, page: Any) -> None:
    text = generate_latest(page.registry).decode()
    for spec in METRICS:
        name = sample(spec.name).split("{")[0]
        assert f"# HELP {name} {spec.description}" in text
        assert f"# TYPE {name} {'counter' if spec.is_counter else 'gauge'}" in text


def test_counters_add_up_and_gauges_are_set_per_engine(
    prom: KVConnectorProm, page: Callable[[], dict[str, float]]
) -> None:
    prom.observe({"stored_bytes": 5, "pool_used_blocks": 3})
    prom.observe({"stored_bytes": 7, "pool_used_blocks": 2})
    prom.observe({"stored_bytes": 1}, engine_idx=1)
    shown = {name: value for name, value in page().items() if value}
    assert shown == {sample("stored_bytes"): 12, sample("pool_used_blocks"): 2, sample("stored_bytes", 1): 1}


def test_what_is_counted_by_route_has_its_label(
    prom: KVConnectorProm, page: Callable[[], dict[str, float]]
) -> None:
    metrics = Metrics()
    metrics.count("route_bytes", 7, LOAD)
    metrics.count("route_bytes", 2, STORE)
    metrics.show("route_paused", 1, STORE)
    prom.observe(metrics.take())
    shown = {name: value for name, value in page().items() if value}
    assert shown == {
        sample("route_bytes", route=LOAD): 7,
        sample("route_bytes", route=STORE): 2,
        sample("route_paused", route=STORE): 1,
    }


INFO = "vllm:kv_offload_config_info"
POOL = {"pool_blocks": 512, "pool_tokens": 16384, "pool_bytes": 1 << 26, "pool_used_tokens": 64}


def info_sample(engine: int, blocks: int, nbytes: int, tokens: int) -> str:
    return (
        f'{INFO}{{cpu_blocks_per_chunk="1",cpu_kv_cache_size_bytes="{nbytes}",'
        f'cpu_kv_cache_size_tokens="{tokens}",cpu_num_chunks="{blocks}",engine="{engine}",model_name="tiny"}}'
    )


def test_vllms_name_for_the_size_of_a_pool() -> None:
    """From vLLM 0.33 on it has one, and these are its labels."""
    has_one = Version(vllm.__version__).release >= (0, 33)
    assert (stats.CONFIG_INFO is not None) == has_one
    if has_one:
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

        assert stats.CONFIG_INFO == INFO
        assert tuple(stats._INFO_LABELS) == CPUOffloadingInfo.config_info_keys()


def test_the_size_of_the_pool_under_vllms_name(
    prom: KVConnectorProm, page: Callable[[], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine's own, from its first values on."""
    monkeypatch.setattr(stats, "CONFIG_INFO", INFO)
    prom.observe({"stored_bytes": 5})
    assert not [name for name in page() if name.startswith(INFO)]
    for _ in range(2):
        prom.observe(POOL)
    prom.observe({**POOL, "pool_blocks": 7, "pool_tokens": 224, "pool_bytes": 99}, engine_idx=1)
    shown = {name: value for name, value in page().items() if name.startswith(INFO)}
    assert shown == {info_sample(0, 512, 1 << 26, 16384): 1, info_sample(1, 7, 99, 224): 1}


def test_without_vllms_name_there_are_our_own_gauges(
    prom: KVConnectorProm, page: Callable[[], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "CONFIG_INFO", None)
    prom.observe(POOL)
    shown = {name: value for name, value in page().items() if value}
    assert shown == {sample(name): value for name, value in POOL.items()}


def test_a_sibling_that_has_vllms_name_keeps_it(
    prom: KVConnectorProm, page: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of the two a ``MultiConnector`` asks first: ours registers the name with its first values."""
    monkeypatch.setattr(stats, "CONFIG_INFO", INFO)
    theirs = Gauge(INFO, "Theirs.", ["model_name", "engine", "cpu_num_chunks"], registry=page.registry)
    theirs.labels("tiny", "0", "3").set(1)
    for _ in range(2):
        prom.observe(POOL)
    shown = {name: value for name, value in page().items() if value}
    ours = {sample(name): value for name, value in POOL.items()}
    assert shown == {f'{INFO}{{cpu_num_chunks="3",engine="0",model_name="tiny"}}': 1, **ours}
    (record,) = caplog.records
    assert "is another connector's; this pool's size is in vllm:cpu_offload_pool_*" in record.getMessage()


def test_the_log_line_tells_each_interval() -> None:
    register()
    logged: list[str] = []
    log = KVConnectorLogging(TRANSFER)
    metrics = Metrics()

    def interval(*stored: int) -> None:
        for nbytes in stored:
            metrics.show("pool_blocks", 30)
            metrics.count("stored_bytes", nbytes)
            values = metrics.take()
            if values:
                log.observe(values)
        log.log(lambda text, *values: logged.append(text % values))

    interval(5, 7)
    interval(2)
    interval(0)
    assert len(logged) == 2, "an interval without news has no line"
    for line, stored in zip(logged, (12, 2), strict=True):
        assert f"stored_bytes={stored}," in line
        assert "pool_blocks=30," in line
        assert "restored_tokens=0," in line
