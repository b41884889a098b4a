"""How soon is a document that lies on a disk of use, and how does that compare with computing it?

    python -m benchmarks.tier_latency [--path DIR] [--tokens 8192] [--documents 4] [--rounds 8] [--json FILE]

A real vLLM engine on the CPU backend computes documents once; the disk below the pool keeps them. Then each
is asked for again, when neither the engine's cache nor the pool has it: with restores that follow the fetch,
and with the fetch first and the restore after it. Both take turns.

*Usable* is the time from the request's arrival at the scheduler to the end of its restore; *first token* is
what a client waits. The links alone: *read*, the medium reads it into free slots of the pool, and
verifies nothing; *verify*, a checksum of each block on one thread; *copy*, usable when the pool has it.

Times are elapsed ones, medians. Reads bypass the page cache where the file system lets them.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.tables import Column, table
from offload.testing.engines.environment import ENVIRONMENT, environment_of, transfer_config
from offload.testing.engines.models import tiny_llama
from offload.worker.media.base import MediumJob, Verb
from offload.worker.media.slab import SlabMedium
from offload.worker.seals import checksums_of

__all__ = ["main"]

_BLOCK = 32
_GIB = 1 << 30
_IDLE_SECONDS = 1e-3
"""Between two steps that compute nothing, as vLLM's own loop waits."""
_JOB_EXTENTS = 16
_QUIET_SECONDS = 60.0
"""Spills have so long."""
_COLUMNS = (
    Column("what", "what"),
    Column("of", "of"),
    Column("value", "value"),
    Column("unit", "unit"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("tier_latency", __doc__)
    parser.add_argument("--path", help="a directory on the disk (default: a temporary one)")
    add_numbers(
        parser,
        ("tokens", 8192, "of a document"),
        ("documents", 4, "that are asked for in turn"),
        ("rounds", 8, "in which each is asked for both ways"),
    )
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(dir=options.path) as path,
        environment_of({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    ):
        asked = _Asked(Path(path), options.tokens)
        rows = _rows(asked, options.documents, options.rounds)
        asked.close()
    print(table(_COLUMNS, rows))
    report.write(options.json, rows, settings=settings_of(options))
    return 0


class _Asked:
    """An engine with a pool that holds all documents and a disk below it, and when things happened in it."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = tiny_llama(
            hidden_size=256, layers=8, heads=8, kv_heads=8, max_position_embeddings=2 * num_tokens
        )
        self._tokens = num_tokens
        self._path = path
        config = {
            "cpu_gib": 2,
            "fetch_gpu_share": 1,
            "tiers": [{"kind": "disk", "path": str(path), "gib": 4, "write_gib_per_day": 1000}],
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                str(model),
                skip_tokenizer_init=True,
                block_size=_BLOCK,
                num_gpu_blocks_override=2 * num_tokens // _BLOCK + 50,
                gpu_memory_utilization=0.2,
                max_model_len=num_tokens + 64,
                dtype="float32",
                enforce_eager=True,
                max_num_batched_tokens=2048,
                kv_transfer_config=transfer_config(config),
            )
        )
        core: Any = self._engine.engine_core
        connector = core.engine_core.scheduler.connector
        self.side = connector._scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group()._worker
        self._most_follow = self.side.restores._arrivals._most_blocks
        self._num_asked = 0
        self.arrived = self.usable = 0.0
        self.chain: list[bytes] = []
        lanes = self.worker._engine._lanes.values()
        media = [getattr(lane.copier, "medium", None) for lane in lanes]
        self.medium: Any = next(medium for medium in media if isinstance(medium, SlabMedium))
        self._watch()

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were not computed."""
        from vllm import SamplingParams

        self._num_asked += 1
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        self._engine.add_request(str(self._num_asked), {"prompt_token_ids": prompt}, params)
        first, cached = 0.0, 0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            for output in outputs:
                if not first and output.outputs and output.outputs[0].token_ids:
                    first, cached = time.perf_counter() - began, output.num_cached_tokens or 0
            if not outputs:
                time.sleep(_IDLE_SECONDS)
        return first, cached

    def follow(self, is_on: bool) -> None:
        """Whether restores follow fetches from now on."""
        self.side.restores._arrivals._most_blocks = self._most_follow if is_on else 0

    def forget(self, *, pool: bool) -> None:
        """The engine's cache has nothing, and the pool neither if asked to."""
        self._engine.reset_prefix_cache()
        if pool:
            self.side.allocator.evict(self.side.allocator.capacity)
            assert not self.side.allocator.num_resident

    def come_to_rest(self) -> None:
        """All is written below."""
        until = time.monotonic() + _QUIET_SECONDS
        spills = next(flow for flow in self.side.flows if flow.route.verb == "spill")
        while spills._chains or len(self.side.ledger):
            self.ask([3] * 8)
            assert time.monotonic() < until, "the disk takes too long"

    def read_alone(self) -> float:
        """Seconds in which the medium reads the last document into free slots of the pool, unverified."""
        fetches = next(flow for flow in self.side.flows if flow.route.verb == "fetch")
        directory, grid = fetches._directory, fetches._grid
        names = grid.names(self.chain)
        reading = directory.read(names, 0, len(names))
        starts = np.arange(len(names) + 1) * grid.slots
        slots = self.side.allocator._pool.free()[: starts[-1]].copy()
        self.medium._options = replace(self.medium._options, verify=False)
        runner = self.medium.runner
        wake, runner.on_end = runner.on_end, _nobody  # the transfer engine would take the ends
        began = time.perf_counter()
        for first in range(0, len(names), _JOB_EXTENTS):
            part = slice(first, first + _JOB_EXTENTS)
            self.medium.submit(
                MediumJob(
                    -1 - first,
                    Verb.GET,
                    reading.places[part],
                    reading.generations[part],
                    starts[first : first + _JOB_EXTENTS + 1] - starts[first],
                    slots[starts[first] : starts[min(first + _JOB_EXTENTS, len(names))]],
                )
            )
        left = -(-len(names) // _JOB_EXTENTS)
        while left:
            time.sleep(_IDLE_SECONDS)
            for end in self.medium.poll():
                assert end.error is None, end.error
                left -= 1
        spent = time.perf_counter() - began
        runner.on_end = wake
        self.medium._options = replace(self.medium._options, verify=True)
        directory.end_read(reading)
        return spent

    def verify_alone(self, num_blocks: int) -> float:
        """Seconds to take the checksums of so many slots."""
        memory, size = self.worker._memory, self.worker.facts.slot_bytes
        addresses = memory.address + np.arange(num_blocks)[:, None] * size
        began = time.perf_counter()
        checksums_of(addresses, [size])
        return time.perf_counter() - began

    @property
    def slot_bytes(self) -> int:
        """Of a block."""
        return int(self.worker.facts.slot_bytes)

    def close(self) -> None:
        """The engine ends."""
        self._engine.engine_core.shutdown()

    def _watch(self) -> None:
        arrived, end = self.side.arrived, self.side.restores._end

        def on_arrival(request: Any) -> None:
            self.arrived = time.perf_counter()
            self.chain = list(self.side._engine.chain(request))
            arrived(request)

        def on_end(restore: Any) -> None:
            end(restore)
            self.usable = time.perf_counter()

        self.side.arrived, self.side.restores._end = on_arrival, on_end


def _nobody() -> None:
    """Is woken."""


def _rows(asked: _Asked, num_documents: int, num_rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    num_tokens = asked._tokens
    documents = [rng.integers(3, 500, num_tokens + 1).tolist() for _ in range(num_documents)]
    asked.ask(rng.integers(3, 500, num_tokens).tolist())  # warm
    spent: dict[str, list[float]] = defaultdict(list)
    for document in documents:
        seconds, cached = asked.ask(document)
        assert not cached
        spent["first token, computed"].append(seconds)
        asked.come_to_rest()
    num_bytes = num_tokens // _BLOCK * asked.slot_bytes
    for number in range(num_rounds):
        for document in documents:
            for is_on in (True, False) if number % 2 else (False, True):
                asked.follow(is_on)
                asked.forget(pool=True)
                seconds, cached = asked.ask(document)
                assert cached >= num_tokens - 4 * _BLOCK, f"{cached} of {num_tokens} tokens were restored"
                how = "chained" if is_on else "one after the other"
                spent[f"usable, {how}"].append(asked.usable - asked.arrived)
                spent[f"first token, {how}"].append(seconds)
                asked.come_to_rest()
            asked.forget(pool=False)
            asked.ask(document)
            spent["copy alone"].append(asked.usable - asked.arrived)
            spent["read alone"].append(asked.read_alone())
            spent["verify alone"].append(asked.verify_alone(num_bytes // asked.slot_bytes))
    of = f"{num_tokens:,} tokens, {num_bytes / 2**20:.0f} MiB"
    middle = {what: statistics.median(times) for what, times in spent.items()}
    rows = [_row(what, of, 1000 * value, "ms") for what, value in middle.items()]
    slowest = max(middle[f"{link} alone"] for link in ("read", "verify", "copy"))
    pairs = zip(spent["usable, chained"], spent["usable, one after the other"], strict=True)
    return [
        *rows,
        _row("usable, chained / slowest link", of, middle["usable, chained"] / slowest, "ratio"),
        _row(
            "usable, one by one / slowest link", of, middle["usable, one after the other"] / slowest, "ratio"
        ),
        _row("usable, chained / one by one", of, statistics.median(a / b for a, b in pairs), "ratio"),
        _row(
            "first token, chained / computed",
            of,
            middle["first token, chained"] / middle["first token, computed"],
            "ratio",
        ),
    ]


def _row(what: str, of: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "of": of, "value": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
