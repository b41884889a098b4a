"""Our metrics in the shape vLLM's log line and Prometheus endpoint take them."""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from offload.metrics import METRICS

_PREFIX = "vllm:cpu_offload_"
_COUNTERS = frozenset(spec.name for spec in METRICS if spec.is_counter)


class OffloadStats(KVConnectorStats):
    """``data`` maps metric names to increments (counters) or values (gauges)."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in _COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data.get(name, 0) for name in (spec.name for spec in METRICS)}

    def is_empty(self) -> bool:
        return not self.data


class OffloadPromMetrics(KVConnectorPromMetrics):
    """One Prometheus metric per entry of ``offload.metrics.METRICS``, named ``vllm:cpu_offload_*``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for spec in METRICS:
            kind = self._counter_cls if spec.is_counter else self._gauge_cls
            options = {} if spec.is_counter else {"multiprocess_mode": "mostrecent"}
            metric = kind(
                name=_PREFIX + spec.name, documentation=spec.description, labelnames=labelnames, **options
            )
            self._metrics[spec.name] = metric
            for labels in per_engine_labelvalues.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if name in _COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
