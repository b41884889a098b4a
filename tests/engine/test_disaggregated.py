"""Two engines that prefill, two that decode, and the proxy before them; then they die one after another."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from offload.cli import main
from offload.testing.engines.client import HttpServer
from offload.testing.engines.server import ServerProcess, held_port
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE
from tests.engine.fleets import (
    NUM_BLOCKS,
    NUM_TOKENS,
    PATIENCE,
    WHOLE,
    Admin,
    Asking,
    ask,
    assert_same,
    body_of,
    cold,
    computed,
    fetched_bytes,
    prompt_of,
    proxied,
    stream,
    total,
)
from tests.engine.server import SIZES, served_model

pytestmark = pytest.mark.engine

_FLAGS = SIZES | {"--trust-request-chat-template": None}
_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache


class Fleet(NamedTuple):
    """Servers by what they do, and who is asked."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    proxy: HttpServer
    admin: Admin
    sockets: str
    """A directory."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        sockets = f"{stack.enter_context(TemporaryDirectory(prefix='kvo'))}/run"
        peers = [f"127.0.0.1:{stack.enter_context(held_port()).getsockname()[1]}" for _ in range(2)]
        configs: list[dict[str, Any]] = [
            *({"cpu_gib": 0.0625, "role": "prefill", "listen": peer, **ALL_RESTORED} for peer in peers),
            *(
                {"cpu_gib": 0.0625, "role": "decode", "peers": peers, "peer_wait_seconds": PATIENCE}
                for _ in range(2)
            ),
        ]
        for config in configs:
            config["operator_socket"] = sockets
        servers = [
            stack.enter_context(
                ServerProcess(tmp_path_factory.mktemp("fleet"), served_model(), _FLAGS, config, _VARIABLES)
            )
            for config in configs
        ]
        prefill, decode = servers[:2], servers[2:]
        made = proxied(stack, "--min-prefill-tokens", "1", prefill=prefill, decode=decode)
        yield Fleet(prefill, decode, *made, sockets)


def test_one_prefills_and_another_decodes(fleet: Fleet) -> None:
    """What engines that decode compute is what is behind the last full block; the rest was fetched."""
    prompts = [prompt_of(seed) for seed in range(4)]
    before, restored = computed(fleet.decode), total(fleet.decode, "cpu_offload_restored_tokens")
    answers = [ask(fleet.proxy, prompt) for prompt in prompts]
    num_whole = 4 * WHOLE
    assert computed(fleet.decode) - before == 4 * NUM_TOKENS - num_whole
    assert total(fleet.decode, "cpu_offload_restored_tokens") - restored == num_whole
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_same(answer, cold(fleet.prefill[0].http, prompt))


def test_both_legs_are_explained(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    body = body_of(prompt_of(30), kv_transfer_params={"cpu_offload_report": True})
    with fleet.proxy.open("/v1/completions", body) as response:
        answer = json.load(response)
    assert main(["explain", answer["id"], "--operator-socket", fleet.sockets, "--json"]) == 0
    decoded, prefilled = json.loads(capsys.readouterr().out)["requests"]
    if decoded["hand_off"]:
        decoded, prefilled = prefilled, decoded
    assert prefilled["hand_off"] == f"{WHOLE} tokens" and prefilled["tokens"]["computed"] == NUM_TOKENS
    [peer] = [source for source in decoded["tokens"] if source.startswith("peer ")]
    assert decoded["tokens"] == {"gpu": 0, peer: WHOLE, "computed": NUM_TOKENS - WHOLE}
    assert answer["kv_transfer_params"]["cpu_offload_report"]["tokens"] == decoded["tokens"]


def test_bytes_that_crossed_are_those_of_the_prompts(fleet: Fleet) -> None:
    before = fetched_bytes(fleet.decode)
    ask(fleet.proxy, prompt_of(10))
    assert fetched_bytes(fleet.decode) - before == NUM_BLOCKS * BLOCK_BYTES


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
    before, fetched = computed(fleet.decode), fetched_bytes(fleet.decode)
    old = prompt_of(20)
    with_old = cold(fleet.decode[0].http, old)
    for server in fleet.prefill:
        with server.http.open("/reset_prefix_cache?reset_external=true", {}) as response:
            assert response.status == 200
    before = computed(fleet.decode)
    assert_same(ask(fleet.proxy, old), with_old)
    assert computed(fleet.decode) - before == NUM_TOKENS, "nothing was handed over"
    assert fetched_bytes(fleet.decode) == fetched
    for server in fleet.decode:  # all have the new weights, but they have no name that would say so
        with server.http.open("/reset_prefix_cache?reset_external=true", {}) as response:
            assert response.status == 200
    assert_same(ask(fleet.proxy, prompt_of(21)), cold(fleet.decode[0].http, prompt_of(21)))
    assert fetched_bytes(fleet.decode) == fetched


def kill_who_decodes(fleet: Fleet) -> list[ServerProcess]:
    """None of them comes a token further while we ask the proxy who it is."""
    for server in fleet.decode:
        server.signal(signal.SIGSTOP, everyone=True)
    told = fleet.admin.engines()
    killed = []
    for server in fleet.decode:
        if told[server.http.base_url]["running"]:
            server.signal(signal.SIGKILL, everyone=True)
            killed.append(server)
        else:
            server.signal(signal.SIGCONT, everyone=True)
    return killed


def test_engines_die(fleet: Fleet) -> None:
    """One that decodes in the middle of an answer, one that prefills while it does, then the other."""
    killed: list[ServerProcess] = []

    def seen(tokens: list[int]) -> None:
        if len(tokens) >= 2 and not killed:
            killed.extend(kill_who_decodes(fleet))

    for seed in range(300, 320):  # on a busy machine an answer may end before we have read its second token
        prompt = prompt_of(seed, 10 * BLOCK_SIZE + 11)
        expected = cold(fleet.prefill[0].http, prompt, max_tokens=500)
        assert stream(fleet.proxy, prompt, seen, max_tokens=500) == expected["token_ids"]
        if killed:
            break
    assert len(killed) == 1
    assert [server for server in fleet.decode if not server.http.is_healthy()] == killed

    for number in range(2):
        prompts = [prompt_of(seed) for seed in range(40 + 10 * number, 46 + 10 * number)]
        asking = [Asking(fleet.proxy, prompt) for prompt in prompts]
        fleet.prefill[number].signal(signal.SIGKILL, everyone=True)
        found = [each.answer() for each in asking]
        alive = next(server for server in fleet.decode if server.http.is_healthy())
        for answer, prompt in zip(found, prompts, strict=True):
            assert_same(answer, cold(alive.http, prompt))
