"""``vllm serve`` with nothing but the flag: HTTP, metrics, log, benchmark, shutdown, bad input."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from offload.cli import main
from offload.testing.engines.server import START_SECONDS, environment, held_port, serve_command
from offload.vllm.stats import CONFIG_INFO
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE, Prompt
from tests.engine.server import SIZES, VOCAB_SIZE, VllmServer, served_model
from tests.monitoring import metrics_in, queries, scraping

pytestmark = pytest.mark.engine

_WAIT_SECONDS = 120
REPOSITORY = Path(__file__).parents[2]


def prompt_of(num_tokens: int, seed: int) -> Prompt:
    return np.random.default_rng(seed).integers(4, VOCAB_SIZE, num_tokens).tolist()


LONG = [prompt_of(40 * BLOCK_SIZE + 11, seed) for seed in range(3)]
"""Of these the GPU cache of 48 blocks holds one."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """Two, starting side by side, because it takes long."""
    with ExitStack() as running:
        folders = [Path(running.enter_context(TemporaryDirectory(prefix="kvo"))) / "run" for _ in range(2)]
        yield [
            running.enter_context(
                VllmServer(
                    tmp_path_factory.mktemp("serve"),
                    {"cpu_gib": 0.0625, "operator_socket": str(folder), **ALL_RESTORED},
                )
            )
            for folder in folders
        ]


@pytest.fixture
def server(servers: list[VllmServer]) -> VllmServer:
    return servers[0].ready()


def test_answers_are_restored_and_counted(server: VllmServer) -> None:
    first = [server.complete(prompt) for prompt in LONG]
    before = server.http.metrics()
    second, third = ([server.complete(prompt) for prompt in LONG] for _ in range(2))
    server.complete("settle")
    after = server.http.metrics()
    assert len({str(answer) for answer in first}) == 3, "prompts do not matter"
    assert second == third
    assert [answer["token_ids"] for answer in second] == [answer["token_ids"] for answer in first]
    assert before["vllm:cpu_offload_restored_tokens"] == 0
    assert after["vllm:cpu_offload_restored_tokens"] == 6 * 40 * BLOCK_SIZE
    assert after["vllm:cpu_offload_restored_requests"] == 6
    assert after["vllm:cpu_offload_stored_bytes"] == 3 * 40 * BLOCK_BYTES
    assert after["vllm:cpu_offload_loaded_bytes"] == 6 * 40 * BLOCK_BYTES
    assert after["vllm:cpu_offload_pool_used_blocks"] == 3 * 40
    assert after["vllm:cpu_offload_pool_blocks"] == 512
    assert after["vllm:cpu_offload_pool_used_tokens"] == 3 * 40 * BLOCK_SIZE
    assert after["vllm:cpu_offload_pool_tokens"] == 512 * BLOCK_SIZE
    assert after["vllm:cpu_offload_pool_bytes"] == 512 * BLOCK_BYTES
    assert after["vllm:cpu_offload_failed_jobs"] == 0
    assert after["vllm:external_prefix_cache_hits"] == 6 * 40 * BLOCK_SIZE


def test_each_panels_query_on_prometheus(server: VllmServer, tmp_path: Path) -> None:
    """All that is of one engine has samples. What has a peer or reason as label, once there is one."""
    with scraping(tmp_path, f"127.0.0.1:{server.port}") as prometheus:
        prometheus.wait_for("vllm:cpu_offload_pool_blocks")
        for prompt in LONG:
            server.complete(prompt)
        prometheus.wait_for("count_over_time(vllm:cpu_offload_pool_blocks[1m]) > 4")
        with server.http.open("/metrics") as response:
            there = metrics_in(response.read().decode())
        empty = []
        for panel, expression in queries():
            if not prometheus.ask(expression):
                empty.append(panel)
                assert panel in ("Peers", "Hand-offs"), expression
            assert metrics_in(expression) <= there, "vLLM calls it otherwise"
        assert set(empty) == {"Peers", "Hand-offs"}, "a query has samples, and no test knows"
        [hits] = prometheus.ask("vllm:cpu_offload_restored_tokens_total > 0")
        assert hits["metric"].keys() >= {"instance", "engine"}, "alerts are by them"


def explained(server: VllmServer, asked: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What ``kv-offload explain`` says of the requests with that id."""
    folder = str(server.extra_config["operator_socket"])
    assert main(["explain", asked, "--operator-socket", folder]) == 0
    assert "tokens   " in capsys.readouterr().out
    assert main(["explain", asked, "--operator-socket", folder, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["requests"]
    return found


def test_a_request_is_explained(server: VllmServer, capsys: pytest.CaptureFixture[str]) -> None:
    """By the id of its response and by that of its header; each choice; and in the response itself."""
    prompt = prompt_of(20 * BLOCK_SIZE + 5, seed=99)
    body = {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": {"cpu_offload_report": True}}
    answers = []
    for number, n in enumerate((1, 2)):
        with server.http.open(
            "/v1/completions", {**body, "n": n}, headers={"X-Request-Id": f"why-{number}"}
        ) as response:
            answers.append(json.load(response))
    server.complete("settle")
    report = answers[0]["kv_transfer_params"]["cpu_offload_report"]
    assert report["tokens"] == {"gpu": 0, "computed": 20 * BLOCK_SIZE + 5}
    assert report["missing"] == [{"from_token": 0, "tokens": 20 * BLOCK_SIZE, "reason": "unseen"}]
    for asked in (answers[0]["id"], "why-0"):
        [told] = explained(server, asked, capsys)
        assert told["tokens"] == report["tokens"] and told["state"] == "completed"
    for asked in (answers[1]["id"], "why-1"):
        found = explained(server, asked, capsys)
        assert sorted(each["request"][:2] for each in found) == ["0_", "1_"]
        assert all(each["tokens"]["gpu"] == 20 * BLOCK_SIZE for each in found)
    streamed = {"prompt": prompt, "max_tokens": 2, "stream": True}
    with server.http.open("/v1/completions", streamed, headers={"X-Request-Id": "why-2"}) as response:
        response.read()
    [told] = explained(server, "why-2", capsys)
    assert told["request"].startswith("cmpl-why-2-0")
    folder = str(server.extra_config["operator_socket"])
    assert main(["explain", "why", "--operator-socket", folder]) == 1
    assert "no request 'why' is remembered" in capsys.readouterr().err
    page = server.http.metrics()
    assert "vllm:cpu_offload_saved_seconds" in page and "vllm:cpu_offload_lost_seconds" in page


def test_the_size_of_the_pool_under_vllms_name(server: VllmServer) -> None:
    server.complete(LONG[0])
    with server.http.open("/metrics") as response:
        page = response.read().decode().splitlines()
    shown = [line for line in page if line.startswith("vllm:kv_offload_config_info{")]
    assert len(shown) == (CONFIG_INFO is not None), "vLLM has it from 0.33 on"
    for line in shown:
        assert f'cpu_kv_cache_size_tokens="{512 * BLOCK_SIZE}"' in line
        assert f'cpu_kv_cache_size_bytes="{512 * BLOCK_BYTES}"' in line


def test_the_log_tells_transfers(server: VllmServer) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while "restored_tokens=" not in server.log():
        assert time.monotonic() < deadline, f"no line of ours:\n{server.log()[-3000:]}"
        for prompt in LONG:
            server.complete(prompt)
    [line, *_] = [line for line in server.log().splitlines() if "KV Transfer metrics:" in line]
    assert "stored_bytes=" in line


def test_a_client_that_leaves(server: VllmServer) -> None:
    """Its request is aborted, and nothing of it stays in flight. On a busy machine it may end before."""
    for seed in range(9, 29):
        before = server.http.metrics()
        with server.streaming(prompt_of(2 * BLOCK_SIZE, seed=seed), max_tokens=1400):
            pass
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            server.complete("settle")
            metrics = server.http.metrics()
            if not metrics["vllm:num_requests_running"] and not metrics["vllm:cpu_offload_jobs_in_flight"]:
                break
            assert time.monotonic() < deadline, metrics
        if metrics["vllm:generation_tokens"] - before["vllm:generation_tokens"] < 1400:
            return
    raise AssertionError("no request was aborted")


def test_online_benchmark(server: VllmServer, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    options = {
        "--base-url": server.http.base_url,
        "--documents": 4,
        "--document-tokens": 20 * BLOCK_SIZE,
        "--output-tokens": 4,
        "--passes": 2,
        "--order": "tile",
        "--concurrency": 1,
        "--vocab-size": VOCAB_SIZE,
        "--json": rows_file,
    }
    arguments = [str(part) for item in options.items() for part in item]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_document_qa", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cold, warm = json.loads(rows_file.read_text())["rows"]
    assert (cold["documents"], cold["pass"], warm["pass"]) == (4, 1, 2)
    assert cold["cached_cpu_tokens"] == 0
    assert cold["bytes_stored"] >= 4 * 20 * BLOCK_BYTES
    assert warm["cached_cpu_tokens"] + warm["cached_gpu_tokens"] == 4 * 20 * BLOCK_SIZE
    assert warm["cached_cpu_tokens"] >= 2 * 20 * BLOCK_SIZE
    assert warm["bytes_loaded"] > 0


def assert_ends(server: VllmServer, shared_memory: set[Path]) -> None:
    """It ends by itself, and no process and no shared memory of it is left."""
    assert shared_memory, "nothing would be found"
    assert server.wait() == 0
    deadline = time.monotonic() + _WAIT_SECONDS
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.processes()
    assert not [path for path in shared_memory if path.exists()]
    # An interrupt of every process at once has vLLM log tracebacks of its own, now and then.
    frame = re.compile(r'File ".*/(offload|allocator|evictor)/')
    assert not frame.search(server.log()), server.log()


def test_sigterm_ends_it(server: VllmServer) -> None:
    """The last test of the first server."""
    shared_memory = server.shared_memory()
    server.signal(signal.SIGTERM)
    assert_ends(server, shared_memory)


def test_interrupt_ends_it_with_copies_under_way(servers: list[VllmServer]) -> None:
    """As from a terminal: every process gets the signal. A stream whose client stays may hang vLLM itself."""
    server = servers[1].ready()
    server.complete(LONG[0])
    server.complete(LONG[1])
    shared_memory = server.shared_memory()
    with server.streaming(LONG[0], max_tokens=200):
        server.signal(signal.SIGINT, everyone=True)
    assert_ends(server, shared_memory)


def test_mistyped_key_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    with held_port() as held:
        done = subprocess.run(
            serve_command(served_model(), held.getsockname()[1], SIZES, {"cpu_gb": 1}),
            env=environment(tmp_path, {}),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
    assert done.returncode != 0
    assert "unknown key 'cpu_gb' in kv_connector_extra_config; did you mean 'cpu_gib'?" in done.stderr
    assert "load model" not in done.stdout + done.stderr
