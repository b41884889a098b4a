"""Engines that fetch from peers, with and without references, while these still compute."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from offload.peer_messages import Unused
from offload.peers_command import lines_of
from offload.scheduler.costs import TOKEN_SECONDS
from offload.scheduler.tiers.peer_fetches import PeerFetches
from offload.scheduler.tiers.tier import TierLimits
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings
from offload.testing.virtual.network import VirtualNetwork
from offload.testing.virtual.pair import VirtualFleet
from offload.transfer_params import KVTransferParams, tip_of
from offload.vllm.peers import FETCH, PROBE
from offload.worker.peers.shown import Shown
from tests.virtual.driver import forget_gpu, serve, step_until, tokens, watch
from tests.virtual.test_regions import BLOCK, OTHER, PROMPT, SLOTS, WHOLE, check_pool

REST = len(PROMPT) - WHOLE
STEP = 0.005


class Pair:
    """An engine that computes, and one that fetches from it."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        roles: tuple[str, ...] = ("prefill", "decode"),
        is_far: bool = True,
        **more: Any,
    ) -> None:
        defaults = {"cpu_slots": SLOTS, "gpu_blocks": 140, "num_ranks": num_ranks, "step_seconds": STEP}
        self.network = VirtualNetwork(is_far=is_far)
        settings = VirtualSettings(**{**defaults, "fleet": {"lease_share": 1.0}, **more})
        self.fleet = VirtualFleet(settings, roles, random.Random(0), network=self.network)
        self.counts: Counter[Any] = Counter()
        self.computed: dict[str, int] = {}
        self.released: list[bytes] = []
        for index in range(len(roles)):
            self.watch(index)

    def watch(self, index: int) -> None:
        """Look at an engine that has just begun."""
        engine = self.fleet.engines[index]
        if index == len(self.fleet.engines) - 1:
            self.computed = watch(engine)
            metrics, counts = engine.side.metrics, self.counts
            count = metrics.count

            def counted(name: str, amount: float = 1, route: Any = None) -> None:
                counts[name, route] += amount  # type: ignore[assignment]
                count(name, amount, route)

            metrics.count = counted  # type: ignore[method-assign]
        for shown in self.shown(index):
            release = shown.release

            def released(epoch: bytes, tip: bytes, release: Any = release) -> None:
                self.released.append(tip)
                release(epoch, tip)

            shown.release = released  # type: ignore[method-assign]

    def shown(self, index: int = 0) -> list[Shown]:
        """What ranks of an engine show."""
        found = [rank.side._listener for rank in self.fleet.engines[index].ranks if rank.side is not None]
        return [each.shown for each in found if each is not None and each.shown is not None]

    @property
    def prefill(self) -> VirtualEngine:
        return self.fleet.engines[0]

    @property
    def decode(self) -> VirtualEngine:
        return self.fleet.engines[-1]

    @property
    def fetches(self) -> PeerFetches:
        [found] = [flow for flow in self.decode.side.flows if isinstance(flow, PeerFetches)]
        return found

    def asked(self, what: str) -> int:
        """How often the last engine has asked, on its first rank: "probes" or "gets"."""
        medium = self.network.media[-len(self.decode.ranks)]
        return sum(getattr(status, what) for status in medium.statuses())

    def compute(self, prompt: list[int] = PROMPT) -> Any:
        """Have the first engine compute it."""
        return serve(self.prefill, prompt)

    def send(self, prompt: list[int] = PROMPT, **params: Any) -> Any:
        """Ask for it as a proxy does, with a reference to the first engine."""
        hints = KVTransferParams(**{**self.fleet.reference(0), **params}).to_dict()
        return self.decode.add(prompt, 1, hints=hints)

    def ask(self, prompt: list[int] = PROMPT, **params: Any) -> int:
        """Tokens that are computed for it."""
        request = self.send(prompt, **params)
        self.decode.drain(500)
        return self.computed[request.request_id]

    def plainly(self, prompt: list[int] = PROMPT) -> int:
        """The same without a reference."""
        return self.computed[serve(self.decode, prompt).request_id]

    def both(self, done: Callable[[], bool], every: int = 1, most: int = 1000) -> int:
        """Step both, the one that computes in one of so many turns. Returns how many there were."""
        for turn in range(most):
            if done():
                return turn
            if turn % every == 0:
                self.prefill.step()
            self.decode.step()
        raise AssertionError(f"nothing of the kind within {most} turns")

    def counted(self, name: str) -> dict[Any, float]:
        """Counts of the last engine, by label."""
        return {label: count for (each, label), count in self.counts.items() if each == name}

    @property
    def nbytes(self) -> float:
        """Fetched since the last look."""
        return self.counts.pop(("route_bytes", FETCH), 0)

    def end(self) -> None:
        self.fleet.come_to_rest()
        for engine in self.fleet.engines:
            check_pool(engine)
        self.fleet.close()


