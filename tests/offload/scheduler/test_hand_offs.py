"""What is handed off: all of it is stored, it stays until its lease is over, and clients are told so."""

import pytest

from allocator import hash_chain
from offload.fleet_config import FleetConfig, Role
from offload.messages import WorkerReport
from offload.scheduler.hand_offs import Refusal
from offload.scheduler.hints import RequestHints
from offload.scheduler.tiers.names import name_of
from offload.transfer_params import KVTransferParams, tip_of
from tests.offload.scheduler.serving import BLOCK, Serving, Sizes

PEER = b"12345678"
HAND_OFF = KVTransferParams(do_remote_decode=True)


def fleet(role: str = "prefill", share: float = 0.5) -> FleetConfig:
    return FleetConfig(role=Role(role), listen="127.0.0.1:7100", lease_share=share)


def serving(role: str = "prefill", share: float = 0.5, peer: bytes | None = PEER, **sizes: int) -> Serving:
    return Serving(Sizes(**{"num_blocks": 32, "num_slots": 64, **sizes}, fleet=fleet(role, share), peer=peer))  # type: ignore[arg-type]


def run(made: Serving, num_steps: int = 1, *, ends: bool = True) -> None:
    """Steps at whose ends all copies end, or none."""
    for _ in range(num_steps):
        if ends:
            made.ranks.end_all()
        made.step()
        made.check()


def depth(made: Serving, prompt: list[int]) -> int:
    return made.side.allocator.resident_depth(hash_chain(prompt, BLOCK))


def prompts(num: int, num_tokens: int) -> list[list[int]]:
    return [[1000 * index + token for token in range(num_tokens)] for index in range(num)]


@pytest.mark.parametrize(
    ("role", "params", "is_handed_off"),
    [
        ("prefill", None, True),
        ("prefill", HAND_OFF, True),
        ("both", None, False),
        ("both", HAND_OFF, True),
        ("decode", None, False),
        ("decode", HAND_OFF, False),
    ],
)
def test_the_role_says_whose_prompts_are_handed_off(
    role: str, params: KVTransferParams | None, is_handed_off: bool
) -> None:
    made = serving(role)
    request = made.send(range(9), [7], params=params)
    run(made, 3)
    assert (request.request_id in made.told) is is_handed_off
    assert made.side.allocator.leases.num_slots == 4 * is_handed_off
    made.drain()
    assert made.side.allocator.leases.num_slots == 0


def test_the_client_is_told_where_it_is_and_how_far_it_goes() -> None:
    made = serving()
    request = made.send(range(9), [7, 8, 9, 10])
    run(made, 6)
    life = made.side._lasting.life  # type: ignore[union-attr]
    assert life is not None
    assert made.told[request.request_id] == KVTransferParams(
        do_remote_prefill=True,
        peer=PEER.hex(),
        epoch=life.epoch.hex(),
        tokens=8,
        tip=tip_of(hash_chain(range(8), BLOCK)[-1]),
    )


def test_a_burst_is_stored_whole_while_copies_are_slow_and_new_prompts_wait() -> None:
    """Blocks of hand-offs have nearly all of the GPU; what is new waits for them, and displaces none."""
    made = serving(num_blocks=16, num_slots=128, step_tokens=64)
    sent = prompts(8, 8)
    for prompt in sent:
        made.send(prompt, [7])
    for _ in range(20):
        for _ in range(3):
            run(made, ends=False)
        run(made)
    assert not made.waiting and not made.running
    assert [depth(made, prompt) for prompt in sent] == [4] * len(sent)
    assert made.metrics["unstored_blocks_gave_way"] == 0
    assert len([told for told in made.told.values() if told.tokens == 8]) == len(sent)


def test_without_a_role_such_a_burst_gives_way() -> None:
    """The test above can fail."""
    made = Serving(Sizes(num_blocks=16, num_slots=128, step_tokens=64))
    sent = prompts(8, 8)
    for prompt in sent:
        made.send(prompt, [7])
    for _ in range(20):
        for _ in range(3):
            run(made, ends=False)
        run(made)
    assert sum(depth(made, prompt) for prompt in sent) < 4 * len(sent)


