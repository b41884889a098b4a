"""Long-document question answering: what does offloading gain when documents are asked about again?

    python -m benchmarks.long_document_qa --demo
    python -m benchmarks.long_document_qa --documents 16 64 --modes plain,prefix,native,offload \\
        --passes 2 --order tile --json FILE --plot FILE
    python -m benchmarks.long_document_qa --base-url http://localhost:8000 --label offload

Documents of random tokens are asked about `--passes` times; pass 1 is cold (`--passes 1` is a workload
without reuse). The GPU cache holds 8 documents, the CPU pool 30. Offline, each mode gets a vLLM engine in
a fresh process, with other documents asked first; the engine's own counters say where cached tokens came
from. Online, a running server is asked the same over HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import report
from benchmarks.longdoc.engine_process import EngineError
from benchmarks.longdoc.offline import run_mode
from benchmarks.longdoc.options import Options, parse
from benchmarks.longdoc.plot import write_plot
from benchmarks.longdoc.server import Server, ServerError, run_server
from benchmarks.longdoc.summary import format_summary, notes

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, or 1 if a mode failed (the others are reported all the same)."""
    options = parse(arguments)
    failures: list[str] = []
    rows = _online(options, failures) if options.online else _offline(options, failures)
    if rows:
        _report(options, rows)
    for failure in failures:
        print(f"\nerror: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _offline(options: Options, failures: list[str]) -> list[dict[str, Any]]:
    settings = options.settings
    print(_headline(options))
    rows: list[dict[str, Any]] = []
    for mode in options.modes:
        try:
            rows += run_mode(settings, mode)
        except EngineError as failure:
            failures.append(str(failure))
    return rows


def _online(options: Options, failures: list[str]) -> list[dict[str, Any]]:
    assert options.online is not None
    online, workload = options.online, options.settings.workload
    try:
        server = Server(workload, online.base_url, online.model, online.api_key)
        print(f"{_headline(options)}, model {server.model}, seed {workload.seed}")
        return run_server(server, online.label)
    except ServerError as failure:
        failures.append(str(failure))
        return []


def _headline(options: Options) -> str:
    settings, workload = options.settings, options.settings.workload
    what = (
        f"{workload.document_tokens:,}-token documents, {workload.order} order, {workload.passes} passes, "
        f"{workload.concurrency} in flight"
    )
    if options.online:
        return f"{options.online.base_url}: {what}"
    document_mib = settings.request_blocks * settings.block_bytes / 2**20
    return (
        f"{settings.device}, model {settings.model.shape}: {what}; a document takes {document_mib:.0f} MiB "
        f"of KV, the GPU holds {settings.gpu_documents}, the CPU pool {settings.cpu_documents}"
    )


def _report(options: Options, rows: list[dict[str, Any]]) -> None:
    remarks = [] if options.online else notes(options.modes, options.settings.device)
    print("\n" + format_summary(rows))
    for remark in remarks:
        print(remark)
    if options.json:
        told = asdict(options.settings.workload) if options.online else asdict(options.settings)
        report.write_json(options.json, report.meta(settings=told, notes=remarks), rows)
        print(f"rows: {options.json}")
    if options.plot:
        write_plot(options.plot, rows, _headline(options))
        print(f"plot: {options.plot}")


if __name__ == "__main__":
    sys.exit(main())
