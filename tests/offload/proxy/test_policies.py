"""Strategies, what they know of prompts, and what happens when one of them does not choose."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from offload.proxy import Engine, Fleet, Request, Route
from offload.proxy.history import TOKENS_PER_PIECE, History
from offload.proxy.policies import LeastLoad, RoundRobin
from offload.proxy.prefixes import PrefixPolicy, PrefixTextPolicy, Sources
from offload.proxy.turns import COMPLETIONS, parse
from offload.testing.upstream import Fault, encode
from tests.offload.proxy.kit import PROMPT, on_a_loop, stand, until
from tests.offload.proxy.test_legs import CHAT


def request(token_ids: Sequence[int] | None = None, text: str = "") -> Request:
    pieces = [b"head", text.encode()] if token_ids is None else []
    return Request("/v1/completions", "m", len(token_ids or text), token_ids, pieces, {}, None)


def fleet(*loads: int, prefill: Sequence[int] = ()) -> Fleet:
    return Fleet(
        [Engine(f"p{number}", "prefill", 0, load) for number, load in enumerate(prefill)],
        [Engine(f"d{number}", "decode", load, 0) for number, load in enumerate(loads)],
    )


def test_round_robin_takes_each_in_turn() -> None:
    policy = RoundRobin()
    routes = [policy.choose(request(), fleet(0, 9, prefill=[5, 0, 1])) for _ in range(6)]
    assert [each.decode.url for each in routes] == ["d0", "d1"] * 3
    assert [each.prefill.url for each in routes if each.prefill] == ["p0", "p1", "p2"] * 2
    assert policy.choose(request(), fleet(0)).prefill is None


def test_least_load_takes_the_idlest_and_else_in_turn() -> None:
    policy = LeastLoad()
    for _ in range(3):
        route = policy.choose(request(), fleet(3, 1, 2, prefill=[700, 20, 21]))
        assert (route.prefill and route.prefill.url, route.decode.url) == ("p1", "d1")
    assert {policy.choose(request(), fleet(1, 1, 1)).decode.url for _ in range(3)} == {"d0", "d1", "d2"}


async def chosen(policy: PrefixPolicy, depths: Mapping[str, int], at: Fleet, ids: Any = (1, 2)) -> Route:
    async def token_ids(_: Request) -> Any:
        return ids

    policy.attach(Sources(token_ids, lambda _: depths))
    return await policy.choose(request(text="x"), at)


@on_a_loop
async def test_prefix_takes_the_engine_that_has_most_unless_it_is_far_too_busy() -> None:
    policy = PrefixPolicy()
    assert (await chosen(policy, {"d1": 512}, fleet(0, 3, 0))).decode.url == "d1"
    assert (await chosen(policy, {"d1": 512, "d2": 256}, fleet(0, 9, 0))).decode.url == "d2"
    route = await chosen(policy, {"p0": 512}, fleet(0, prefill=[30_000, 0]))
    assert route.prefill is not None and route.prefill.url == "p0"
    route = await chosen(policy, {"p0": 512}, fleet(0, prefill=[40_000, 0]))
    assert route.prefill is not None and route.prefill.url == "p1"
    assert (
        await chosen(policy, {"d1": 512}, fleet(0, 3, 0), ids=None)
    ).decode.url != "d1"  # nobody tokenizes
    assert (await chosen(PrefixTextPolicy(), {"d1": 512}, fleet(0, 3, 0), ids=None)).decode.url == "d1"


@on_a_loop
async def test_trees_are_believed_before_what_is_remembered() -> None:
    class Tree:
        def __init__(self, told: Mapping[str, int] | Exception) -> None:
            self.told = told

        async def depths(self, token_ids: Any, _: Request, urls: Sequence[str]) -> Mapping[str, int]:
            assert list(token_ids) == [1, 2] and list(urls) == ["d0", "d1"]
            if isinstance(self.told, Exception):
                raise self.told
            return self.told

    policy = PrefixPolicy([Tree({"d0": 0}), Tree(OSError()), Tree({"d0": 9999, "d1": 100})])
    assert (await chosen(policy, {"d0": 512}, fleet(0, 0))).decode.url == "d1"


@pytest.mark.parametrize("seed", range(20))
def test_history_is_as_a_slow_one(seed: int) -> None:
    """Beside it: all pieces by their tokens, oldest first."""
    drawn = random.Random(seed)
    limit = drawn.choice([0, 3, 10, 100])
    history = History(limit * TOKENS_PER_PIECE)
    slow: OrderedDict[tuple[int, ...], dict[str, None]] = OrderedDict()
    size = TOKENS_PER_PIECE

    def pieces(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]

    for _ in range(60):
        ids = [drawn.randrange(2) for _ in range(drawn.randrange(4))]
        ids = [each for each in ids for _ in range(size)] + [7] * drawn.randrange(size)
        url = f"d{drawn.randrange(3)}"
        if drawn.random() < 0.6:
            history.add(request(ids), url)
            for piece in pieces(ids):
                slow.setdefault(piece, {})[url] = None
                slow.move_to_end(piece)
            while sum(map(len, slow.values())) > limit:
                slow.popitem(last=False)
        elif drawn.random() < 0.1:
            history.forget(url)
            for piece in list(slow):
                slow[piece].pop(url, None)
                if not slow[piece]:
                    del slow[piece]
        else:
            depths: dict[str, int] = {}
            for piece in pieces(ids):
                if piece not in slow:
                    break
                slow.move_to_end(piece)
                depths.update(dict.fromkeys(slow[piece], len(piece)))
            assert history.depths(request(ids)) == depths
        history.check_invariants()
        assert len(history) == sum(map(len, slow.values()))


def test_prompts_of_other_models_and_salts_are_others() -> None:
    history = History(1 << 20)
    body = b'{"prompt": "%b", "model": "%b", "cache_salt": "%b"}'
    text = b"long " * 1000
    history.add(parse(COMPLETIONS, body % (text, b"m", b"s"), None, 0).request, "d0")
    assert history.depths(parse(COMPLETIONS, body % (text + b"x", b"m", b"s"), None, 0).request) == {
        "d0": 1024
    }
    assert not history.depths(parse(COMPLETIONS, body % (text, b"n", b"s"), None, 0).request)
    assert not history.depths(parse(COMPLETIONS, body % (text, b"m", b"t"), None, 0).request)


@pytest.mark.parametrize("policy", [PrefixPolicy, PrefixTextPolicy])
@on_a_loop
async def test_the_next_turn_of_a_conversation_goes_where_the_last_one_was(policy: Any) -> None:
    async with stand(decode=4, policy=policy(), history_tokens=1 << 20) as it:
        where = {}
        for number in range(8):
            messages = [{"role": "user", "content": f"{number} " + PROMPT * 2}]
            for turn in range(3):
                told = await it.ask(CHAT, messages=messages, max_tokens=2)
                (engine,) = [each for each in it.decode if any(r.outcome == "done" for r in each.of(CHAT))]
                assert turn == 0 or where[number] == engine.name
                where[number] = engine.name
                for each in it.decode:
                    each.received.clear()
                messages += [{"role": "assistant", "content": told.text}, {"role": "user", "content": "on"}]
        assert len(set(where.values())) > 1


@on_a_loop
async def test_prompts_are_tokenized_once_by_an_engine_in_the_clients_name() -> None:
    async with stand(decode=1, policy=PrefixPolicy()) as it:
        for _ in range(3):
            await it.ask(prompt="some text", max_tokens=1, headers={"Authorization": "Bearer me"})
        (asked,) = it.decode[0].of("/tokenize")
        assert asked.headers["Authorization"] == "Bearer me"
        assert it.count("tokenized", outcome="asked") == 1 and it.count("tokenized", outcome="known") == 2
        await it.ask(prompt=encode("some text"), max_tokens=1)  # has them itself
        assert len(it.decode[0].of("/tokenize")) == 1
        it.proxy.core.tokens.check_invariants()


@on_a_loop
async def test_an_engine_that_is_slow_to_tokenize_is_not_waited_for() -> None:
    async with stand(decode=1, policy=PrefixPolicy(), tokenize_seconds=0.05) as it:
        gate = asyncio.Event()
        it.decode[0].faults.choose = lambda path, _: (
            Fault("wait", until=gate) if path == "/tokenize" else None
        )
        assert (await it.ask(prompt="some text", max_tokens=1)).status == 200
        assert it.count("tokenized", outcome="late") == 1
        gate.set()  # it goes on, and the next request finds what it has made
        await until(lambda: it.proxy.core.tokens._known != {})
        assert (await it.ask(prompt="some text", max_tokens=1)).status == 200
        assert it.count("tokenized", outcome="known") == 1


@pytest.mark.parametrize("body", [b"{}", b"[", b'{"tokens": ["x"]}', None])
@on_a_loop
async def test_engines_that_do_not_tokenize_are_left_alone(body: bytes | None) -> None:
    async with stand(decode=1, policy=PrefixPolicy(), eject_failures=100) as it:
        fault = Fault("status", status=404 if body is None else 200, body=body)
        it.decode[0].faults.choose = lambda path, _: fault if path == "/tokenize" else None
        for number in range(6):
            assert (await it.ask(prompt=f"text {number}", max_tokens=1)).status == 200
        assert len(it.decode[0].of("/tokenize")) == 3
        assert it.count("tokenized", outcome="not asked") == 3


@on_a_loop
async def test_what_is_kept_of_prompts_is_bounded() -> None:
    async with stand(decode=1, policy=PrefixPolicy(), tokenized_tokens=100) as it:
        for number in range(30):
            await it.ask(prompt=f"text of 20 bytes {number:04}", max_tokens=1)
            it.proxy.core.tokens.check_invariants()
        await it.ask(prompt="x" * 500, max_tokens=1)
        assert len(it.proxy.core.tokens._known) == 4


class Broken:
    def choose(self, request: Request, fleet: Fleet) -> Any:
        raise KeyError("nothing")


class Foreign:
    def choose(self, request: Request, fleet: Fleet) -> Any:
        return Route(None, Engine("http://elsewhere", "decode", 0, 0))


class Nothing:
    def choose(self, request: Request, fleet: Fleet) -> Any:
        return None


class Hanging:
    async def choose(self, request: Request, fleet: Fleet) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("policy", "reason"),
    [(Broken, "error"), (Foreign, "not in the fleet"), (Nothing, "not in the fleet"), (Hanging, "late")],
)
@on_a_loop
async def test_a_policy_that_does_not_choose_harms_nobody(policy: Any, reason: str) -> None:
    async with stand(decode=2, policy=policy(), tokenize_seconds=0.02) as it:
        for _ in range(4):
            assert (await it.ask(prompt="hello", max_tokens=1)).status == 200
        assert [len(each.of()) for each in it.decode] == [2, 2]
        assert it.count("policy_fallbacks", reason=reason) == 4


@on_a_loop
async def test_a_policy_sees_what_engines_have_to_do() -> None:
    seen: list[Fleet] = []

    class Watching(RoundRobin):
        def choose(self, request: Request, fleet: Fleet) -> Route:
            seen.append(fleet)
            return super().choose(request, fleet)

    async with stand(prefill=1, decode=1, policy=Watching(), is_sequential=True) as it:
        gates = asyncio.Event(), asyncio.Event()
        it.prefill[0].faults.queue = [Fault("wait", until=gates[0])]
        it.decode[0].faults.queue = [Fault("wait", until=gates[1])]
        asked = [asyncio.create_task(it.ask(prompt=PROMPT, max_tokens=1))]
        await until(lambda: len(it.prefill[0].of()) == 1)
        asked.append(asyncio.create_task(it.ask(prompt=PROMPT, max_tokens=1)))
        await until(lambda: len(seen) == 2)
        assert seen[1].prefill[0].prompt_tokens == len(PROMPT) // 4
        gates[0].set()
        await until(lambda: len(it.decode[0].of()) == 2)
        gates[1].set()
        await asyncio.gather(*asked)
        await it.ask(prompt=PROMPT, max_tokens=1)
        assert (seen[2].prefill[0].prompt_tokens, seen[2].decode[0].running) == (0, 0)
