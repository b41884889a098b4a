"""Two engines of both roles behind the proxy: conversations move between them, and so does their KV."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from offload.testing.engines.client import HttpServer
from offload.testing.engines.server import ServerProcess, held_port
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE
from tests.engine.engine import SHORT
from tests.engine.fleets import (
    Admin,
    Handed,
    ask,
    assert_same,
    cold,
    fetched_bytes,
    labelled,
    prompt_of,
    proxied,
    stream,
    wait_for,
)
from tests.engine.server import SIZES, served_model

pytestmark = pytest.mark.engine

FIRST = 30 * BLOCK_SIZE + 5
"""Tokens of a conversation's first turn."""
_TRIES = 10
"""An engine asks its peers once for half a second. On a busy machine they may not have answered by then."""


class Pair(NamedTuple):
    """Servers, and who is asked."""

    servers: list[ServerProcess]
    proxy: HttpServer
    admin: Admin
    sockets: Path
    events: list[str]

    def other(self, server: ServerProcess) -> ServerProcess:
        """Of the two."""
        [other] = [each for each in self.servers if each is not server]
        return other

    def told(self, *options: str) -> str:
        """What ``kv-offload peers`` prints."""
        command = [sys.executable, "-m", "offload.cli", "peers", "--operator-socket", str(self.sockets)]
        return subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout

    def told_of(self, server: ServerProcess) -> dict[str, Any]:
        """The same of one of them, as it is now."""
        ask(server.http, SHORT)
        name = f"{self.engine_pid(server)}-"
        engines = json.loads(self.told("--json"))["engines"]
        [found] = [each for each in engines if each["engine"].startswith(name)]
        return dict(found)

    def engine_pid(self, server: ServerProcess) -> int:
        """Of the process that has the scheduler."""
        names = [path.name for path in self.sockets.rglob("*") if path.name.partition("-")[0].isdigit()]
        [pid] = {int(each.partition("-")[0]) for each in names} & set(server.processes())
        return pid


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        sockets = tmp_path_factory.mktemp("sockets")
        peers = [f"127.0.0.1:{stack.enter_context(held_port()).getsockname()[1]}" for _ in range(2)]
        servers = []
        folders = [stack.enter_context(TemporaryDirectory()) for _ in peers]  # pytest's own are too long
        events = [f"ipc://{folder}/events" for folder in folders]
        for peer, endpoint in zip(peers, events, strict=True):
            told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
            flags = SIZES | {
                "--kv-events-config": json.dumps(told | {"replay_endpoint": f"{endpoint}.again"})
            }
            config = {"cpu_gib": 0.0625, "listen": peer, "peers": peers, "operator_socket": str(sockets)}
            config |= ALL_RESTORED
            folder = tmp_path_factory.mktemp("pair")
            servers.append(stack.enter_context(ServerProcess(folder, served_model(), flags, config, {})))
        options = ("--policy", "round_robin", "--drain-seconds", "0")
        made = Pair(servers, *proxied(stack, *options, both=servers), sockets, events)
        for server in servers:
            wait_for(lambda server=server: _is_connected(server), "they do not meet")  # type: ignore[misc]
        yield made


def _is_connected(server: ServerProcess) -> bool:
    ask(server.http, SHORT)
    return labelled(server.http, "vllm:cpu_offload_peer_connected", "peer=") == 1


def converse(pair: Pair, seed: int) -> tuple[list[int], ServerProcess]:
    """A turn of a conversation: what was said, and by whom."""
    handed = {each: Handed([each]) for each in pair.servers}
    prompt = prompt_of(seed, FIRST)
    answer = ask(pair.proxy, prompt)
    [where] = [each for each, has in handed.items() if has.num_computed]
    assert (handed[where].num_computed, handed[where].num_fetched) == (FIRST, 0)
    return [*prompt, *answer["token_ids"], *prompt_of(seed + 500, 40)], where


def goes_on(pair: Pair, said: list[int], where: ServerProcess) -> int:
    """The next turn is at that engine: what it fetches is not computed. How many blocks it fetched."""
    handed = {each: Handed([each]) for each in pair.servers}
    found = ask(pair.proxy, said)
    assert handed[pair.other(where)].num_computed == 0
    num_fetched = handed[where].num_fetched
    assert handed[where].num_computed == len(said) - num_fetched * BLOCK_SIZE
    assert_same(found, cold(where.http, said))
    return num_fetched


def test_the_next_turn_at_another_engine_fetches_what_the_first_one_has(pair: Pair) -> None:
    """All full blocks of the first turn. The proxy alternates between both."""
    for number in range(_TRIES):
        said, first = converse(pair, 10 + number)
        if goes_on(pair, said, pair.other(first)) == FIRST // BLOCK_SIZE:
            return
    raise AssertionError("nothing was fetched")


