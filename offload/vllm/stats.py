"""Our metrics in the shape vLLM's log line and Prometheus endpoint take them."""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as native

from offload.messages import GPU_ROUTES
from offload.observe.metrics import METRICS, split_key

logger = logging.getLogger(__name__)

CONFIG_INFO: str | None = getattr(native, "KV_OFFLOAD_CONFIG_INFO", None)
"""vLLM's name for what an offloading connector says of its pool, from 0.33 on; None where it has none."""

_INFO_LABELS = {
    "cpu_num_chunks": "pool_blocks",
    "cpu_blocks_per_chunk": None,  # one
    "cpu_kv_cache_size_bytes": "pool_bytes",
    "cpu_kv_cache_size_tokens": "pool_tokens",
}
_PREFIX = "vllm:cpu_offload_"
_COUNTERS = frozenset(spec.name for spec in METRICS if spec.is_counter)


class OffloadStats(KVConnectorStats):
    """``data`` maps metric names to increments (counters) or values (gauges)."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            is_counter = split_key(name)[0] in _COUNTERS
            self.data[name] = self.data.get(name, 0) + value if is_counter else value
        return self

    def reduce(self) -> dict[str, int | float]:
        values: dict[str, int | float] = {spec.name: 0 for spec in METRICS if not spec.label}
        values.update(self.data)
        return values

    def is_empty(self) -> bool:
        return not self.data


class OffloadPromMetrics(KVConnectorPromMetrics):
    """One Prometheus metric per entry of ``offload.observe.metrics.METRICS``, named ``vllm:cpu_offload_*``.

    And vLLM's own ``kv_offload_config_info`` where vLLM has it: 1, with the size of the pool as labels.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._info: Any | None = None
        self._informed: set[int] = set()  # engines
        for spec in METRICS:
            kind = self._counter_cls if spec.is_counter else self._gauge_cls
            options = {} if spec.is_counter else {"multiprocess_mode": "mostrecent"}
            names = [*labelnames, spec.label] if spec.label else labelnames
            metric = kind(
                name=_PREFIX + spec.name, documentation=spec.description, labelnames=names, **options
            )
            self._metrics[spec.name] = metric
            for labels in per_engine_labelvalues.values():
                if spec.by_route:
                    for route in GPU_ROUTES:
                        metric.labels(*labels, route.label)
                elif not spec.label:
                    metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, value_of_label = split_key(key)
            metric = self._metrics[name].labels(*labels, *([value_of_label] if value_of_label else []))
            if name in _COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
        if (
            CONFIG_INFO is not None
            and engine_idx not in self._informed
            and "pool_bytes" in transfer_stats_data
        ):
            self._informed.add(engine_idx)
            self._show_info(CONFIG_INFO, transfer_stats_data, labels)

    def _show_info(self, name: str, values: dict[str, Any], labels: list[object]) -> None:
        """Publish what never changes of an engine's pool.

        Registered with the first values, once all siblings in a ``MultiConnector`` have registered theirs. If
        one of them is vLLM's own offloading connector, the name is its.
        """
        if self._info is None:
            labelnames = [*self._labelnames, *_INFO_LABELS]
            try:
                self._info = self._gauge_cls(
                    name=name,
                    documentation="Size of the CPU pool, as labels.",
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                )
            except ValueError:
                logger.warning("%s is another connector's; this pool's size is in %spool_*", name, _PREFIX)
                return
        sizes = [1 if source is None else int(values[source]) for source in _INFO_LABELS.values()]
        self._info.labels(*labels, *sizes).set(1)
