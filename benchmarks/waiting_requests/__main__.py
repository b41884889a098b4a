"""What do requests that wait for a prefix on its way cost each engine step?

    python -m benchmarks.waiting_requests [--restores 200] [--waiting 1000] [--json FILE]

Documents begin with the same system prompt, which the GPU has; the rest of each is in the CPU pool only.
One request per document is being restored. Then requests about the same documents arrive and wait, evenly
over the documents. The copies stand still for `--steps` steps, in which the scheduler asks about every
waiting request again. Then they go on until every request is done.

It runs on the virtual engine (`offload.testing.virtual`): vLLM's real scheduler and the real connectors, no
model. Per connector and hook of the scheduler's side: milliseconds per step, all calls of the step together.
They are told for the first step after `alone`, for the others in which copies stand still (median), and for
those in which copies end (longest). `schedule` is all of vLLM's `schedule()`, hooks included; `cache_blocks`
is vLLM's own work for blocks that a connector hands over, included in the hooks. `alone` are the same
questions asked one after the other, without vLLM's own work between them. Its first round is the first time
that anybody asks about these requests.

Then a storm: KV events of a pool of `--storm` blocks that is emptied, step by step (`kv_events`), beside
vLLM's conversion hash by hash.

Times are CPU time of the scheduler's thread, less what reading that clock takes, so other work on the machine
counts little.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request, RequestStatus

from allocator import Evicted
from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, at_least, parser_of, settings_of
from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.stopwatch import Stopwatch, frozen_heap, processor_seconds
from benchmarks.common.tables import Column, table
from offload.messages import LOAD
from offload.testing.virtual import VirtualEngine, VirtualSettings
from offload.testing.virtual.engine import VOCABULARY

__all__ = ["main"]

_BLOCK = 4
_SYSTEM_BLOCKS = 64
_DOCUMENT_BLOCKS = 136
_COLUMNS = (
    Column("connector", "connector"),
    Column("hook", "hook"),
    Column("first step ms", "first_ms"),
    Column("median ms", "median_ms"),
    Column("copies end ms", "copies_end_ms"),
)
_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if asked to."""
    options = _arguments(argv)
    logging.disable(logging.WARNING)
    remarks = report.load_note()
    rows: list[dict[str, Any]] = []
    for connector in options.connectors:
        rows += _measure(connector, options.restores, options.waiting, options.steps)
    rows += _storm(options.storm) if options.storm else []
    print(table(_COLUMNS, rows))
    for remark in remarks:
        print(remark)
    report.write(options.json, rows, settings=settings_of(options), remarks=remarks)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("waiting_requests", __doc__)
    add_numbers(
        parser,
        ("restores", 200, "under way"),
        ("waiting", 1000, "requests that wait"),
        ("steps", 20, "in which copies stand still", at_least(2)),
        ("storm", 300_000, "blocks of the emptied pool; 0: none", at_least(0)),
    )
    parser.add_argument("--connectors", nargs="+", default=["offload"], choices=["native", "offload"])
    return parser.parse_args(argv)


def _measure(connector: str, num_restores: int, num_waiting: int, num_steps: int) -> list[dict[str, Any]]:
    tokens = (_SYSTEM_BLOCKS + _DOCUMENT_BLOCKS + 2) * _BLOCK
    settings = VirtualSettings(
        connector=connector,
        gpu_blocks=(num_restores + 8) * (_DOCUMENT_BLOCKS + _SYSTEM_BLOCKS),
        cpu_slots=num_restores * _DOCUMENT_BLOCKS + 2 * _SYSTEM_BLOCKS,
        block_size=_BLOCK,
        num_layers=1,
        max_num_seqs=num_restores + num_waiting,
        chunk=8192,
        max_model_len=tokens,
        eviction_policy="lru",
        verify_loads="never",
        step_seconds=0.01,
    )
    engine = VirtualEngine(settings, random.Random(0))
    try:
        return _measure_on(engine, connector, num_restores, num_waiting, num_steps)
    finally:
        engine.close()