def test_what_the_pool_has_already_is_leased() -> None:
    made = serving()
    made.send(range(8), [7])
    run(made, 4)
    made.now += 100
    made.step()
    assert made.side.allocator.leases.num_slots == 0
    warm = made.send(range(8), [8])
    run(made, 4)
    assert made.told[warm.request_id].tokens == 8
    assert made.side.allocator.leases.num_slots == 4


def test_what_only_the_gpu_has_is_stored_and_leased() -> None:
    made = serving("both")
    made.send(range(8), [7], RequestHints(store=False))
    run(made, 4)
    assert depth(made, list(range(8))) == 0
    warm = made.send(range(8), [8], params=HAND_OFF)
    run(made, 4)
    assert made.told[warm.request_id].tokens == 8
    assert depth(made, list(range(8))) == 4


def test_what_was_evicted_while_the_request_ran_is_stored_again_at_its_end() -> None:
    made = serving(num_slots=16, share=1.0)
    request = made.send(range(8), range(100, 109))
    run(made, 3)
    assert depth(made, list(range(8))) == 4
    made.side.allocator.evict(16)
    assert depth(made, list(range(8))) == 0
    run(made, 12)
    assert made.told[request.request_id].tokens == 8
    assert depth(made, list(range(8))) == 4


def test_leased_blocks_stay_and_are_ordinary_cache_afterwards() -> None:
    made = serving(num_slots=16)
    made.send(range(8), [7])
    run(made, 4)
    made.now += 59
    made.side.allocator.evict(16)
    assert depth(made, list(range(8))) == 4
    made.now += 1
    made.step()
    assert depth(made, list(range(8))) == 4  # still there
    made.side.allocator.evict(16)
    assert depth(made, list(range(8))) == 0
    assert made.metrics["expired_leases"] == 1


def test_a_lease_ends_when_a_peer_has_it_all() -> None:
    made = serving()
    for _ in range(2):
        made.send(range(8), [7])
    run(made, 5)
    name = name_of(hash_chain(range(8), BLOCK)[-1])
    assert len(made.side.stores.hand_offs.leases) == 2
    made.side.receive(WorkerReport(released=[name, b"?" * 32]), set())
    assert len(made.side.stores.hand_offs.leases) == 1
    assert made.side.allocator.leases.num_slots == 4
    made.side.receive(WorkerReport(released=[name, name]), set())
    made.check()
    assert made.side.allocator.leases.num_slots == 0
    assert made.metrics["expired_leases"] == 0


def test_a_shared_beginning_is_leased_once() -> None:
    made = serving(num_slots=40, share=0.5, step_tokens=64)
    for index in range(8):
        made.send([*range(20), 100 + index, 200 + index], [7])
    run(made, 12)
    assert [told.tokens for told in made.told.values()] == [22] * 8
    assert made.side.allocator.leases.num_slots == 10 + 8


def test_beyond_the_share_hand_offs_are_refused_and_stored_as_anything_else() -> None:
    made = serving(num_slots=16, share=0.5)
    sent = prompts(3, 8)
    requests = [made.send(prompt, [7]) for prompt in sent]
    run(made, 8)
    told = [made.told[request.request_id] for request in requests]
    assert [each.refused for each in told] == [None, None, Refusal.FULL.value]
    assert made.side.allocator.leases.num_slots == 8
    assert made.metrics["refused_hand_offs"] == 1
    assert [depth(made, prompt) for prompt in sent] == [4, 4, 4]
    made.now += 60
    again = made.send(sent[2], [8])
    run(made, 4)
    assert made.told[again.request_id].tokens == 8


def test_hand_offs_take_the_place_of_what_is_worth_more() -> None:
    made = Serving(Sizes(num_blocks=32, num_slots=16, fleet=fleet("both", 1.0), peer=PEER, policy="lru"))
    made.side.allocator._policy._max_protected = 16  # type: ignore[attr-defined]
    high = RequestHints(priority="high")
    made.send(range(5000, 5032), [7], high)
    run(made, 6)
    request = made.send(range(16), [7], params=HAND_OFF)
    run(made, 6)
    assert made.told[request.request_id].tokens == 16
    assert depth(made, list(range(16))) == 8


