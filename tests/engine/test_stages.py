"""An engine is killed at each stage of a hand-over: the request ends whole at those that live."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from offload.testing.engines.server import ServerProcess, held_port
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE, Prompt
from tests.engine.engine import SHORT
from tests.engine.fleets import (
    NUM_BLOCKS,
    NUM_TOKENS,
    PATIENCE,
    WHOLE,
    Asking,
    Handed,
    ask,
    assert_same,
    cold,
    labelled,
    prompt_of,
    proxied,
    stream,
    wait_for,
)
from tests.engine.relay import Relay
from tests.engine.server import SIZES, served_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("KV_OFFLOAD_ALL_KINDS" not in os.environ, reason="it takes minutes: in `make soak`"),
]

_CHUNK = 2 * BLOCK_SIZE
"""Tokens that the engine which prefills computes in a step: a prompt takes it twenty."""
_HELD_SECONDS = 60.0
_SHARED_MEMORY = "/dev/shm"
_TRIES = 20


class Fleet:
    """An engine that prefills and two that decode, which reach it over a relay; and the proxy.

    The pool of the first lies in files, so its KV goes over the wire. Whoever was killed is started again,
    under another URL, which the proxy is told of.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        port = stack.enter_context(held_port()).getsockname()[1]
        self.relay = stack.enter_context(Relay(port))
        self._folder, self._stack, self._number = folder, stack, 0
        pool = stack.enter_context(tempfile.TemporaryDirectory(prefix="stages-test-", dir=_SHARED_MEMORY))
        listens: dict[str, Any] = {"cpu_gib": 0.0625, "role": "prefill", "listen": f"127.0.0.1:{port}"}
        listens |= ALL_RESTORED
        listens["pool"] = {"kind": "shared-memory", "path": pool}
        self._prefill_config = listens
        self._decode_config: dict[str, Any] = {
            "cpu_gib": 0.0625,
            "role": "decode",
            "peers": [f"127.0.0.1:{self.relay.port}"],
            "peer_wait_seconds": PATIENCE,
        }
        self.prefill = self._start(self._prefill_config, {"--max-num-batched-tokens": _CHUNK})
        self.decode = [self._start(self._decode_config, {}) for _ in range(2)]
        options = ("--min-prefill-tokens", "1")
        self.http, self.admin = proxied(stack, *options, prefill=[self.prefill], decode=self.decode)
        self.seed = 0

    def revive(self) -> None:
        """All live, and know each other: a prompt is handed over."""
        servers = [(self.prefill, "prefill", self._prefill_config, {"--max-num-batched-tokens": _CHUNK})]
        servers += [(each, "decode", self._decode_config, {}) for each in self.decode]
        started = []
        for server, role, config, flags in servers:
            if not server.http.is_healthy():
                self.admin.tell("/engines/remove", url=server.http.base_url)
                started.append((server, role, self._start(config, flags)))
        for old, role, new in started:
            self.admin.tell("/engines", url=new.ready().http.base_url, role=role)
            if old is self.prefill:
                self.prefill = new
            else:
                self.decode[self.decode.index(old)] = new
        for each in self.decode:
            wait_for(lambda each=each: self._is_connected(each), "the peer is not found again")  # type: ignore[misc]
        ask(self.http, self.new_prompt())  # after which the proxy knows which life the peer is in
        handed = Handed(self.decode)
        ask(self.http, self.new_prompt())
        assert (handed.num_computed, handed.num_fetched) == (NUM_TOKENS - WHOLE, NUM_BLOCKS)

    def new_prompt(self) -> list[int]:
        """Nobody has seen it."""
        self.seed += 1
        return prompt_of(1000 + self.seed)

    def kill(self, server: ServerProcess) -> None:
        """All of its processes."""
        server.signal(signal.SIGKILL, everyone=True)
        server.wait()

    def told_of_prefill(self) -> int:
        """Prompt tokens that the proxy waits for there."""
        told = self.admin.engines()[self.prefill.http.base_url]
        return int(told["prompt_tokens"])

    def running(self) -> list[ServerProcess]:
        """Those that decode a request, as the proxy has it."""
        told = self.admin.engines()
        return [each for each in self.decode if told[each.http.base_url]["running"]]

    def _is_connected(self, server: ServerProcess) -> bool:
        ask(server.http, SHORT)
        return labelled(server.http, "vllm:cpu_offload_peer_connected", "peer=") == 1

    def _start(self, config: dict[str, Any], flags: dict[str, object]) -> ServerProcess:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        server = ServerProcess(folder, served_model(), {**SIZES, **flags}, config, {})
        return self._stack.enter_context(server)


@pytest.fixture(scope="module")
def all_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("stages"), stack)


@pytest.fixture
def fleet(all_engines: Fleet) -> Fleet:
    all_engines.relay.let_go()
    all_engines.revive()
    return all_engines


def test_who_prefills_dies_before_it_has_the_request(fleet: Fleet) -> None:
    """It is stopped, so the request lies in its socket at most."""
    prompt, handed = fleet.new_prompt(), Handed(fleet.decode)
    fleet.prefill.signal(signal.SIGSTOP, everyone=True)
    asking = Asking(fleet.http, prompt)
    wait_for(lambda: fleet.told_of_prefill() > 0, "it was not asked")
    fleet.kill(fleet.prefill)
    found = asking.answer()
    assert (handed.num_computed, handed.num_fetched) == (NUM_TOKENS, 0)
    assert_same(found, cold(fleet.decode[0].http, prompt))


