"""Two engines that prefill, two that decode, and the proxy before them; then they die one after another."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest

from offload.testing.engines.client import HttpServer, ServerError
from offload.testing.engines.server import ServerProcess, held_port
from offload.testing.proxies import kv_offload_proxy
from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, TOLERANCE, Prompt
from tests.engine.server import SIZES, VOCAB_SIZE, served_model

pytestmark = pytest.mark.engine

NUM_BLOCKS = 40
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE + 11
_WAIT_SECONDS = 120.0
_PATIENCE = 60
"""However busy this machine is."""
_FLAGS = SIZES | {"--trust-request-chat-template": None}
_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache


class Fleet(NamedTuple):
    """Servers by what they do, and who is asked."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    proxy: HttpServer
    admin: HttpServer


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> Prompt:
    tokens: Prompt = np.random.default_rng(seed).integers(4, VOCAB_SIZE, num_tokens).tolist()
    return tokens


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        *ports, admin = (stack.enter_context(held_port()).getsockname()[1] for _ in range(3))
        peers = [f"127.0.0.1:{port}" for port in ports]
        configs: list[dict[str, Any]] = [
            *({"cpu_gib": 0.0625, "role": "prefill", "listen": peer} for peer in peers),
            *(
                {"cpu_gib": 0.0625, "role": "decode", "peers": peers, "peer_wait_seconds": _PATIENCE}
                for _ in range(2)
            ),
        ]
        servers = [
            stack.enter_context(
                ServerProcess(tmp_path_factory.mktemp("fleet"), served_model(), _FLAGS, config, _VARIABLES)
            )
            for config in configs
        ]
        urls = [server.ready().http.base_url for server in servers]
        proxy = kv_offload_proxy(
            urls[:2], urls[2:], ["--min-prefill-tokens", "1", "--admin-port", str(admin)]
        )
        stack.enter_context(proxy.running())
        yield Fleet(servers[:2], servers[2:], HttpServer(proxy.url), HttpServer(f"http://127.0.0.1:{admin}"))


def ask(http: HttpServer, prompt: Prompt, **said: Any) -> dict[str, Any]:
    """One answer: its choice, with token ids and log-probabilities."""
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        **said,
    }
    with http.open("/v1/completions", body) as response:
        return dict(json.load(response)["choices"][0])


def cold(http: HttpServer, prompt: Prompt, **said: Any) -> dict[str, Any]:
    """The same, of an engine that finds nothing: no other prompt has that salt."""
    return ask(http, prompt, cache_salt=f"cold {time.monotonic_ns()}", **said)


def total(servers: list[ServerProcess], name: str) -> float:
    return sum(server.http.metrics()[f"vllm:{name}"] for server in servers)


def computed(servers: list[ServerProcess]) -> float:
    """Prompt tokens that these engines have computed."""
    return total(servers, "prompt_tokens") - total(servers, "prompt_tokens_cached")


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found["token_ids"] == expected["token_ids"]
    pairs = zip(found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=True)
    assert max(abs(one - other) for one, other in pairs) < TOLERANCE


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def test_one_prefills_and_another_decodes(fleet: Fleet) -> None:
    """What engines that decode compute is what is behind the last full block; the rest was fetched."""
    prompts = [prompt_of(seed) for seed in range(4)]
    before, restored = computed(fleet.decode), total(fleet.decode, "cpu_offload_restored_tokens")
    answers = [ask(fleet.proxy, prompt) for prompt in prompts]
    num_whole = 4 * NUM_BLOCKS * BLOCK_SIZE
    assert computed(fleet.decode) - before == 4 * NUM_TOKENS - num_whole
    assert total(fleet.decode, "cpu_offload_restored_tokens") - restored == num_whole
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_same(answer, cold(fleet.prefill[0].http, prompt))


def test_bytes_that_crossed_are_those_of_the_prompts(fleet: Fleet) -> None:
    before = fetched_bytes(fleet)
    ask(fleet.proxy, prompt_of(10))
    assert fetched_bytes(fleet) - before == NUM_BLOCKS * BLOCK_BYTES


