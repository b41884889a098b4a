"""Hints that reach the pool through a real ``AsyncLLM``, which alone takes ``kv_hints``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]


def test_hints_from_everywhere_reach_the_pool() -> None:
    """Of a document asked about first, what is in the pool after five others of which it holds four."""
    command = [sys.executable, "-m", "tests.engine.async_hints"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    left = json.loads(done.stdout.splitlines()[-1])
    assert left == {
        "nothing": [0, 0],
        "kv.pin": [10, 0],
        "kv.retain": [10, 0],
        "kv.fetch": [0, 0],
        "vllm_xargs": [10, 0],
        "overwritten": [10, 0],
        "params first": [0, 0],
        "max_offload_tokens": [3, 0],
    }
    assert "'kv.fetch' has no effect on this pool" in done.stdout + done.stderr
