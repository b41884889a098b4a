"""What does a connector cost vLLM's scheduler, and what does it save the user?

    python -m benchmarks.engine_replay --connector none,native,simple,offload \\
        --workload longdoc|TRACE.jsonl [--json FILE]

The same requests go through vLLM's real scheduler with each connector (`benchmarks.engine_replay`). No
model runs and no bytes move. A simple model of a GPU says how long a step takes on a virtual clock:
`--step-seconds` + tokens / `--tokens-per-second`. A copy takes blocks * `--block-mib` /
`--link-gb-per-second`. Times to first token and virtual seconds are on that clock. Everything in
milliseconds was measured on this machine, as CPU time of the scheduler's thread, which waits for nothing
here. So other work on the machine counts less. It still makes cores slower: compare within a run, on a
machine at rest. `--timer wall` measures elapsed time.

Workload `longdoc`: 24 documents of 6,000 tokens, each asked about once per pass, one request after the other
(`--concurrency`). One pass is cold, the passes after it are warm, and each is a row:

- longdoc-fits/cold and longdoc-fits/warm: the GPU cache holds all documents. Warm, no block moves.
- longdoc/cold and longdoc/warm: the GPU cache holds 8 of them, the CPU pool all. Warm, every document is
  restored, and with no connector computed again.

Connectors take turns, `--rounds` times, each time with a fresh engine; numbers are medians of rounds, also
those of the worst step.

Workload TRACE.jsonl: a trace of prefix hashes (see `offload.observe.trace`), such as those published with the
Mooncake paper (FAST 2025, folder FAST25-release). Requests arrive at their times; an id becomes 32 blocks of
16 tokens. Each connector runs in a process of its own. `most_waiting` shows whether the modelled GPU keeps
up: if it grows with `--requests`, the load is too high for step times to mean much (`--speed` below 1 helps).

Columns: scheduler milliseconds (schedule + update) per request and per step; prompt tokens that the GPU cache
and the connector had at first admission; time to first token in virtual seconds; `connector_...`: time in
the connector's own hooks of its scheduler side, which is what it adds to each step, measured directly (that
takes some microseconds per step itself, so `longdoc` does it in runs of their own); `virtual_seconds`;
`most_waiting` requests at one time; `preemptions`; `skipped` requests of the trace, which are too long for
the engine; `added_ms_per_request` and `times_none`: scheduler time per request minus, and over, that with
connector none in the same round; `rounds`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, at_least, one_of, parser_of, positive, settings_of
from benchmarks.engine_replay import CONNECTORS, ReplayEngine, ReplaySettings, TimeModel
from benchmarks.engine_replay.driver import Measurement, replay
from benchmarks.engine_replay.rows import Row, compare, format_rows, merge
from benchmarks.engine_replay.workloads import LongDocuments, fits, of_trace
from offload.observe.trace import TraceError, TraceRequest, read_trace

__all__ = ["main"]

_BLOCK = 16
_LONGDOC = "longdoc"
_TIMERS = {"cpu": time.thread_time_ns, "wall": time.perf_counter_ns}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workload with all connectors; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    notes = report.load_note()
    for remark in notes:
        print(remark)
    began = time.monotonic()
    if options.workload == _LONGDOC:
        rounds = _longdoc_rounds(options)
    else:
        try:
            trace = read_trace(Path(options.workload), options.requests or None)
        except (TraceError, OSError) as error:
            parser.error(f"--workload: {error}")
        rounds = _trace_rounds(options, trace)
    rows = merge([compare(rows) for rows in rounds])
    print("\n" + format_rows(rows))
    settings = {**settings_of(options), "workload": _name(options.workload)}
    seconds = round(time.monotonic() - began)
    report.write(options.json, rows, settings=settings, notes=notes, run_seconds=seconds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("engine_replay", __doc__)
    model = TimeModel()
    documents = LongDocuments()
    parser.add_argument(
        "--connector",
        type=one_of(CONNECTORS),
        default=("none", "native", "simple", "offload"),
        metavar="NAME,...",
        help=f"to compare, of {', '.join(CONNECTORS)} (default: none,native,simple,offload)",
    )
    parser.add_argument(
        "--workload", default=_LONGDOC, metavar="longdoc|TRACE.jsonl", help="default: longdoc"
    )
    parser.add_argument(
        "--timer", choices=_TIMERS, default="cpu", help="that scheduler time is read from (default: cpu)"
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="default: 5 of longdoc, 1 of a trace; medians are told"
    )

    add_numbers(
        parser.add_argument_group("engine"),
        ("chunk", 8192, "tokens computed in a step at most"),
        ("max-num-seqs", 256, "running requests at most"),
    )
    add_numbers(
        parser.add_argument_group(
            "model of a GPU (defaults: a few GPUs together serving a model of 8 billion parameters)"
        ),
        ("step-seconds", model.step_seconds, "every step takes this long, and"),
        ("tokens-per-second", 100_000.0, "computed in it besides"),
        ("block-mib", 2.0, f"of a block of {_BLOCK} tokens"),
        ("link-gb-per-second", model.link_bytes_per_second / 1e9, "to and from the CPU, in each direction"),
    )
    add_numbers(
        parser.add_argument_group("longdoc"),
        ("documents", documents.documents, "asked about"),
        ("document-tokens", documents.document_tokens, "of each"),
        ("answer-tokens", documents.answer_tokens, "generated for each question"),
        ("gpu-documents", 8, "that the GPU cache holds where not all fit"),
        ("warm-passes", 3, "after the cold one"),
        ("concurrency", 1, "requests under way"),
    )
    traces = parser.add_argument_group("traces")
    add_numbers(
        traces,
        ("speed", 1.0, "how fast time runs in the trace"),
        ("gpu-blocks", 32_768, "of the GPU cache"),
        ("cpu-blocks", 262_144, "of the CPU pool"),
        ("max-model-len", 262_144, "tokens of a request at most; longer ones are skipped"),
        ("requests", 4000, "only the first N; 0: all", at_least(0)),
    )
    traces.add_argument(
        "--same-process", action="store_true", help="no process of its own for each connector"
    )
    return parser


def _settings(options: argparse.Namespace) -> ReplaySettings:
    return ReplaySettings(
        connector="none",
        gpu_blocks=options.gpu_blocks,
        cpu_blocks=options.cpu_blocks,
        block_size=_BLOCK,
        max_num_seqs=options.max_num_seqs,
        chunk=options.chunk,
        max_model_len=options.max_model_len,
        timer=_TIMERS[options.timer],
        time=TimeModel(
            step_seconds=options.step_seconds,
            tokens_per_second=options.tokens_per_second,
            block_bytes=options.block_mib * 2**20,
            link_bytes_per_second=options.link_gb_per_second * 1e9,
        ),
    )


def _longdoc_rounds(options: argparse.Namespace) -> Iterator[list[Row]]:
    documents = LongDocuments(
        documents=options.documents,
        document_tokens=options.document_tokens,
        answer_tokens=options.answer_tokens,
    )
    each = documents.blocks_per_document(_BLOCK)
    sizes = {
        f"{_LONGDOC}-fits": (options.documents + options.concurrency) * each + 1,
        _LONGDOC: options.gpu_documents * each + 1,
    }
    for number in range(options.rounds or 5):
        rows = []
        for workload, gpu_blocks in sizes.items():
            settings = replace(
                _settings(options), gpu_blocks=gpu_blocks, cpu_blocks=2 * options.documents * each
            )
            for connector in options.connector:
                rows += _replay_documents(
                    replace(settings, connector=connector), documents, workload, options
                )
        yield rows
        print(f"round {number + 1} is over", file=sys.stderr)


def _replay_documents(
    settings: ReplaySettings, documents: LongDocuments, workload: str, options: argparse.Namespace
) -> list[Row]:
    """Twice with a connector: the second time only to measure its calls, which takes time of its own."""
    rows: dict[str, Row] = {}
    for watch in (False, True)[: 1 if settings.connector == "none" else 2]:
        engine = ReplayEngine(replace(settings, watch=watch))
        try:
            for phase, passes in (("cold", 1), ("warm", options.warm_passes)):
                requests = documents.ask(passes, _BLOCK, phase)
                row = _row(
                    settings.connector, f"{workload}/{phase}", replay(engine, requests, options.concurrency)
                )
                watched = {name: value for name, value in row.items() if name.startswith("connector_")}
                rows[phase] = {**rows[phase], **watched} if watch else row
        finally:
            engine.close()
    return list(rows.values())


def _trace_rounds(options: argparse.Namespace, trace: list[TraceRequest]) -> Iterator[list[Row]]:
    settings = _settings(options)
    served = [each for each in trace if fits(each, settings.max_model_len, settings.gpu_blocks, _BLOCK)]
    skipped = len(trace) - len(served)
    if skipped:
        print(f"{skipped} of {len(trace)} requests are skipped: too long for the engine")
    if not served:
        return
    own = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with own:
        for _ in range(options.rounds or 1):
            rows = []
            for connector in options.connector:
                began = time.monotonic()
                arguments = (replace(settings, connector=connector), served, options.speed)
                if options.same_process:
                    measurement = _replay_trace(*arguments)
                else:
                    measurement = own.submit(_replay_trace, *arguments).result()
                row = _row(connector, _name(options.workload), measurement)
                rows.append({**row, "skipped": skipped})
                print(f"{connector}: took {time.monotonic() - began:.0f} s", file=sys.stderr)
            yield rows


def _replay_trace(settings: ReplaySettings, trace: list[TraceRequest], speed: float) -> Measurement:
    logging.disable(logging.WARNING)
    engine = ReplayEngine(settings)
    try:
        return replay(engine, of_trace(trace, settings.block_size, speed))
    finally:
        engine.close()


def _name(workload: str) -> str:
    return Path(workload).stem


def _row(connector: str, workload: str, measurement: Measurement) -> Row:
    return {"connector": connector, "workload": workload, **measurement.row(connector != "none")}


if __name__ == "__main__":
    sys.exit(main())
