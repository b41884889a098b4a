"""``vllm bench serve``, which knows nothing of us, measures engines of two roles behind the proxy."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from offload.testing.engines.server import ServerProcess, environment, held_port
from tests.engine.answers import BLOCK_SIZE
from tests.engine.fleets import proxied
from tests.engine.server import SIZES, served_model

pytestmark = pytest.mark.engine

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 30 * BLOCK_SIZE, 6
_BENCH_SECONDS = 400


def bench(folder: Path, url: str) -> dict[str, Any]:
    """What it says in the end."""
    folder.mkdir()
    model = str(served_model())
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model, "--tokenizer", model]
    command += ["--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--ignore-eos"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", "4", "--disable-tqdm", "--save-result", "--result-dir", str(folder)]
    command += ["--result-filename", "told.json"]
    done = subprocess.run(
        command, env=environment(folder, {}), capture_output=True, text=True, timeout=_BENCH_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


def test_all_requests_are_handed_over_and_answered(tmp_path: Path) -> None:
    with ExitStack() as stack:
        peer = f"127.0.0.1:{stack.enter_context(held_port()).getsockname()[1]}"
        configs: list[dict[str, Any]] = [
            {"cpu_gib": 0.0625, "role": "prefill", "listen": peer},
            {"cpu_gib": 0.0625, "role": "decode", "peers": [peer], "peer_wait_seconds": 60},
        ]
        servers = []
        for number, config in enumerate(configs):
            (tmp_path / str(number)).mkdir()
            server = ServerProcess(tmp_path / str(number), served_model(), SIZES, config, {})
            servers.append(stack.enter_context(server))
        proxy, admin = proxied(stack, "--min-prefill-tokens", "1", prefill=servers[:1], decode=servers[1:])
        told = bench(tmp_path / "bench", proxy.base_url)
        assert (told["completed"], told["failed"]) == (REQUESTS, 0)
        assert told["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
        # The prefill engine need not have counted all: a leg is cancelled when its decode leg answers first.
        assert admin.count("legs", 'role="prefill"') == REQUESTS
        decoded = servers[1].http.metrics()
        assert decoded["vllm:prompt_tokens_cached"] >= REQUESTS * (PROMPT_TOKENS - BLOCK_SIZE)