def _measure_on(
    engine: VirtualEngine, connector: str, num_restores: int, num_waiting: int, num_steps: int
) -> list[dict[str, Any]]:
    rng = random.Random(1)
    engine.audit.after_step = lambda: None  # type: ignore[method-assign]  # it looks at the whole pool
    system = rng.choices(range(VOCABULARY), k=_SYSTEM_BLOCKS * _BLOCK)
    documents = [
        system + rng.choices(range(VOCABULARY), k=_DOCUMENT_BLOCKS * _BLOCK) for _ in range(num_restores)
    ]
    for document in documents:
        engine.add([*document, 1], 1)
    engine.drain()
    assert engine.reset(connector=False)
    engine.add([*system, 2], 1)  # now the GPU has the system prompt
    engine.drain()
    (copier,) = engine.copiers
    copier.held.add(LOAD)
    first = [engine.add([*document, 3], 1) for document in documents]
    while not all(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in first):
        engine.step()
    loads = len(engine.jobs)
    others = [engine.add([*documents[k % num_restores], 4], 1) for k in range(num_waiting)]
    alone = _row(connector, "get_num_new_matched_tokens, alone", _ask(engine, others), [{}])
    stopwatch = Stopwatch(time.thread_time_ns, less_own=True)
    stopwatch.watch(engine.scheduler.connector, {hook: hook for hook in _HOOKS})
    stopwatch.watch(engine.scheduler, {"schedule": "schedule"})
    stopwatch.watch(engine.scheduler.kv_cache_manager, {"cache_blocks": "cache_blocks"})
    with frozen_heap():
        held = [_timed_step(engine, stopwatch) for _ in range(num_steps)]
        assert not any(request.is_finished() for request in others)
        assert len(engine.jobs) >= loads, "a restore ended"
        copier.held.clear()
        ending = []
        while not all(request.is_finished() for request in [*first, *others]):
            ending.append(_timed_step(engine, stopwatch))
    return [*(_row(connector, label, held, ending) for label in ("schedule", "cache_blocks", *_HOOKS)), alone]


def _timed_step(engine: VirtualEngine, stopwatch: Stopwatch) -> dict[str, float]:
    """Seconds by hook."""
    engine.step()
    return {hook: max(spent, 0.0) / 1e9 for hook, spent in stopwatch.take().items()}


def _ask(engine: VirtualEngine, others: Sequence[Request]) -> list[dict[str, float]]:
    """What the scheduler asks in a step about all who wait, with nothing between: seconds, round by round."""
    local = _SYSTEM_BLOCKS * _BLOCK
    rounds = []
    for _ in range(50):
        begin = time.perf_counter()
        for request in others:
            engine.scheduler.connector.get_num_new_matched_tokens(request, local)
        rounds.append({"get_num_new_matched_tokens, alone": time.perf_counter() - begin})
    return rounds


def _row(
    connector: str, label: str, held: list[dict[str, float]], ending: list[dict[str, float]]
) -> dict[str, Any]:
    first, *standing = [1000 * step.get(label, 0.0) for step in held]
    return {
        "connector": connector,
        "hook": label,
        "first_ms": round(first, 3),
        "median_ms": round(statistics.median(standing), 3),
        "copies_end_ms": round(1000 * max(step.get(label, 0.0) for step in ending), 3),
    }


def _storm(size: int) -> list[dict[str, Any]]:
    """KV events of a pool that is emptied, as one chain and as chains of one block."""
    from offload.scheduler.groups import Group, Kind
    from offload.vllm.groups import EventGroup
    from offload.vllm.kv_events import KvEventStream

    hashes = fresh_hashes(random.Random(0), size)
    group = EventGroup(0, "full_attention", None, Group(Kind.FULL, _BLOCK))

    def convert() -> None:
        for each in hashes:
            maybe_convert_block_hash(BlockHash(each))

    rows = [_storm_row("one by one", [processor_seconds(convert)])]
    for label, news in (
        ("one chain", [Evicted(hashes)]),
        ("chains of one block", [Evicted([each]) for each in hashes]),
    ):
        stream, steps = KvEventStream([group], _BLOCK), []
        with frozen_heap():
            while news or stream.is_behind:
                steps.append(processor_seconds(partial(stream.take, news)))
                news = []
        rows.append(_storm_row(label, steps))
    return rows


def _storm_row(label: str, steps: list[float]) -> dict[str, Any]:
    return {
        "connector": "kv_events",
        "hook": f"{label}, {len(steps)} steps",
        "first_ms": round(1000 * steps[0], 3),
        "median_ms": round(1000 * statistics.median(steps), 3),
        "copies_end_ms": None,
    }


if __name__ == "__main__":
    sys.exit(main())
