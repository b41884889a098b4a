"""Engines that fetch from peers, with and without references, while these still compute."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.messages import POOL, SCHEDULER, PeerLife, Route, TierFacts, Unused
from offload.scheduler.common import Common
from offload.scheduler.flow import Below
from offload.scheduler.tiers.peer_fetches import PeerFetches
from offload.scheduler.tiers.peer_wish import TOKEN_SECONDS
from offload.scheduler.tiers.tier import TierLimits, make_peers
from offload.testing.media.peers import RegionPeers
from offload.testing.virtual import MODELS
from offload.transfer_params import KVTransferParams, tip_of
from offload.vllm.places import Place
from offload.worker.media.base import MediumJob, Verb
from offload.worker.media.lane import LanesBelow, PoolParts, sibling_lanes, store_facts
from offload.worker.pool.siblings import Siblings
from tests.virtual.driver import forget_gpu, step_until, tokens, watch
from tests.virtual.test_regions import BLOCK, OTHER, PROMPT, WHOLE, check_pool
from tests.virtual.test_siblings import Beside, columns_of

FETCH, PROBE = Route("fetch", "peers", POOL), Route("probe", "peers", SCHEDULER)
REST = len(PROMPT) - WHOLE
LIFE = PeerLife("a" * 16, "b" * 16)
STEP = 0.005


class Peers:
    """The place below the pool of an engine that fetches."""

    def __init__(self, columns: int = 1, *, extent_bytes: int = 1, **limits: Any) -> None:
        self.media: list[RegionPeers] = []
        self.lives = {LIFE}
        self._columns = columns
        self._extent_bytes = extent_bytes
        self._limits = TierLimits(**{"least_tokens": 1} | limits)

    @property
    def place(self) -> Place:
        self.media = []
        return Place(self._make_flows, self._make_lanes)

    def _make_flows(self, common: Common, facts: Any) -> Below:
        below = make_peers(FETCH, PROBE, common, facts, self._limits, self._extent_bytes)
        [self.fetches, self.probes] = below.flows
        return below

    def _make_lanes(self, pool: PoolParts) -> LanesBelow:
        assert pool.home is not None
        medium = RegionPeers(Siblings(pool.home, self._columns), pool.slots)
        medium.lives = self.lives
        self.media.append(medium)
        facts: TierFacts = store_facts(1, pool.share)
        return LanesBelow(sibling_lanes(FETCH, PROBE, medium, pool), facts)


class Pair:
    """An engine that computes, and one that fetches from it."""

    def __init__(self, num_ranks: int = 1, *, peers: Peers | None = None, **settings: Any) -> None:
        columns = columns_of(settings.pop("model")) if "model" in settings else 1
        self.peers = Peers(columns) if peers is None else peers
        self.prefill = Beside(num_ranks, places=(), **settings)
        self.decode = self.prefill.another(places=(self.peers.place,))
        self.computed = watch(self.decode.engine)

    @property
    def media(self) -> list[RegionPeers]:
        return self.peers.media

    @property
    def fetches(self) -> PeerFetches:
        assert isinstance(self.peers.fetches, PeerFetches)
        return self.peers.fetches

    def send(self, prompt: list[int] = PROMPT, **params: Any) -> Any:
        """Ask for it as a proxy does, with a reference to the other engine."""
        hints = KVTransferParams(**{"peer": LIFE.peer, "epoch": LIFE.epoch} | params).to_dict()
        return self.decode.engine.add(prompt, 1, hints=hints)

    def ask(self, prompt: list[int] = PROMPT, **params: Any) -> int:
        """Tokens that are computed for it."""
        request = self.send(prompt, **params)
        self.decode.engine.drain(500)
        return self.computed[request.request_id]

    def both(self, done: Callable[[], bool], every: int = 1, most: int = 1000) -> int:
        """Step both, the one that computes in one of so many turns. Returns how many there were."""
        for turn in range(most):
            if done():
                return turn
            if turn % every == 0:
                self.prefill.engine.step()
            self.decode.engine.step()
        raise AssertionError(f"nothing of the kind within {most} turns")

    def counted(self, name: str) -> dict[str, float]:
        """Counts of requests, by label."""
        return {label: count for (each, label), count in self.decode.counts.items() if each == name}

    def end(self) -> None:
        assert not self.fetches.left_over()["requests that wait for peers"]
        self.decode.end()
        self.prefill.end()


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.end()


def of(prompt: list[int], request: Any) -> dict[str, Any]:
    """What a prefill engine returns of it."""
    last = len(prompt) // BLOCK
    return {"tokens": last * BLOCK, "tip": tip_of(request.block_hashes[last - 1])}


def test_what_one_engine_computed_the_other_fetches(pair: Pair) -> None:
    pair.prefill.ask()
    assert pair.ask() == REST
    slot_bytes = pair.decode.engine.settings.slot_bytes * len(pair.media)
    assert pair.decode.counted("route_bytes", FETCH) == WHOLE // BLOCK * slot_bytes
    assert pair.counted("received_hand_offs") == {None: 1} and not pair.counted("unused_hand_offs")
    assert pair.ask(OTHER) == len(OTHER)


def test_who_says_nothing_asks_all_once(pair: Pair) -> None:
    pair.prefill.ask()
    request = pair.decode.engine.add(PROMPT, 1)
    pair.decode.engine.drain(500)
    assert pair.computed[request.request_id] == REST
    assert [each for each in pair.media[0].asked if each[0] > 1] == [(63, 63)]
    assert not pair.media[0].released and not pair.counted("received_hand_offs")


@pytest.mark.parametrize("positions", [1, 4, 16, 64])
def test_the_tail_is_fetched_whatever_an_extent_is(positions: int) -> None:
    pair = Pair()
    slot_bytes = pair.prefill.engine.settings.slot_bytes
    pair.end()
    pair = Pair(peers=Peers(extent_bytes=positions * slot_bytes))
    pair.prefill.ask()
    assert pair.ask() == REST
    longer = [*PROMPT, *tokens(5 * BLOCK, first=9)]
    assert pair.ask(longer) == 5 * BLOCK + REST
    check_pool(pair.decode.engine)
    pair.end()


def test_what_is_computed_meanwhile_is_fetched_meanwhile(pair: Pair) -> None:
    """Both engines are asked at once. What has come is on its way before the rest is computed."""
    request = pair.prefill.engine.add(PROMPT, 1)
    fetched = pair.send()
    pair.both(lambda: request.num_computed_tokens > WHOLE // 2, 4)
    assert not fetched.is_finished() and pair.decode.counts["route_bytes", FETCH] > 0
    turns = pair.both(request.is_finished, 4)
    assert turns < pair.both(fetched.is_finished, 4) + turns
    assert pair.computed[fetched.request_id] == REST
    assert pair.counted("received_hand_offs") == {None: 1}
    assert pair.media[0].released == [bytes.fromhex(tip_of(request.block_hashes[62]))]


def test_who_expects_what_never_comes_computes(pair: Pair) -> None:
    request = pair.send()
    began = pair.decode.engine.clock()
    step_until(pair.decode.engine, lambda: pair.computed.get(request.request_id, 0) > 0)
    waited = pair.decode.engine.clock() - began
    assert waited <= 2 * WHOLE * TOKEN_SECONDS + 4 * STEP
    pair.decode.engine.drain(500)
    assert pair.computed[request.request_id] == len(PROMPT)
    assert pair.counted("unused_hand_offs") == {Unused.LATE: 1}


def test_patience_begins_anew_with_each_progress() -> None:
    """All of it takes several times as long as somebody waits for a part of it."""
    pair = Pair(chunk=2 * BLOCK)
    request, fetched = pair.prefill.engine.add(PROMPT, 1), pair.send()
    turns = pair.both(fetched.is_finished, 8)
    assert turns * STEP > 4 * 2 * WHOLE * TOKEN_SECONDS / 2
    assert pair.computed[fetched.request_id] < WHOLE // 4, "patience is shorter, the less is missing"
    pair.both(request.is_finished)
    pair.end()


def test_nobody_is_asked_in_each_step(pair: Pair) -> None:
    """Nor is anything looked for in the pool."""
    looks = []
    allocator = pair.decode.engine.side.allocator
    original = allocator.resident_depth

    def resident_depth(chain: Any) -> int:
        looks.append(len(chain))
        return original(chain)

    allocator.resident_depth = resident_depth  # type: ignore[method-assign]
    requests = [pair.send(tokens(60 * BLOCK, first=first)) for first in range(5, 25)]
    for _ in range(20):
        pair.decode.engine.step()
    seconds, num_asked = 20 * STEP, len(pair.media[0].asked)
    assert num_asked <= len(requests) * (1 + seconds / STEP / 2.5) + 1
    for request in requests:
        pair.decode.engine.abort(request.request_id)


class TestReferences:
    def test_how_far_is_believed(self, pair: Pair) -> None:
        request = pair.prefill.engine.add(PROMPT, 1)
        pair.prefill.engine.drain(500)
        assert pair.ask(**of(PROMPT, request)) == REST
        assert pair.counted("received_hand_offs") == {None: 1}

    def test_another_prompt_is_no_reference(self, pair: Pair) -> None:
        """What is there is found all the same."""
        request = pair.prefill.engine.add(PROMPT, 1)
        pair.prefill.engine.drain(500)
        assert pair.ask(OTHER, **of(PROMPT, request)) == len(OTHER)
        assert pair.counted("unused_hand_offs") == {Unused.OTHER_PROMPT: 1}
        assert pair.ask(**of(PROMPT, request) | {"tip": "0" * 32}) == REST
        assert not pair.media[0].released

    @pytest.mark.parametrize(
        ("life", "reason"),
        [
            ({"peer": "c" * 16}, Unused.UNKNOWN_PEER),
            ({"epoch": "c" * 16}, Unused.OLD_EPOCH),
        ],
    )
    def test_what_is_void_is_ignored(self, pair: Pair, life: dict[str, str], reason: str) -> None:
        pair.prefill.ask()
        assert pair.ask(**life) == REST, "all are asked then"
        assert pair.counted("unused_hand_offs") == {reason: 1}
        assert pair.ask(OTHER, **life) == len(OTHER)

    def test_whichever_life_it_is_in(self, pair: Pair) -> None:
        pair.prefill.ask()
        assert pair.ask(epoch=None) == REST

    def test_a_prompt_below_a_block_is_answered_at_once(self, pair: Pair) -> None:
        assert pair.ask(PROMPT[: BLOCK - 1]) == BLOCK - 1
        assert not pair.media[0].counts

    def test_it_had_less_than_was_said(self, pair: Pair) -> None:
        pair.prefill.ask(PROMPT[: 20 * BLOCK])
        request = pair.prefill.engine.add(PROMPT, 1)
        pair.prefill.engine.abort(request.request_id)
        pair.prefill.engine.drain(500)
        assert pair.ask(**of(PROMPT, request)) == len(PROMPT) - 20 * BLOCK
        assert pair.counted("unused_hand_offs") == {Unused.TOO_SHORT: 1}

    def test_what_the_peer_keeps_is_released_whatever_happens(self, pair: Pair) -> None:
        for steps in range(4):
            request = pair.send(tokens(30 * BLOCK, first=20 + steps))
            for _ in range(steps):
                pair.decode.engine.step()
            pair.decode.engine.abort(request.request_id)
            pair.decode.engine.drain(500)
            tip = bytes.fromhex(tip_of(request.block_hashes[29]))
            assert [media.released.pop() for media in pair.media] == [tip] * len(pair.media)


class TestWhatDoesNotArrive:
    def test_exactly_the_missing_tokens_are_computed(self, pair: Pair) -> None:
        """The connection is lost after some of it, on one rank."""
        pair.prefill.ask()
        medium = pair.media[-1]
        moved = medium._get
        left = [40]

        def get(job: MediumJob, index: int) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the connection is lost")
            return moved(job, index)

        medium._get = get  # type: ignore[method-assign]
        assert pair.ask() == len(PROMPT) - 40 * BLOCK
        check_pool(pair.decode.engine)
        assert pair.counted("unused_hand_offs") == {Unused.FAILED: 1}
        del medium._get
        forget_gpu(pair.decode.engine)
        assert pair.ask() == REST

    def test_a_peer_that_dies_is_not_waited_for(self, pair: Pair) -> None:
        pair.prefill.ask()
        for medium in pair.media:
            medium.disturb = lambda job: Unused.UNREACHABLE if job.verb is Verb.GET else None
        assert pair.ask() == len(PROMPT)
        assert pair.counted("unused_hand_offs") == {Unused.UNREACHABLE: 1}


class TestWeights:
    def test_after_a_reset_peers_have_nothing(self, pair: Pair) -> None:
        pair.prefill.ask()
        assert pair.decode.engine.reset()
        assert pair.ask() == len(PROMPT)
        assert pair.counted("unused_hand_offs") == {Unused.OTHER_WEIGHTS: 1}
        assert not pair.media[0].counts, "nobody is asked"


def test_two_that_do_not_fit_together_do_not_wait_for_each_other() -> None:
    """Each brings what there is room for."""
    pair = Pair(peers=Peers(pool_share=0.25))
    prompts = [tokens(63 * BLOCK + 2, first=first) for first in (40, 41)]
    pair.prefill.ask(prompts[0])
    requests = [pair.prefill.engine.add(prompts[1], 1), *(pair.send(each) for each in prompts)]
    pair.both(lambda: all(each.is_finished() for each in requests))
    assert pair.computed[requests[1].request_id] + pair.computed[requests[2].request_id] < len(PROMPT)
    pair.end()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("model", list(MODELS))
def test_models_of_any_kind(model: str, replicas: int) -> None:
    groups = MODELS[model]
    settings = {"groups": groups, "gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "replicas": replicas}
    pair = Pair(2, model=model, **settings)
    prompt = tokens(150)
    assert pair.prefill.ask(prompt) == 150
    forget_gpu(pair.prefill.engine)
    restored = pair.prefill.ask(prompt)
    assert pair.ask(prompt) == restored
    again = tokens(150, first=3)
    request, fetched = pair.prefill.engine.add(again, 1), pair.send(again)
    pair.both(fetched.is_finished, 3)
    pair.both(request.is_finished)
    assert pair.computed[fetched.request_id] == restored
    pair.end()