def test_a_proxy_that_follows_events_finds_who_has_a_prompt(pair: Pair) -> None:
    """Which it never saw: what was computed before it began, and what is computed then."""
    prompts = [prompt_of(700 + number, FIRST) for number in range(4)]
    for number in (0, 1):
        ask(pair.servers[number].http, prompts[number])
    with ExitStack() as stack:
        options = ["--policy", "prefix", "--tokenize-seconds", "60", "--history-tokens", "0"]
        for server, endpoint in zip(pair.servers, pair.events, strict=True):
            options += ["--kv-events", server.http.base_url, endpoint, f"{endpoint}.again"]
        proxy, admin = proxied(stack, *options, both=pair.servers)

        def blocks() -> list[int]:
            return [each["kv_events"]["blocks"].get("CPU", 0) for each in admin.engines().values()]

        wait_for(lambda: min(blocks()) > 0, "nothing was replayed")
        before = blocks()
        for number in (2, 3):
            ask(pair.servers[number % 2].http, prompts[number])
        most = FIRST // BLOCK_SIZE
        wait_for(
            lambda: all(now >= old + most for now, old in zip(blocks(), before, strict=True)),
            "nothing was told of what was computed then",
        )
        for number in (3, 0, 2, 1):
            has = pair.servers[number % 2]
            handed = {each: Handed([each]) for each in pair.servers}
            ask(proxy, prompts[number])
            assert handed[pair.other(has)].num_computed == 0
            assert 0 < handed[has].num_computed <= BLOCK_SIZE + FIRST % BLOCK_SIZE


def connected(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Peers of an engine, without itself."""
    return [each for each in told["peers"] if each["state"] == "connected"]


def test_what_operators_are_told_of_both_sides(pair: Pair) -> None:
    """Who, how much, how fast, and leases: as the counters of the engine that fetched say."""
    for number in range(_TRIES):
        said, first = converse(pair, 100 + number)
        second = pair.other(first)
        if goes_on(pair, said, second):
            break
    num_bytes = fetched_bytes([second])
    assert num_bytes >= BLOCK_BYTES

    def agree() -> bool:
        here, there = pair.told_of(second), pair.told_of(first)
        [peer], [asker] = connected(here), there["askers"]
        return bool(peer["num_bytes"] == asker["num_bytes"] == num_bytes)

    wait_for(agree, "they do not agree about what was fetched")
    here, there = pair.told_of(second), pair.told_of(first)
    [peer], [back], [asker] = connected(here), connected(there), there["askers"]
    assert (peer["transport"], peer["num_fetches"] > 0, peer["seconds"] > 0) == ("memory", True, True)
    assert asker["peer"] == back["peer"] and asker["host"] == "127.0.0.1"
    assert (asker["num_connections"], asker["is_near"]) == (1, True)
    ask(first.http, prompt_of(600, FIRST), kv_transfer_params={"do_remote_decode": True})
    wait_for(lambda: pair.told_of(first)["leases"]["num_leases"] == 1, "no lease is told of")
    lines = pair.told()
    assert f"({peer['peer']}): connected by memory" in lines and "asker    127.0.0.1 (" in lines
    assert ", 1 leases of prompts for others" in lines


@pytest.mark.skipif(
    "KV_OFFLOAD_ALL_KINDS" not in os.environ,
    reason="its answer may end too early beside others: in `make soak`",
)
def test_who_drains_gets_nothing_new_and_its_requests_go_on_elsewhere(pair: Pair) -> None:
    """No token comes twice, and none is missing. What it has is still fetched from it."""
    held, first = converse(pair, 200)
    second = pair.other(first)
    ask(pair.proxy, SHORT)  # the next request is at the first one again
    prompt = prompt_of(201, FIRST)
    expected = cold(second.http, prompt, max_tokens=150)
    handed = {each: Handed([each]) for each in pair.servers}
    drained: list[ServerProcess] = []

    def seen(tokens: list[int]) -> None:
        if len(tokens) < 2 or drained:
            return
        for each in pair.servers:  # none comes a token further until it is drained
            each.signal(signal.SIGSTOP, everyone=True)
        told = pair.admin.engines()
        drained.extend(each for each in pair.servers if told[each.http.base_url]["running"])
        [url] = [each.http.base_url for each in drained]
        pair.admin.tell("/engines/drain", url=url)
        wait_for(lambda: not pair.admin.engines()[url]["running"], "it was not moved")
        for each in pair.servers:
            each.signal(signal.SIGCONT, everyone=True)

    tokens = stream(pair.proxy, prompt, seen, max_tokens=150)
    assert tokens == expected["token_ids"]
    [victim] = drained
    other = pair.other(victim)
    rest = handed[other].num_computed + handed[other].num_fetched * BLOCK_SIZE
    assert FIRST < rest < FIRST + 150, "the other one took the prompt, and what had been said"
    assert pair.admin.count("continuations", 'outcome="whole"') == 1
    handed = {each: Handed([each]) for each in pair.servers}
    for seed in range(210, 213):
        ask(pair.proxy, prompt_of(seed, FIRST))
    assert handed[victim].num_computed == 0 and handed[other].num_computed == 3 * FIRST
    assert (victim, other) == (first, second)
    goes_on(pair, held, second)
    pair.admin.tell("/engines/resume", url=victim.http.base_url)
