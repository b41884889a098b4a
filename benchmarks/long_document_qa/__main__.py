"""Long-document question answering: what does offloading gain when documents are asked about again?

    python -m benchmarks.long_document_qa --demo
    python -m benchmarks.long_document_qa --documents 16 64 --modes plain,prefix,native,offload \\
        --passes 2 --order tile --json FILE --plot FILE
    python -m benchmarks.long_document_qa --base-url http://localhost:8000 --label offload

Documents of random tokens are asked about `--passes` times; pass 1 is cold (`--passes 1` is a workload
without reuse). The GPU cache holds 8 documents, the CPU pool 30. Offline, each mode gets a vLLM engine in a
fresh process, with other documents asked first. The engine's own counters say where cached tokens came from.
Online, a running server is asked the same over HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common import report
from benchmarks.long_document_qa.offline import run_mode, run_side_by_side
from benchmarks.long_document_qa.options import Online, Options, parse
from benchmarks.long_document_qa.plot import write_plot
from benchmarks.long_document_qa.server import Server, run_server
from benchmarks.long_document_qa.settings import Settings, Workload
from benchmarks.long_document_qa.summary import Row, explain_modes, format_gains, format_summary, notes
from offload.testing.engines.client import ServerError
from offload.testing.engines.process import EngineError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, or 1 if a mode failed (the others are reported all the same)."""
    options = parse(arguments, __doc__)
    failures: list[str] = []
    remarks = report.load_note()
    if options.settings is not None:
        remarks += notes(options.modes, options.settings)
        rows = _offline(options.settings, options.modes, options.side_by_side, failures)
    else:
        assert options.online is not None
        rows = _online(options.online, options.workload, failures)
    if rows:
        _report(options, rows, remarks)
    for failure in failures:
        print(f"\nerror: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _offline(settings: Settings, modes: Sequence[str], side_by_side: bool, failures: list[str]) -> list[Row]:
    print(f"{_describe(settings)}\n{explain_modes(modes)}", flush=True)
    return (_offline_side_by_side if side_by_side else _offline_in_turn)(settings, modes, failures)


def _offline_side_by_side(settings: Settings, modes: Sequence[str], failures: list[str]) -> list[Row]:
    rows: list[Row] = []
    try:
        for found in run_side_by_side(settings, modes):
            rows += found
            for line in format_gains(found):
                print(line, flush=True)
    except EngineError as failure:
        failures.append(str(failure))
    except KeyboardInterrupt:
        failures.append("interrupted")
    return rows


def _offline_in_turn(settings: Settings, modes: Sequence[str], failures: list[str]) -> list[Row]:
    rows: list[Row] = []
    for mode in modes:
        try:
            rows += run_mode(settings, mode)
        except EngineError as failure:
            failures.append(str(failure))
        except KeyboardInterrupt:
            failures.append(f"interrupted in mode {mode!r}")
            break
    return rows


def _online(online: Online, workload: Workload, failures: list[str]) -> list[Row]:
    try:
        server = Server(workload, online.base_url, online.model, online.api_key)
        print(
            f"{online.base_url}, model {server.model}, seed {workload.seed}: {_describe_workload(workload)}"
        )
        return run_server(server, online.label)
    except ServerError as failure:
        failures.append(str(failure))
        return []


def _report(options: Options, rows: list[Row], remarks: list[str]) -> None:
    settings, workload = options.settings, options.workload
    print(
        "\npass 1 is cold; seconds: for all documents once; TTFT: to the first token; hits: of prompt tokens"
    )
    print(format_summary(rows))
    for line in format_gains(rows):
        print(line)
    for remark in remarks:
        print(remark)
    told = asdict(settings) if settings else {"workload": asdict(workload)}
    report.write(options.json, rows, settings=told, notes=remarks)
    if options.plot:
        title, marks = _describe_workload(workload), {}
        if settings:
            title = _describe(settings)
            marks = {"GPU cache full": settings.gpu_documents, "CPU pool full": settings.cpu_documents}
        write_plot(options.plot, rows, title, marks)
        print(f"plot: {options.plot}")


def _describe(settings: Settings) -> str:
    document_mib = settings.document_blocks * settings.block_bytes / 2**20
    stand_in = " (here in host memory)" if settings.device == "cpu" else ""
    return (
        f"{settings.device}, model {settings.model.shape}: {_describe_workload(settings.workload)}\n"
        f"a document takes {document_mib:.0f} MiB of KV; the GPU cache{stand_in} holds "
        f"{settings.gpu_documents}, the CPU pool {settings.cpu_documents}"
    )


def _describe_workload(workload: Workload) -> str:
    return (
        f"{workload.document_tokens:,}-token documents, {workload.order} order, {workload.passes} passes, "
        f"{workload.concurrency} in flight"
    )


if __name__ == "__main__":
    sys.exit(main())
