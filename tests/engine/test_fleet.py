"""Engines of several stages or replicas, as real processes; numbered as in docs/traps.md."""

import json
import re
from pathlib import Path

import pytest

from offload.testing.engines.server import ServerProcess
from tests.engine.answers import BLOCK_SIZE, Prompt, prompt_of
from tests.engine.conftest import CPU_GIB
from tests.engine.engine import SHORT
from tests.engine.server import SIZES, served_model

pytestmark = pytest.mark.engine


class Replicas(ServerProcess):
    """Two engines behind one server, which routes as a client says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, served_model(), {**SIZES, "--data-parallel-size": 2}, {"cpu_gib": CPU_GIB}, {}
        )

    def ask(self, prompt: Prompt, replica: int) -> list[int]:
        """The tokens that this replica answers with."""
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        with self.http.open(
            "/v1/completions", body, headers={"X-data-parallel-rank": str(replica)}
        ) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return tokens

    def restored(self) -> list[float]:
        """Tokens that each replica has restored. Counters come along with an answer."""
        for replica in range(2):
            self.ask(SHORT, replica)
        with self.http.open("/metrics") as response:
            page = response.read().decode()
        shown = dict(
            re.findall(r'^vllm:cpu_offload_restored_tokens_total\{engine="(\d)".*\} (\S+)$', page, re.M)
        )
        return [float(shown[replica]) for replica in "01"]


def test_trap_77_each_replica_has_a_pool_of_its_own(tmp_path: Path) -> None:
    """What one has stored the other computes. The GPU cache of each holds one of these prompts."""
    prompts = [prompt_of(40 * BLOCK_SIZE + 11, seed) for seed in (80, 81)]
    with Replicas(tmp_path) as replicas:
        replicas.ready()
        answers = [replicas.ask(prompt, 0) for prompt in prompts]
        assert answers[0] != answers[1] and replicas.restored() == [0, 0]
        assert [replicas.ask(prompt, 0) for prompt in prompts] == answers
        assert replicas.restored() == [2 * 40 * BLOCK_SIZE, 0]
        assert [replicas.ask(prompt, 1) for prompt in prompts] == answers
        assert replicas.restored() == [2 * 40 * BLOCK_SIZE, 0]
        assert replicas.ask(prompts[0], 1) == answers[0]
        assert replicas.restored() == [2 * 40 * BLOCK_SIZE, 40 * BLOCK_SIZE]