def fetched_bytes(fleet: Fleet) -> float:
    """Along the route from peers into pools."""
    found = 0.0
    for server in fleet.decode:
        with server.http.open("/metrics") as response:
            page = response.read().decode().splitlines()
        lines = [line for line in page if line.startswith("vllm:cpu_offload_route_bytes_total{")]
        found += sum(float(line.split()[-1]) for line in lines if 'route="peers_to_pool"' in line)
    return found


def test_a_chat_that_streams(fleet: Fleet) -> None:
    """Through the proxy a client sees what one engine would have said."""
    text = " ".join(str(number) for number in range(300))
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_completion_tokens": 8,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    said = []
    with fleet.proxy.open("/v1/chat/completions", {**body, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                for choice in json.loads(line[5:])["choices"]:
                    said.append(choice["delta"].get("content") or "")
    with fleet.prefill[0].http.open("/v1/chat/completions", {**body, "cache_salt": "cold chat"}) as response:
        whole = json.load(response)["choices"][0]["message"]["content"]
    assert "".join(said) == whole


def test_new_weights_on_one_side_end_hand_overs(fleet: Fleet) -> None:
    """Engines that prefill are reset, as after new weights: nothing of theirs is handed over."""
    before, fetched = computed(fleet.decode), fetched_bytes(fleet)
    old = prompt_of(20)
    with_old = cold(fleet.decode[0].http, old)
    for server in fleet.prefill:
        with server.http.open("/reset_prefix_cache?reset_external=true", {}) as response:
            assert response.status == 200
    before = computed(fleet.decode)
    assert_same(ask(fleet.proxy, old), with_old)
    assert computed(fleet.decode) - before == NUM_TOKENS, "nothing was handed over"
    assert fetched_bytes(fleet) == fetched
    for server in fleet.decode:  # all have the new weights, but they have no name that would say so
        with server.http.open("/reset_prefix_cache?reset_external=true", {}) as response:
            assert response.status == 200
    assert_same(ask(fleet.proxy, prompt_of(21)), cold(fleet.decode[0].http, prompt_of(21)))
    assert fetched_bytes(fleet) == fetched


def kill_who_decodes(fleet: Fleet) -> list[str]:
    """Their addresses; none of them comes a token further while we ask the proxy who it is."""
    for server in fleet.decode:
        server.signal(signal.SIGSTOP, everyone=True)
    with fleet.admin.open("/engines") as response:
        running = {told["url"] for told in json.load(response)["engines"] if told["running"]}
    killed = []
    for server in fleet.decode:
        if server.http.base_url in running:
            server.signal(signal.SIGKILL, everyone=True)
            killed.append(server.http.base_url)
        else:
            server.signal(signal.SIGCONT, everyone=True)
    return killed


def test_engines_die(fleet: Fleet) -> None:
    """One that decodes in the middle of an answer, one that prefills while it does, then the other."""
    prompt = prompt_of(30)
    expected = cold(fleet.prefill[0].http, prompt, max_tokens=150)
    tokens: list[int] = []
    killed: list[str] = []
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    with fleet.proxy.open("/v1/completions", body) as response:
        for line in response:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                event = json.loads(line[5:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                if len(tokens) >= 2 and not killed:
                    killed = kill_who_decodes(fleet)
    assert tokens == expected["token_ids"]
    assert len(killed) == 1
    assert [server.http.base_url for server in fleet.decode if not server.http.is_healthy()] == killed

    for number in range(2):
        prompts = [prompt_of(seed) for seed in range(40 + 10 * number, 46 + 10 * number)]
        found: dict[int, dict[str, Any]] = {}
        failed: list[ServerError] = []

        def one(
            at: int,
            prompt: Prompt,
            found: dict[int, dict[str, Any]] = found,
            failed: list[ServerError] = failed,
        ) -> None:
            try:
                found[at] = ask(fleet.proxy, prompt)
            except ServerError as error:
                failed.append(error)

        asking = [threading.Thread(target=one, args=each) for each in enumerate(prompts)]
        for thread in asking:
            thread.start()
        victim = fleet.prefill[number]
        victim.signal(signal.SIGKILL, everyone=True)
        for thread in asking:
            thread.join()
        assert not failed, failed
        alive = next(server for server in fleet.decode if server.http.is_healthy())
        for at, prompt in enumerate(prompts):
            assert_same(found[at], cold(alive.http, prompt))
