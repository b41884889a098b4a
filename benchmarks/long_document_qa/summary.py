"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.tables import Column, table
from benchmarks.long_document_qa.settings import Settings

__all__ = ["LABELS", "Row", "explain_modes", "format_gains", "format_summary", "notes", "passes_total"]

LABELS = {
    "plain": "no caching",
    "prefix": "GPU prefix caching",
    "native": "+ vLLM's own offloading",
    "offload": "+ kv-offload",
}
"""What a mode is; + means: beside GPU prefix caching."""

_COLUMNS = (
    Column("documents", "documents"),
    Column("pass", "pass"),
    Column("mode", "mode"),
    Column("seconds", "seconds", ".2f"),
    Column("vs prefix", lambda row: f"{row['base'] / row['seconds']:.2f}x" if row["base"] else None),
    Column("TTFT p50", "ttft_p50", ".3f"),
    Column("p90", "ttft_p90", ".3f"),
    Column("p99", "ttft_p99", ".3f"),
    Column("GPU hits", lambda row: row["cached_gpu_tokens"] / row["prompt_tokens"], ".1%"),
    Column("CPU hits", lambda row: row["cached_cpu_tokens"] / row["prompt_tokens"], ".1%"),
    Column("stored MiB", lambda row: row["bytes_stored"] / 2**20, ".0f"),
    Column("loaded MiB", lambda row: row["bytes_loaded"] / 2**20, ".0f"),
)
_SUMMED = (
    "seconds",
    "prompt_tokens",
    "cached_gpu_tokens",
    "cached_cpu_tokens",
    "bytes_stored",
    "bytes_loaded",
)

Row = dict[str, Any]


def format_summary(rows: Sequence[Row]) -> str:
    """Return a table with a line per document count, pass and mode, then one over all passes.

    Seconds throughout, for asking all documents once, and to the first token (TTFT). `vs prefix` is how many
    times faster than mode `prefix` on the same work; hits are shares of the prompt tokens.
    """
    lines = [*rows, *passes_total(rows)]
    base = {(row["documents"], row["pass"]): row["seconds"] for row in lines if row["mode"] == "prefix"}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines.sort(key=lambda row: (row["documents"], str(row["pass"]), modes.index(row["mode"])))
    return table(_COLUMNS, [{**row, "base": base.get((row["documents"], row["pass"]))} for row in lines])


def explain_modes(modes: Sequence[str]) -> str:
    """Return a line per mode that says what it is."""
    texts = [LABELS[mode].replace("+", f"{LABELS['prefix']} and") for mode in modes]
    return "\n".join(f"  {mode:8} {text}" for mode, text in zip(modes, texts, strict=True))


def format_gains(rows: Sequence[Row]) -> list[str]:
    """Return a line per document count and mode with a connector: the last pass beside that of `prefix`."""
    last = max(row["pass"] for row in rows)
    seconds = {(row["documents"], row["mode"]): row["seconds"] for row in rows if row["pass"] == last}
    asked = f"asked again (pass {last})" if last > 1 else "asked once"
    return [
        f"{documents} documents {asked}: {base:.2f} s with prefix, {ours:.2f} s with {mode}, "
        f"{base / ours:.2f} times as fast"
        for (documents, mode), ours in sorted(seconds.items())
        if mode not in ("plain", "prefix") and (base := seconds.get((documents, "prefix")))
    ]


def passes_total(rows: Sequence[Row]) -> list[Row]:
    """Return a row per mode and document count with `pass` "all": the sums over its passes.

    Percentiles cannot be summed and are left out.
    """
    totals: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row["mode"], row["documents"])
        total = totals.setdefault(key, {"mode": key[0], "documents": key[1], "pass": "all"})
        for name in _SUMMED:
            total[name] = total.get(name, 0) + row[name]
    return list(totals.values())


def notes(modes: Sequence[str], settings: Settings) -> list[str]:
    """Return what a reader must know about how the modes were run."""
    found = []
    if settings.model.shape == "llama-8b":
        found.append("llama-8b: the shape of Llama 3.1 8B with dummy weights; answers mean nothing")
    if "native" in modes and settings.device == "cpu":
        found.append(
            "native: vLLM's OffloadingConnector refuses to start on the CPU backend; here it runs with a "
            "plain CPU copy worker (benchmarks.common.native_cpu_spec) through its out-of-tree spec"
        )
    return found
