"""Sends requests to a replay engine, each at its time, and measures."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.engine_replay.engine import ReplayEngine, Step
from benchmarks.engine_replay.workloads import ReplayRequest

_MOST_IDLE_STEPS = 1_000_000
_NS_PER_MS = 1e6


def _int64s() -> array[int]:
    return array("q")


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Measurement:
    """What a replay took. Arrays have one item per step, but ``ttft`` has one per request, in seconds.

    Attributes:
        step_ns: in the scheduler (schedule and update), connector included.
        connector_ns: of that in the connector, as the stopwatch sees it, and in its hook at arrivals.
        ttft: virtual time from arrival to the end of the step that generated the first token.
        hit_tokens_gpu: prompt tokens that the GPU cache had at first admission.
        hit_tokens_cpu: prompt tokens that the connector had then.
        prompt_tokens: of all requests.
        preemptions: how often a running request lost its blocks.
        most_waiting: requests that waited at one time.
        virtual_seconds: from the first arrival to the last step.
    """

    step_ns: array[int] = field(default_factory=_int64s)
    connector_ns: array[int] = field(default_factory=_int64s)
    ttft: array[float] = field(default_factory=_doubles)
    hit_tokens_gpu: int = 0
    hit_tokens_cpu: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    most_waiting: int = 0
    virtual_seconds: float = 0.0

    def row(self, with_connector: bool) -> dict[str, float | int | None]:
        """The columns of a result, rounded; those of the connector are None without one."""
        requests = len(self.ttft)
        step_ms = np.asarray(self.step_ns) / _NS_PER_MS
        connector_ms = np.asarray(self.connector_ns) / _NS_PER_MS
        row: dict[str, float | int | None] = {
            "requests": requests,
            "steps": len(step_ms),
            "scheduler_ms_per_request": step_ms.sum() / requests,
            **_spread("step_ms", step_ms),
            "hit_tokens_gpu": self.hit_tokens_gpu,
            "hit_tokens_cpu": self.hit_tokens_cpu,
            "prompt_tokens": self.prompt_tokens,
            "ttft_p50": float(np.percentile(self.ttft, 50)),
            "ttft_p99": float(np.percentile(self.ttft, 99)),
            "connector_ms_per_request": connector_ms.sum() / requests,
            **_spread("connector_step_ms", connector_ms),
            "virtual_seconds": self.virtual_seconds,
            "most_waiting": self.most_waiting,
            "preemptions": self.preemptions,
        }
        for name, value in row.items():
            if not with_connector and name.startswith("connector_"):
                row[name] = None
            elif isinstance(value, float):
                row[name] = round(float(value), 5)
        return row


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    p50, p99, most = np.percentile(values, [50, 99, 100])
    return {f"{name}_p50": p50, f"{name}_p99": p99, f"{name}_max": most}


def replay(engine: ReplayEngine, requests: Iterator[ReplayRequest], concurrency: int = 1) -> Measurement:
    """Run until all are answered and nothing is under way.

    Args:
        engine: idle.
        requests: in order of arrival; each is taken from the iterator when the one before has been sent.
        concurrency: requests without arrival time are sent so that this many are under way.

    Raises:
        RuntimeError: the engine steps on and on without computing a token.
    """
    result = Measurement()
    arrivals: dict[str, float] = {}
    clock, began = engine.clock, engine.clock.now
    upcoming = next(requests, None)
    idle_steps = 0
    while upcoming is not None or not engine.is_idle():
        while upcoming is not None and (
            len(arrivals) < concurrency if upcoming.arrival is None else upcoming.arrival <= clock.now
        ):
            arrival = arrivals[upcoming.req_id] = clock.now if upcoming.arrival is None else upcoming.arrival
            engine.add(upcoming.req_id, upcoming.hashes, upcoming.num_prompt, upcoming.num_output, arrival)
            result.prompt_tokens += upcoming.num_prompt
            upcoming = next(requests, None)
        expected = None if upcoming is None else upcoming.arrival
        if engine.is_idle():
            assert expected is not None
            clock.wait_until(expected)
            continue
        result.most_waiting = max(result.most_waiting, engine.scheduler.get_request_counts()[1])
        step = engine.step(expected)
        idle_steps = 0 if step.output.total_num_scheduled_tokens else idle_steps + 1
        if idle_steps > _MOST_IDLE_STEPS:
            raise RuntimeError(f"{idle_steps} steps without a token; {len(arrivals)} requests wait")
        _count(result, step, clock.now, arrivals)
    result.virtual_seconds = clock.now - began
    return result


def _count(result: Measurement, step: Step, now: float, arrivals: dict[str, float]) -> None:
    result.step_ns.append(step.schedule_ns + step.update_ns)
    result.connector_ns.append(sum(step.connector_ns.values()))
    result.preemptions += len(step.output.preempted_req_ids or ())
    for answer in step.answers:
        stats = answer.prefill_stats
        if stats is not None:  # vLLM tells them once, with the first token
            result.ttft.append(now - arrivals[answer.request_id])
            result.hit_tokens_gpu += stats.num_local_cached_tokens
            result.hit_tokens_cpu += stats.num_external_cached_tokens
        if answer.finished:
            del arrivals[answer.request_id]
