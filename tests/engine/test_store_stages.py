"""A store between engines is killed at each stage of a hand-over: requests end whole all the same."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from offload.testing.engines.server import ServerProcess
from offload.vllm.tiers import store_extent_slots
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE
from tests.engine.fleets import (
    NUM_BLOCKS,
    NUM_TOKENS,
    Asking,
    Handed,
    ask,
    assert_same,
    cold,
    prompt_of,
    proxied,
    stream,
    wait_for,
)
from tests.engine.relay import Relay
from tests.engine.server import SIZES, served_model
from tests.stores import REDIS, StoreServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("KV_OFFLOAD_ALL_KINDS" not in os.environ, reason="it takes minutes: in `make soak`"),
]

EXTENT = store_extent_slots(BLOCK_BYTES, 1)
"""Blocks of one."""
NUM_EXTENTS = NUM_BLOCKS // EXTENT
NUM_WRITTEN = NUM_EXTENTS * EXTENT
"""Blocks of a prompt that can be handed over: those of whole extents."""
LEFT = NUM_TOKENS - NUM_WRITTEN * BLOCK_SIZE
"""Tokens of it that are computed in any case."""
_HELD_SECONDS = 60.0
_WAIT_SECONDS = 10
"""That a request waits for answers of the store, however busy this machine is."""
_ROUTE = "redis_to_pool"


class Pair:
    """An engine that prefills and one that decodes, with a store between them, and the proxy.

    Each reaches the store over a relay of its own. The one that decodes is stopped, and goes on when a test
    says so: it asks the store for a prompt only once.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.store = StoreServer(REDIS, folder / "store")
        stack.callback(self.store.kill)
        self.writing = stack.enter_context(Relay(self.store.port, counts_questions=True))
        self.reading = stack.enter_context(Relay(self.store.port))
        self.prefill, self.decode = (
            self._start(folder / name, name, relay, stack)
            for name, relay in (("both", self.writing), ("decode", self.reading))
        )
        options = ("--min-prefill-tokens", "1")
        self.http, self._admin = proxied(stack, *options, prefill=[self.prefill], decode=[self.decode])
        self.handed = Handed([self.decode], _ROUTE)

    def stop(self) -> None:
        """Who decodes."""
        self.decode.signal(signal.SIGSTOP, everyone=True)

    def go_on(self) -> None:
        """Who decodes."""
        self.decode.signal(signal.SIGCONT, everyone=True)

    def wait_until_asked(self, num_prompts: int) -> None:
        """Prompts are computed, and are with the engine that decodes."""
        label = 'outcome="no reference",role="prefill"'
        wait_for(lambda: self._admin.count("legs", label) >= num_prompts, "prompts were not computed")

    def wait_until_written(self, num_prompts: int) -> None:
        """The store has all that can be handed over."""
        num_keys = num_prompts * NUM_EXTENTS
        wait_for(lambda: len(self.store.all_keys()) >= num_keys, "prompts were not written")

    def lose_store(self) -> None:
        """It is dead, and what is on its way is lost."""
        self.store.kill()
        self.writing.cut()
        self.reading.cut()

    def check(self, asking: list[Asking], prompts: list[list[int]]) -> None:
        """Requests end whole, and who decodes has computed all of their prompts."""
        found = [each.answer() for each in asking]
        assert self.handed.num_computed == len(prompts) * NUM_TOKENS
        for answer, prompt in zip(found, prompts, strict=True):
            assert_same(answer, cold(self.decode.http, prompt))
            assert_same(answer, cold(self.prefill.http, prompt))

    def _start(self, folder: Path, role: str, relay: Relay, stack: ExitStack) -> ServerProcess:
        tier = {"kind": REDIS, "url": f"redis://127.0.0.1:{relay.port}/0", "wait_seconds": _WAIT_SECONDS}
        config: dict[str, Any] = {"cpu_gib": 0.0625, "role": role, "tiers": [tier], **ALL_RESTORED}
        folder.mkdir()
        return stack.enter_context(ServerProcess(folder, served_model(), SIZES, config, {}))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


PROMPTS = [prompt_of(seed) for seed in (51, 52)]


def test_dies_before_anybody_has_the_requests(pair: Pair) -> None:
    pair.lose_store()
    asking = [Asking(pair.http, prompt) for prompt in PROMPTS]
    pair.check(asking, PROMPTS)
    assert pair.handed.num_fetched == 0


def test_dies_while_prompts_are_written(pair: Pair) -> None:
    """Up to the middle of an extent of the first."""
    pair.stop()
    pair.writing.hold_after(NUM_BLOCKS * BLOCK_BYTES // 2 + BLOCK_BYTES // 3)
    asking = [Asking(pair.http, prompt) for prompt in PROMPTS]
    pair.writing.wait_until_held(_HELD_SECONDS)
    assert len(pair.store.all_keys()) < NUM_EXTENTS
    pair.lose_store()
    pair.wait_until_asked(len(PROMPTS))
    pair.go_on()
    pair.check(asking, PROMPTS)
    assert pair.handed.num_fetched == 0


def test_dies_between_writing_and_the_question(pair: Pair) -> None:
    pair.stop()
    asking = [Asking(pair.http, prompt) for prompt in PROMPTS]
    pair.wait_until_asked(len(PROMPTS))
    pair.wait_until_written(len(PROMPTS))
    pair.lose_store()
    pair.go_on()
    pair.check(asking, PROMPTS)
    assert pair.handed.num_fetched == 0


def test_dies_while_a_prompt_is_fetched(pair: Pair) -> None:
    """A part has come. What a store brings is used if the whole job ends well, and a prompt here is one."""
    [prompt, _] = PROMPTS
    pair.stop()
    asking = Asking(pair.http, prompt)
    pair.wait_until_asked(1)
    pair.wait_until_written(1)
    pair.reading.hold_after(NUM_BLOCKS * BLOCK_BYTES // 2 + BLOCK_BYTES // 3)
    pair.go_on()
    pair.reading.wait_until_held(_HELD_SECONDS)
    pair.lose_store()
    pair.check([asking], [prompt])
    assert pair.handed.num_fetched <= NUM_BLOCKS // 2


def test_dies_in_an_answer_and_comes_back(pair: Pair) -> None:
    """What was fetched before is used. The new store is empty; it is written to, and fetched from, again."""
    [prompt, _] = PROMPTS
    ask(pair.prefill.http, prompt)
    pair.wait_until_written(1)

    def seen(tokens: list[int]) -> None:
        if len(tokens) == 2:
            pair.lose_store()

    tokens = stream(pair.http, prompt, seen, max_tokens=150)
    assert (pair.handed.num_computed, pair.handed.num_fetched) == (LEFT, NUM_WRITTEN)
    assert tokens == cold(pair.prefill.http, prompt, max_tokens=150)["token_ids"]
    pair.store.start()
    prompts = (prompt_of(seed) for seed in range(100, 1000))
    computed = [next(prompts)]
    ask(pair.prefill.http, computed[0])

    def is_handed_over() -> bool:
        """What was computed before the last prompt: it has had time to be written."""
        handed, before = Handed([pair.decode], _ROUTE), computed[-1]
        computed.append(next(prompts))
        ask(pair.prefill.http, computed[-1])
        assert_same(ask(pair.http, before), cold(pair.decode.http, before))
        return handed.num_fetched == NUM_WRITTEN and handed.num_computed == LEFT + NUM_TOKENS

    wait_for(is_handed_over, "nothing is handed over by the new store")