def test_what_is_pinned_leaves_no_room() -> None:
    made = Serving(Sizes(num_blocks=64, num_slots=16, fleet=fleet("both", 1.0), peer=PEER))
    made.side.allocator._policy._max_protected = 16  # type: ignore[attr-defined]
    made.send(range(5000, 5024), [7], RequestHints(pin_seconds=1000.0))
    run(made, 6)
    request = made.send(range(16), [7], params=HAND_OFF)
    run(made, 6)
    assert made.told[request.request_id].refused == Refusal.NO_ROOM.value
    assert made.side.allocator.leases.num_slots == 0


@pytest.mark.parametrize(
    ("refusal", "prompt", "hints", "peer"),
    [
        (Refusal.SHORT, [1], RequestHints(), PEER),
        (Refusal.UNWANTED, range(8), RequestHints(store=False), PEER),
        (Refusal.UNWANTED, range(8), RequestHints(max_offload_tokens=0), PEER),
        (Refusal.NOT_LISTENING, range(8), RequestHints(), None),
    ],
)
def test_clients_are_told_why_not(
    refusal: Refusal, prompt: list[int], hints: RequestHints, peer: bytes | None
) -> None:
    made = serving("both", peer=peer)
    request = made.send(prompt, [7], hints, params=HAND_OFF)
    run(made, 4)
    assert made.told == {request.request_id: KVTransferParams(refused=refusal.value)}
    made.drain()


def test_adapters_are_not_handed_off() -> None:
    made = serving()
    lora = type("Lora", (), {"lora_name": "a", "lora_int_id": 1, "load_inplace": False})()
    request = made.send(range(8), [7], lora=lora)
    run(made, 4)
    assert made.told[request.request_id].refused == Refusal.ADAPTER.value


def test_only_so_much_is_handed_off_as_may_be_stored() -> None:
    made = serving()
    request = made.send(range(8), [7], RequestHints(max_offload_tokens=5))
    run(made, 4)
    assert made.told[request.request_id].tokens == 4


def test_a_reset_ends_all_leases_and_hands_nothing_off_until_weights_have_a_name() -> None:
    made = serving()
    made.send(range(8), [7])
    run(made, 4)
    running = made.send(range(100, 108), [7, 8, 9, 10])
    run(made, 2)
    made.reset()
    made.check()
    assert len(made.side.stores.hand_offs.leases) == 0
    run(made, 6)
    assert made.told[running.request_id].refused == Refusal.RESET.value
    after = made.send(range(200, 208), [7])
    run(made, 4)
    assert made.told[after.request_id].refused == Refusal.RESET.value
    made.reset()
    made.side.weights.name("next")
    named = made.send(range(300, 308), [7])
    run(made, 4)
    assert made.told[named.request_id].tokens == 8
    made.drain()


def test_a_request_that_had_begun_before_a_reset_is_not_handed_off_after_it() -> None:
    """Even if all of it is computed with the new weights, and these have a name."""
    made = serving()
    running = made.send(range(8), [7, 8, 9])
    run(made, 2)
    made.preempt(running)
    made.reset()
    made.side.weights.name("next")
    run(made, 6)
    assert made.told[running.request_id].refused == Refusal.NOT_STORED.value
    assert made.side.allocator.leases.num_slots == 0
    made.drain()


def test_those_that_are_aborted_are_told_nothing_and_lease_nothing() -> None:
    made = serving()
    running = made.send(range(8), [7, 8, 9])
    waiting = made.send(range(100, 108), [7])
    run(made)
    made.abort(running)
    made.abort(waiting) if waiting in made.waiting or waiting in made.running else None
    made.check()
    assert running.request_id not in made.told
    assert made.side.allocator.leases.num_slots in (0, 4)
    made.drain()


def test_copies_that_hang_release_the_blocks_and_the_engine_goes_on() -> None:
    """Nothing waits for them for ever: they are given up, then new prompts have their blocks."""
    made = serving(num_blocks=8, num_slots=64)
    request = made.send(range(14), [7])
    made.step()
    made.step()
    assert request.request_id in made.told
    other = made.send(range(100, 114), [7])
    run(made, 2, ends=False)
    assert other in made.waiting  # for blocks that are held
    for copy in made.ranks.copies.values():
        made.ranks.hang(copy, 0)
    run(made, 4, ends=False)
    assert other not in made.waiting
    made.drain()