def test_who_prefills_dies_in_its_prefill(fleet: Fleet) -> None:
    """Some of it has been fetched by then, chunk by chunk, and is not computed again."""
    for _ in range(_TRIES):
        prompt, handed = fleet.new_prompt(), Handed(fleet.decode)
        fleet.relay.hold_after(BLOCK_BYTES)
        asking = Asking(fleet.http, prompt)
        fleet.relay.wait_until_held(_HELD_SECONDS)
        fleet.prefill.signal(signal.SIGSTOP, everyone=True)
        fleet.relay.let_go()
        if fleet.told_of_prefill():
            break
        fleet.prefill.signal(signal.SIGCONT, everyone=True)  # it had ended
        asking.answer()
    else:
        raise AssertionError("it was never in its prefill")
    fleet.kill(fleet.prefill)
    found = asking.answer()
    assert 0 < handed.num_fetched < NUM_BLOCKS
    assert handed.num_computed == NUM_TOKENS - handed.num_fetched * BLOCK_SIZE
    assert_same(found, cold(fleet.decode[0].http, prompt))


def test_who_prefills_dies_between_its_answer_and_the_fetch(fleet: Fleet) -> None:
    """Those that decode are stopped until it is dead."""
    prompt, handed = fleet.new_prompt(), Handed(fleet.decode)
    num_done = fleet.admin.count("legs", 'outcome="done",role="prefill"')
    for each in fleet.decode:
        each.signal(signal.SIGSTOP, everyone=True)
    asking = Asking(fleet.http, prompt)
    wait_for(
        lambda: fleet.admin.count("legs", 'outcome="done",role="prefill"') > num_done,
        "the prompt was not computed",
    )
    assert fleet.running(), "one of them is asked"
    fleet.kill(fleet.prefill)
    for each in fleet.decode:
        each.signal(signal.SIGCONT, everyone=True)
    found = asking.answer()
    assert (handed.num_computed, handed.num_fetched) == (NUM_TOKENS, 0)
    assert_same(found, cold(fleet.decode[0].http, prompt))


def test_who_prefills_dies_while_its_kv_is_fetched(fleet: Fleet) -> None:
    """A part has come, up to the middle of a block."""
    prompt, handed = fleet.new_prompt(), Handed(fleet.decode)
    fleet.relay.hold_after(NUM_BLOCKS * BLOCK_BYTES // 2 + BLOCK_BYTES // 3)
    asking = Asking(fleet.http, prompt)
    fleet.relay.wait_until_held(_HELD_SECONDS)
    fleet.kill(fleet.prefill)
    fleet.relay.cut()
    found = asking.answer()
    assert handed.num_fetched <= NUM_BLOCKS // 2
    assert handed.num_computed == NUM_TOKENS - handed.num_fetched * BLOCK_SIZE
    assert_same(found, cold(fleet.decode[0].http, prompt))


def test_who_decodes_dies_before_its_first_byte(fleet: Fleet) -> None:
    """Both are stopped until it is known who it is. The other fetches the prompt."""
    prompt, handed = fleet.new_prompt(), {each: Handed([each]) for each in fleet.decode}
    for each in fleet.decode:
        each.signal(signal.SIGSTOP, everyone=True)
    asking = Asking(fleet.http, prompt)
    wait_for(lambda: bool(fleet.running()), "nobody is asked")
    [victim] = fleet.running()
    fleet.kill(victim)
    [other] = [each for each in fleet.decode if each is not victim]
    other.signal(signal.SIGCONT, everyone=True)
    wait_for(other.http.is_healthy, "the other does not go on")
    found = asking.answer()
    assert (handed[other].num_computed, handed[other].num_fetched) == (NUM_TOKENS - WHOLE, NUM_BLOCKS)
    assert_same(found, cold(other.http, prompt))


def test_who_decodes_dies_after_its_first_byte(fleet: Fleet) -> None:
    """The other fetches the prompt, and goes on behind the tokens that the client has."""
    for _ in range(_TRIES):
        prompt = fleet.new_prompt()
        expected = cold(fleet.prefill.http, prompt, max_tokens=150)
        handed = {each: Handed([each]) for each in fleet.decode}
        tokens, other = _killed_in_its_answer(fleet, prompt)
        assert tokens == expected["token_ids"]
        if handed[other].num_fetched:
            break
        # The whole answer was on its way to the client by then. Or peers took longer to answer, on a machine
        # with much to do, than the 20 ms that a request waits which nobody has sent to one.
        fleet.revive()
    else:
        raise AssertionError("it never fetched the prompt")
    assert handed[other].num_fetched == NUM_BLOCKS
    assert NUM_TOKENS - WHOLE < handed[other].num_computed <= NUM_TOKENS - WHOLE + 150


def _killed_in_its_answer(fleet: Fleet, prompt: Prompt) -> tuple[list[int], ServerProcess]:
    """An answer whose engine is killed after two tokens of it, and the engine that lives."""
    victims: list[ServerProcess] = []

    def seen(tokens: list[int]) -> None:
        if len(tokens) < 2 or victims:
            return
        for each in fleet.decode:  # none comes a token further while we ask who it is
            each.signal(signal.SIGSTOP, everyone=True)
        victims.extend(fleet.running())
        for each in fleet.decode:
            if each in victims:
                fleet.kill(each)
            else:
                each.signal(signal.SIGCONT, everyone=True)

    tokens = stream(fleet.http, prompt, seen, max_tokens=150)
    [victim] = victims
    [other] = [each for each in fleet.decode if each is not victim]
    return tokens, other
