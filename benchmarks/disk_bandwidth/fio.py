"""fio on the file of a slab: what the disk does for the simplest program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.disk_bandwidth.turns import Turn
from offload.worker.media.base import Verb

__all__ = ["fio_version", "run_fio"]

_MODES = {Verb.PUT: ("randwrite", "write"), Verb.GET: ("randread", "read")}


def fio_version() -> str | None:
    """None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(
    verb: Verb,
    path: Path,
    *,
    direct: bool,
    extent_bytes: int,
    num_extents: int,
    threads: int,
    huge_pages: bool,
) -> Turn:
    """Read or write that many extents of a file, each once, in an order of chance. Raises RuntimeError."""
    mode, key = _MODES[verb]
    per_thread = num_extents // threads * extent_bytes
    command = [
        *("fio", "--name=extents", f"--filename={path}", f"--rw={mode}", "--ioengine=psync"),
        *(f"--direct={int(direct)}", f"--bs={extent_bytes}", "--thread", f"--numjobs={threads}"),
        *(f"--size={per_thread}", f"--offset_increment={per_thread}", "--overwrite=1", "--fallocate=none"),
        *("--mem_align=2m", "--group_reporting", "--output-format=json"),
    ]
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ran.returncode:
        raise RuntimeError(f"fio: {ran.stderr.strip() or ran.stdout.strip()}")
    (job,) = json.loads(ran.stdout)["jobs"]
    seconds = job[key]["runtime"] / 1000
    nbytes = job[key]["io_bytes"]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Turn(nbytes, nbytes / job[key]["bw_bytes"] if job[key]["bw_bytes"] else seconds, cpu_seconds)