@pytest.fixture(params=[(1, True), (3, True), (3, False)], ids=["one rank", "three ranks", "one machine"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    num_ranks, is_far = request.param
    pair = Pair(num_ranks, is_far=is_far)
    yield pair
    pair.end()


def of(prompt: list[int], request: Any) -> dict[str, Any]:
    """What a prefill engine returns of it."""
    last = len(prompt) // BLOCK
    return {"tokens": last * BLOCK, "tip": tip_of(request.block_hashes[last - 1])}


def test_what_one_engine_computed_the_other_fetches(pair: Pair) -> None:
    pair.compute()
    assert pair.ask() == REST
    slot_bytes = pair.decode.settings.slot_bytes * len(pair.decode.ranks)
    assert pair.nbytes == WHOLE // BLOCK * slot_bytes
    assert pair.counted("received_hand_offs") == {None: 1} and not pair.counted("unused_hand_offs")
    assert pair.ask(OTHER) == len(OTHER)


def test_who_says_nothing_asks_all_once(pair: Pair) -> None:
    pair.compute()
    assert pair.plainly() == REST
    assert pair.asked("probes") == 1
    assert not pair.released and not pair.counted("received_hand_offs")


@pytest.mark.parametrize("positions", [1, 4, 16, 64])
def test_the_tail_is_fetched_whatever_an_extent_is(positions: int) -> None:
    pair = Pair(peer_extent=positions)
    pair.compute()
    assert pair.ask() == REST
    longer = [*PROMPT, *tokens(5 * BLOCK, first=9)]
    assert pair.ask(longer) == 5 * BLOCK + REST
    check_pool(pair.decode)
    pair.end()


def test_what_is_computed_meanwhile_is_fetched_meanwhile(pair: Pair) -> None:
    """Both engines are asked at once. What has come is on its way before the rest is computed."""
    request = pair.prefill.add(PROMPT, 1)
    fetched = pair.send()
    pair.both(lambda: request.num_computed_tokens > WHOLE // 2, 4)
    assert not fetched.is_finished() and pair.nbytes > 0
    turns = pair.both(request.is_finished, 4)
    assert turns < pair.both(fetched.is_finished, 4) + turns
    assert pair.computed[fetched.request_id] == REST
    assert pair.counted("received_hand_offs") == {None: 1}
    assert set(pair.released) == {request.block_hashes[62]}


def test_who_expects_what_never_comes_computes(pair: Pair) -> None:
    request = pair.send()
    began = pair.decode.clock()
    step_until(pair.decode, lambda: pair.computed.get(request.request_id, 0) > 0)
    waited = pair.decode.clock() - began
    assert waited <= 2 * WHOLE * TOKEN_SECONDS + 4 * STEP
    pair.decode.drain(500)
    assert pair.computed[request.request_id] == len(PROMPT)
    assert pair.counted("unused_hand_offs") == {Unused.LATE: 1}


def patient_pair(model: str = "") -> Pair:
    """The one that fetches waits for longer than a test lasts."""
    groups = MODELS[model] if model else ()
    fleet = {"lease_share": 1.0, "peer_wait_seconds": 100.0}
    pair = Pair(groups=groups, cpu_slots=4 * SLOTS, fleet=fleet)
    pair.plainly(OTHER)  # so that they know each other
    return pair


class TestWhoExpectsAPromptIsTold:
    """Nothing but the word of the peer, or its end, ends the wait."""

    @pytest.fixture(params=["", "window"])
    def patient(self, request: pytest.FixtureRequest) -> Iterator[Pair]:
        pair = patient_pair(request.param)
        yield pair
        pair.end()

    def turns(self, pair: Pair, request: Any) -> int:
        return pair.both(lambda: pair.computed.get(request.request_id, 0) > 0)

    def test_that_it_is_refused(self, patient: Pair) -> None:
        refused = patient.prefill.add(PROMPT, 1, hints={"cpu_offload_store": False})
        assert self.turns(patient, patient.send()) < 60
        patient.both(refused.is_finished)
        assert patient.counted("unused_hand_offs") == {Unused.REFUSED: 1}

    def test_that_it_went_away(self, patient: Pair) -> None:
        asked = patient.prefill.add(PROMPT, 1)
        request = patient.send()
        for _ in range(2):
            patient.prefill.step()
            patient.decode.step()
        patient.prefill.abort(asked.request_id)
        assert self.turns(patient, request) < 60
        assert patient.counted("unused_hand_offs") == {Unused.REFUSED: 1}

    def test_that_it_is_refused_no_longer(self, patient: Pair) -> None:
        serve(patient.prefill, PROMPT, hints={"cpu_offload_store": False})
        forget_gpu(patient.prefill)
        asked = patient.prefill.add(PROMPT, 1)
        patient.prefill.step()
        request = patient.send()
        patient.both(request.is_finished)
        assert asked.is_finished()
        assert patient.computed[request.request_id] < len(PROMPT) / 4
        assert patient.counted("received_hand_offs") == {None: 1}

    def test_by_nobody_that_another_request_for_it_is_refused(self, patient: Pair) -> None:
        """What was handed off is had, and its lease ends."""
        request = serve(patient.prefill, PROMPT)
        serve(patient.prefill, PROMPT, hints={"cpu_offload_store": False})
        assert patient.ask(PROMPT, **of(PROMPT, request)) < len(PROMPT) / 4
        assert len(patient.released) == 1
        assert patient.counted("unused_hand_offs") == {}
        assert patient.counted("received_hand_offs") == {None: 1}

    def test_that_there_is_no_room_for_leases(self) -> None:
        """It fetches what is there all the same, as nobody evicts it yet."""
        pair = Pair(fleet={"lease_share": 0.01, "peer_wait_seconds": 100.0})
        asked, request = pair.prefill.add(PROMPT, 1), pair.send()
        pair.both(request.is_finished)
        assert asked.is_finished()
        assert pair.computed[request.request_id] < len(PROMPT)
        pair.end()

    @pytest.mark.parametrize("ends", ["dies", "is cut off"])
    def test_by_nobody_when_the_peer_is_gone(self, patient: Pair, ends: str) -> None:
        patient.prefill.add(PROMPT, 1)
        patient.prefill.step()  # so that it has a life, which the reference names
        request = patient.send()
        for _ in range(3):
            patient.prefill.step()
            patient.decode.step()
        if ends == "dies":
            patient.fleet.kill(0)
        else:
            patient.fleet.cut_off(0)
        assert self.turns(patient, request) < 60
        [reason] = patient.counted("unused_hand_offs")
        assert reason in (Unused.UNREACHABLE, Unused.OLD_EPOCH, Unused.NOT_THERE)
        patient.fleet.reach(0)


def test_patience_begins_anew_with_each_progress() -> None:
    """All of it takes several times as long as somebody waits for a part of it."""
    pair = Pair(chunk=2 * BLOCK)
    request, fetched = pair.prefill.add(PROMPT, 1), pair.send()
    turns = pair.both(fetched.is_finished, 8)
    assert turns * STEP > 4 * 2 * WHOLE * TOKEN_SECONDS / 2
    assert pair.computed[fetched.request_id] < WHOLE // 4, "patience is shorter, the less is missing"
    pair.both(request.is_finished)
    pair.end()


def test_patience_is_as_long_as_the_peer_takes_for_a_chunk() -> None:
    """Else the last of them would be computed: there is little missing, and it takes as long as others."""
    pair = Pair(chunk=2 * BLOCK)
    request, fetched = pair.prefill.add(PROMPT, 1), pair.send()
    pair.both(fetched.is_finished, 8)
    assert request.is_finished()
    assert pair.computed[fetched.request_id] == REST
    pair.end()


def test_a_peer_that_stops_is_not_waited_for_longer_than_all_takes_to_compute() -> None:
    pair = Pair(chunk=2 * BLOCK)
    pair.prefill.add(PROMPT, 1)
    fetched = pair.send()
    for turn in range(100):
        if turn % 20 == 0:
            pair.prefill.step()
        pair.decode.step()
    began = pair.decode.clock()
    step_until(pair.decode, fetched.is_finished)
    assert pair.decode.clock() - began < 2 * WHOLE * TOKEN_SECONDS + 50 * STEP
    assert BLOCK < pair.computed[fetched.request_id] < WHOLE
    pair.end()


def test_nobody_is_asked_in_each_step(pair: Pair) -> None:
    """Nor is anything looked for in the pool."""
    looks = []
    allocator = pair.decode.side.allocator
    original = allocator.resident_depth

    def resident_depth(chain: Any) -> int:
        looks.append(len(chain))
        return original(chain)

    allocator.resident_depth = resident_depth  # type: ignore[method-assign]
    requests = [pair.send(tokens(60 * BLOCK, first=first)) for first in range(5, 25)]
    for _ in range(20):
        pair.decode.step()
    seconds, num_asked = 20 * STEP, pair.asked("probes")
    assert num_asked <= len(requests) * (1 + seconds / STEP / 2.5) + 1
    for request in requests:
        pair.decode.abort(request.request_id)


class TestReferences:
    def test_how_far_is_believed(self, pair: Pair) -> None:
        request = pair.prefill.add(PROMPT, 1)
        pair.prefill.drain(500)
        assert pair.ask(**of(PROMPT, request)) == REST
        assert pair.counted("received_hand_offs") == {None: 1}

    def test_another_prompt_is_no_reference(self, pair: Pair) -> None:
        """What is there is found all the same."""
        request = pair.prefill.add(PROMPT, 1)
        pair.prefill.drain(500)
        assert pair.ask(OTHER, **of(PROMPT, request)) == len(OTHER)
        assert pair.counted("unused_hand_offs") == {Unused.OTHER_PROMPT: 1}
        assert pair.ask(**of(PROMPT, request) | {"tip": "0" * 32}) == REST
        assert not pair.released

    @pytest.mark.parametrize(
        ("life", "reason"),
        [
            ({"peer": "c" * 16}, Unused.UNKNOWN_PEER),
            ({"epoch": "c" * 16}, Unused.OLD_EPOCH),
        ],
    )
    def test_what_is_void_is_ignored(self, pair: Pair, life: dict[str, str], reason: str) -> None:
        pair.compute()
        assert pair.ask(**life) == REST, "all are asked then"
        assert pair.counted("unused_hand_offs") == {reason: 1}
        assert pair.ask(OTHER, **life) == len(OTHER)

    def test_what_is_void_is_not_waited_for(self, pair: Pair) -> None:
        """A real clock is later at every look."""
        pair.compute()
        directory = pair.fetches._directory
        clock, looks = directory._clock, count(1)
        directory._clock = lambda: clock() + 1e-9 * next(looks)
        assert pair.ask(epoch="c" * 16) == REST
        assert pair.counted("unused_hand_offs") == {Unused.OLD_EPOCH: 1}

    def test_whichever_life_it_is_in(self, pair: Pair) -> None:
        pair.compute()
        assert pair.ask(epoch=None) == REST

    def test_a_prompt_below_a_block_is_answered_at_once(self, pair: Pair) -> None:
        assert pair.ask(PROMPT[: BLOCK - 1]) == BLOCK - 1
        assert not pair.asked("probes")

    def test_it_had_less_than_was_said(self, pair: Pair) -> None:
        pair.compute(PROMPT[: 20 * BLOCK])
        request = pair.prefill.add(PROMPT, 1)
        pair.prefill.abort(request.request_id)
        pair.prefill.drain(500)
        assert pair.ask(**of(PROMPT, request)) == len(PROMPT) - 20 * BLOCK
        assert pair.counted("unused_hand_offs") == {Unused.TOO_SHORT: 1}

    def test_what_the_peer_keeps_is_released_whatever_happens(self, pair: Pair) -> None:
        for steps in range(4):
            request = pair.send(tokens(30 * BLOCK, first=20 + steps))
            for _ in range(steps):
                pair.decode.step()
            pair.decode.abort(request.request_id)
            pair.decode.drain(500)
            assert pair.released == [request.block_hashes[29]] * len(pair.decode.ranks)
            pair.released.clear()

    def test_a_lease_ends_though_the_reference_names_no_life(self, pair: Pair) -> None:
        request, leases = pair.prefill.add(PROMPT, 1), pair.prefill.side.stores.hand_offs.leases
        step_until(pair.prefill, request.is_finished)
        assert len(leases) == 1
        fetched = pair.send(**of(PROMPT, request) | {"epoch": None})
        pair.both(fetched.is_finished)
        for _ in range(5):
            pair.decode.add([2], 1)
            pair.decode.step()
        pair.prefill.add([1], 1)
        step_until(pair.prefill, lambda: not len(leases), 5)
        assert pair.computed[fetched.request_id] == REST

    def test_a_release_that_is_repeated_harms_nobody(self, pair: Pair) -> None:
        """As when the connection is lost before it is answered. All its leases end, and it stays."""
        request = pair.prefill.add(PROMPT, 1)
        step_until(pair.prefill, request.is_finished)
        again = pair.prefill.add(PROMPT, 1)
        step_until(pair.prefill, again.is_finished)
        leases = pair.prefill.side.stores.hand_offs.leases
        assert len(leases) == 2
        shown, name = pair.shown()[0], request.block_hashes[62]
        for _ in range(3):
            shown.release(shown.life.epoch, name)
        pair.prefill.add([1], 1)
        step_until(pair.prefill, lambda: not len(leases), 5)
        assert pair.ask(**of(PROMPT, request)) == REST


class TestWhatDoesNotArrive:
    @pytest.mark.parametrize("num_bytes", [0, 5000, 6500])
    def test_exactly_the_missing_tokens_are_computed(self, pair: Pair, num_bytes: int) -> None:
        """The connection is lost after some of it."""
        pair.compute()
        pair.plainly(OTHER)  # so that they know each other
        until = pair.network.counts["bytes"] + num_bytes

        def lose() -> None:
            if pair.network.counts["bytes"] > until:
                pair.fleet.cut_off(0)

        pair.network.during = lose
        computed = pair.ask()
        come = [status.nbytes // 128 for medium in pair.network.media for status in medium.statuses()]
        assert len(PROMPT) - computed == min(come) * BLOCK
        assert min(come) > 0 or num_bytes < 5000 or len(come) > 1
        check_pool(pair.decode)
        [reason] = pair.counted("unused_hand_offs")
        assert reason in (Unused.UNREACHABLE, Unused.NOT_THERE)
        pair.network.during = lambda: None
        pair.fleet.reach(0)
        forget_gpu(pair.decode)
        pair.decode.history.step += 2000
        assert pair.ask() == REST

    def test_a_peer_that_dies_is_not_waited_for(self, pair: Pair) -> None:
        pair.compute()
        pair.plainly(OTHER)
        reference = pair.fleet.reference(0)
        pair.fleet.kill(0)
        began = pair.decode.clock()
        assert pair.ask(**reference) == len(PROMPT)
        assert pair.decode.clock() - began < 20 * STEP
        assert sum(pair.counted("unused_hand_offs").values()) == 1


def slot_of(pair: Pair, position: int = 10) -> int:
    """Of a position of ``PROMPT``, in the first engine's pool."""
    chain = next(iter(pair.prefill.side.allocator._tree.nodes())).hashes
    return int(pair.prefill.side.allocator.lookup(list(chain)).slots[position, 0])


def test_what_one_rank_lacks_nobody_has() -> None:
    pair = Pair(3)
    pair.compute()
    slot, tables = slot_of(pair), pair.shown()[2].holdings._tables
    before, tables.fills[slot] = tables.fills[slot], -1
    assert pair.ask() == len(PROMPT) - 10 * BLOCK
    tables.fills[slot] = before
    pair.end()


@pytest.mark.parametrize("is_far", [True, False])
def test_a_slot_that_is_filled_anew_while_it_is_sent_is_missed(is_far: bool) -> None:
    """Its bytes are as they were, so its generation alone can tell."""
    pair = Pair(is_far=is_far)
    pair.compute()
    pair.plainly(OTHER)
    slot, tables = slot_of(pair), pair.shown()[0].holdings._tables
    before, shown = int(tables.fills[slot]), pair.shown()[0]
    pieces = shown.pieces

    def pieces_of(rows: Any) -> Any:
        found = pieces(rows)
        if slot in rows.slots:
            tables.fills[slot] = 1 << 30
        return found

    shown.pieces = pieces_of  # type: ignore[method-assign]
    if not is_far:
        tables.fills[slot] = 1 << 30
    computed = pair.ask()
    assert len(PROMPT) - 10 * BLOCK <= computed
    tables.fills[slot] = before
    del shown.pieces
    pair.end()


def test_in_a_batch_each_computes_what_has_not_arrived() -> None:
    """Those of which all has arrived go on at once; nobody waits for those of which some was lost."""
    pair = Pair(
        cpu_slots=600,
        gpu_blocks=300,
        max_num_seqs=8,
        chunk=1024,
        peer_limits=TierLimits(least_tokens=1, pool_share=1.0),
    )
    prompts = [tokens(24 * BLOCK + 1, first=first) for first in range(50, 58)]
    requests = [pair.compute(each) for each in prompts]
    lost = {1: 0, 4: 12, 6: 23}
    allocator = pair.prefill.side.allocator
    fills = pair.shown()[0].holdings._tables.fills
    before = fills.copy()
    for index, position in lost.items():
        slot = allocator.lookup(requests[index].block_hashes).slots[position, 0]
        fills[slot] = -1
    sent = [
        pair.send(prompt, **of(prompt, request)) for prompt, request in zip(prompts, requests, strict=True)
    ]
    ended: dict[str, int] = {}
    for turn in range(100):
        pair.decode.step()
        for request in sent:
            if request.is_finished():
                ended.setdefault(request.request_id, turn)
    computed = [pair.computed[request.request_id] for request in sent]
    assert computed == [(24 - lost.get(index, 24)) * BLOCK + 1 for index in range(8)]
    arrived = [ended[request.request_id] for index, request in enumerate(sent) if index not in lost]
    assert max(arrived) <= max(ended.values())
    fills[:] = before
    pair.end()


class TestWeights:
    def test_after_a_reset_peers_have_nothing(self, pair: Pair) -> None:
        pair.compute()
        assert pair.decode.reset()
        assert pair.ask() == len(PROMPT)
        assert pair.counted("unused_hand_offs") == {Unused.OTHER_WEIGHTS: 1}
        assert not pair.asked("probes"), "nobody is asked"


def test_a_step_looks_at_a_few_of_many_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them get what the peer has, nevertheless."""
    num_blocks, many = 4, 100
    pair = Pair(cpu_slots=2 * many * num_blocks, gpu_blocks=140, max_num_seqs=4)
    prompts = [tokens(num_blocks * BLOCK + 1, first=1000 * number + 10) for number in range(many)]
    for prompt in prompts:
        pair.compute(prompt)
    looks, most = 0, 0
    go_on, plan = PeerFetches._go_on, PeerFetches.plan

    def counted(fetches: PeerFetches, *arguments: Any) -> None:
        nonlocal looks
        looks += 1
        go_on(fetches, *arguments)

    def planned(fetches: PeerFetches, *arguments: Any) -> Any:
        nonlocal looks, most
        looks = 0
        orders = plan(fetches, *arguments)
        most = max(most, looks)
        return orders

    monkeypatch.setattr(PeerFetches, "_go_on", counted)
    monkeypatch.setattr(PeerFetches, "plan", planned)
    requests = [pair.send(prompt) for prompt in prompts]
    pair.decode.drain(2000)
    assert [pair.computed[each.request_id] for each in requests] == [1] * many
    assert 8 < most <= 64, f"a step has looked at {most} of {many}"
    pair.end()


def test_two_that_do_not_fit_together_do_not_wait_for_each_other() -> None:
    """Each brings what there is room for."""
    pair = Pair(peer_limits=TierLimits(least_tokens=1, pool_share=0.25))
    prompts = [tokens(63 * BLOCK + 2, first=first) for first in (40, 41)]
    pair.compute(prompts[0])
    requests = [pair.prefill.add(prompts[1], 1), *(pair.send(each) for each in prompts)]
    pair.both(lambda: all(each.is_finished() for each in requests))
    assert pair.computed[requests[1].request_id] + pair.computed[requests[2].request_id] < len(PROMPT)
    pair.end()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("model", list(MODELS))
def test_models_of_any_kind(model: str, replicas: int) -> None:
    groups = MODELS[model]
    settings = {"groups": groups, "gpu_blocks": 300, "cpu_slots": 600, "chunk": 64, "replicas": replicas}
    pair = Pair(2, **settings)
    prompt = tokens(150)
    pair.compute(prompt)
    forget_gpu(pair.prefill)
    computed = watch(pair.prefill)
    restored = computed[pair.compute(prompt).request_id]
    assert pair.ask(prompt) == restored
    again = tokens(150, first=3)
    request, fetched = pair.prefill.add(again, 1), pair.send(again)
    pair.both(fetched.is_finished, 3)
    pair.both(request.is_finished)
    assert pair.computed[fetched.request_id] == restored
    pair.end()


def test_how_peers_stand_is_told(pair: Pair) -> None:
    """By rank and peer; counts are in metrics, and what operators see adds up over the ranks."""
    pair.compute()
    assert pair.ask() == REST
    for rank in pair.decode.ranks:
        rank.side._engine._lanes[PROBE].clock = lambda: 1e9  # type: ignore[union-attr]
    pair.plainly(OTHER)
    [below] = pair.decode.side.below
    assert below.peers is not None
    [told] = below.peers()
    num_ranks = len(pair.decode.ranks)
    assert told["address"] == pair.fleet.address(0).shown and told["num_ranks"] == num_ranks
    assert told["state"] == "connected" and told["peer"] == pair.fleet.reference(0)["peer"]
    assert sum(pair.counted("peer_bytes").values()) == told["num_bytes"] > 0
    assert pair.decode.side.metrics.gauges[f"peer_connected:{told['address']}"] == 1
    for rank in pair.prefill.ranks:
        rank.side._listener._told_at = 0.0  # type: ignore[union-attr]
    pair.prefill.add(OTHER, 1)
    pair.prefill.drain(500)
    [asker] = pair.prefill.side.askers.told()
    assert (asker["host"], asker["peer"]) == ("", "")
    assert asker["is_near"] is (told["transport"] == "memory")
    assert 0 < asker["num_bytes"] <= told["num_bytes"] and asker["num_questions"] > 0
    found = {"engine": "one", "leases": {"num_leases": 2}, "peers": [told], "askers": [asker], "as_of": 90.0}
    [first, second, third] = lines_of(found, now=150.4)
    assert "2 leases" in first and "as of 60 seconds ago" in first
    [first, *_] = lines_of({**found, "as_of": None}, now=150.4)
    assert "no step yet" in first
    assert "connected by" in second and f"{num_ranks} connections" in third
