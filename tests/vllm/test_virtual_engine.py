"""The random workload on the real scheduler: every byte attended to is right, nobody waits for ever."""

import pytest

from offload.vllm.virtual import run_seed


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_random_runs(first: int) -> None:
    for seed in range(first, first + 8):
        run_seed(seed, turns=200)
