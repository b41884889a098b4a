"""Engines of several stages or replicas, as real processes; numbered as in docs/traps.md."""

import json
import re
from pathlib import Path
from typing import Self

import pytest

from offload.testing.engines.client import HttpServer
from offload.testing.engines.environment import transfer_config
from offload.testing.engines.server import ServerProcess
from tests.engine.answers import ALL_RESTORED, BLOCK_SIZE, Prompt, prompt_of
from tests.engine.conftest import CPU_GIB
from tests.engine.engine import SHORT
from tests.engine.fleets import wait_for
from tests.engine.server import SIZES, served_model

pytestmark = pytest.mark.engine


def answer_of(http: HttpServer, prompt: Prompt, headers: dict[str, str] | None = None) -> list[int]:
    """The tokens that a server answers with."""
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with http.open("/v1/completions", body, headers=headers or {}) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def restored_on(http: HttpServer) -> dict[str, float]:
    """Tokens that were restored, by engine."""
    with http.open("/metrics") as response:
        page = response.read().decode()
    pattern = r'^vllm:cpu_offload_restored_tokens_total\{engine="(\d)".*\} (\S+)$'
    return {engine: float(number) for engine, number in re.findall(pattern, page, re.M)}


class Replicas(ServerProcess):
    """Two engines behind one server, which routes as a client says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            served_model(),
            {**SIZES, "--data-parallel-size": 2},
            {"cpu_gib": CPU_GIB, **ALL_RESTORED},
            {},
        )

    def ready(self) -> Self:
        """Wait until both front-ends answer: that of steps without output counts what they restored."""
        super().ready()
        wait_for(lambda: self.log().count("Application startup complete.") == 2, "no second front-end")
        return self

    def ask(self, prompt: Prompt, replica: int) -> list[int]:
        """The tokens that this replica answers with."""
        return answer_of(self.http, prompt, {"X-data-parallel-rank": str(replica)})

    def restored(self) -> list[float]:
        """Tokens that each replica has restored. Counters come along with an answer."""
        for replica in range(2):
            self.ask(SHORT, replica)
        shown = restored_on(self.http)
        return [shown[replica] for replica in "01"]


class Pipeline(ServerProcess):
    """Two stages, with our connector inside a MultiConnector.

    Without its warm-up vLLM's CPU backend gives the second stage no place for what comes from the first.
    """

    def __init__(self, folder: Path) -> None:
        multi = transfer_config(
            {"connectors": [transfer_config({"cpu_gib": CPU_GIB, **ALL_RESTORED})]}, "MultiConnector"
        )
        flags = {
            **SIZES,
            "--pipeline-parallel-size": 2,
            "--no-enforce-eager": None,
            "--kv-transfer-config": json.dumps(multi | {"kv_load_failure_policy": "recompute"}),
        }
        super().__init__(folder, served_model(), flags, None, {"TORCHDYNAMO_DISABLE": "0"})

    def ask(self, prompt: Prompt) -> list[int]:
        """The tokens that it answers with."""
        return answer_of(self.http, prompt)

    def restored(self) -> float:
        """Tokens that it has restored."""
        self.ask(SHORT)
        return sum(restored_on(self.http).values())


def test_trap_76_stages_inside_a_multi_connector_restore(tmp_path: Path) -> None:
    """Each has other layers. The GPU cache holds one of these prompts."""
    prompts = [prompt_of(40 * BLOCK_SIZE + 11, seed) for seed in (82, 83)]
    with Pipeline(tmp_path) as pipeline:
        pipeline.ready()
        answers = [pipeline.ask(prompt) for prompt in prompts]
        assert answers[0] != answers[1] and pipeline.restored() == 0
        assert [pipeline.ask(prompt) for prompt in prompts] == answers
        assert pipeline.restored() == 2 * 40 * BLOCK_SIZE


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
