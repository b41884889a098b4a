"""Prefill engines under vLLM's real scheduler: what clients are told, and what they may say."""

import json
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.fleet_config import Role
from offload.messages import STORE
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import MODELS, VirtualEngine, run_seed
from offload.transfer_params import KVTransferParams, tip_of
from tests.seeds import OTHER_SEEDS
from tests.virtual.driver import Engines, come_to_rest, finish, forget_gpu, hold, release, serve, tokens, warm

BLOCK = 4
HAND_OFF = {"do_remote_decode": True}


def fleet(role: str = "prefill", **more: Any) -> dict[str, Any]:
    return {"role": role, "listen": "127.0.0.1:7100", "lease_share": 0.5, **more}


def responses(engine: VirtualEngine) -> dict[str, dict[str, Any]]:
    """What vLLM puts into the responses of requests that end from now on."""
    told: dict[str, dict[str, Any]] = {}
    update = engine.scheduler.update_from_output

    def watched(*arguments: Any) -> Any:
        outputs = update(*arguments)
        for each in outputs.values():
            for output in each.outputs:
                if output.kv_transfer_params is not None:
                    told[output.request_id] = output.kv_transfer_params
        return outputs

    engine.scheduler.update_from_output = watched
    return told


def depth(engine: VirtualEngine, request: Request) -> int:
    return engine.side.allocator.resident_depth(request.block_hashes)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("asks", [True, False])
def test_clients_are_told_exactly_of_what_is_leased(engines: Engines, role: Role, asks: bool) -> None:
    engine = engines(fleet=fleet(role))
    told = responses(engine)
    request = finish(engine, tokens(21), hints=HAND_OFF if asks else None)
    is_handed_off = role is Role.PREFILL or (role is Role.BOTH and asks)
    assert engine.side.allocator.leases.num_slots == 5 * is_handed_off
    life = engine.side._lasting.life  # type: ignore[union-attr]
    assert life is not None
    expected = {
        "do_remote_prefill": True,
        "cpu_offload_from_v": 1,
        "cpu_offload_from_peer": life.peer.hex(),
        "cpu_offload_from_epoch": life.epoch.hex(),
        "cpu_offload_from_tokens": 20,
        "cpu_offload_from_tip": tip_of(request.block_hashes[4]),
        "remote_prefill_cached_tokens": 0,  # vLLM's own
    }
    assert told == ({request.request_id: expected} if is_handed_off else {})
    assert len(json.dumps(told.get(request.request_id))) <= 300
    come_to_rest(engine)
    assert depth(engine, request) == 5


def test_a_prefill_engine_that_has_all_of_it_already_says_so(engines: Engines) -> None:
    """On the GPU alone, in the pool alone, or in both: nothing is computed, and all of it is leased."""
    engine = engines(fleet=fleet("both"), gpu_blocks=64)
    told = responses(engine)
    on_gpu, in_pool, in_both = tokens(24), tokens(24, 1), tokens(24, 2)
    serve(engine, on_gpu, hints={"cpu_offload_store": False})
    warm(engine, in_pool)
    serve(engine, on_gpu, hints={"cpu_offload_store": False})
    serve(engine, in_both)
    for prompt in (on_gpu, in_pool, in_both):
        request = finish(engine, prompt, hints=HAND_OFF)
        assert told[request.request_id]["cpu_offload_from_tokens"] == 24
        assert engine.side.allocator.leases.num_slots == 6
        come_to_rest(engine)
        assert depth(engine, request) == 6


def test_new_prompts_wait_for_blocks_and_displace_nothing(engines: Engines) -> None:
    engine = engines(fleet=fleet(), gpu_blocks=17, cpu_slots=128, chunk=64)
    hold(engine, STORE)
    first = finish(engine, tokens(60))
    second = engine.add(tokens(60, 1), 1)
    for _ in range(20):
        engine.step()
        assert not second.num_computed_tokens, "blocks of a hand-off were given to others"
    release(engine)
    come_to_rest(engine)
    assert second.is_finished()
    assert depth(engine, first) == depth(engine, second) == 15


def test_a_burst_of_answers_beside_hand_offs_is_served(engines: Engines) -> None:
    """Requests that decode are not starved by what is handed off, however slow copies are."""
    engine = engines(
        fleet=fleet("both"), gpu_blocks=33, cpu_slots=256, chunk=64, copies=CopySchedule(longest_delay=12)
    )
    requests = [
        engine.add(tokens(40, index), 20, hints=HAND_OFF if index % 2 else None) for index in range(12)
    ]
    come_to_rest(engine)
    assert all(request.is_finished() for request in requests)
    handed_off = [request for index, request in enumerate(requests) if index % 2]
    assert [depth(engine, request) >= 10 for request in handed_off] == [True] * 6
    assert engine.counts["handed off"] == 6


HOSTILE: list[Any] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1, "remote_engine_id": "x"},
    {"do_remote_prefill": True, "remote_block_ids": [], "remote_num_tokens": "9"},
    {"do_remote_prefill": True, "remote_engine_id": [[]], "remote_request_id": {}},
    {"do_remote_decode": "yes"},
    {"do_remote_decode": True, "cpu_offload_from_v": 1},
    {"do_remote_decode": True, "cpu_offload_from_v": 1, "cpu_offload_from_peer": "10.0.0.1:80"},
    {"cpu_offload_from_v": 2**63 - 1, "cpu_offload_from_tokens": -1, "cpu_offload_from_tip": None},
    {"cpu_offload_from_v": [1], "cpu_offload_from_peer": {"a": []}, "cpu_offload_refused": 7},
    {"cpu_offload_refused": "x" * 10_000, 3: 4, None: 5},
    {"cpu_offload_priority": 7, "cpu_offload_lease": 5, "do_remote_decode": None},
]
"""Objects: vLLM itself ends with anything else."""


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("overlapped", [False, True])
def test_whatever_clients_say_is_served(engines: Engines, role: Role, overlapped: bool) -> None:
    engine = engines(fleet=fleet(role), overlapped=overlapped, cpu_slots=256)
    for index, said in enumerate(HOSTILE):
        request = serve(engine, tokens(20, index), 3, hints=said)
        assert request.num_output_tokens == 3
        forget_gpu(engine)
        assert serve(engine, tokens(20, index), 3, hints=said).num_output_tokens == 3
    engine.audit.check_drained()


def test_a_request_that_is_aborted_leaves_nothing(engines: Engines) -> None:
    engine = engines(fleet=fleet())
    told = responses(engine)
    running, waiting = engine.add(tokens(40), 30), engine.add(tokens(40, 1), 30)
    for _ in range(4):
        engine.step()
    for request in (running, waiting):
        engine.abort(request.request_id)
    engine.drain()
    engine.audit.check_drained()
    assert not told


@pytest.mark.parametrize("model", ["window", "state"])
def test_what_is_handed_off_of_a_hybrid_ends_at_a_checkpoint(engines: Engines, model: str) -> None:
    model = next(name for name in MODELS if model in name)
    engine = engines(
        fleet=fleet(lease_share=1.0), groups=MODELS[model], gpu_blocks=200, cpu_slots=400, chunk=64
    )
    told = responses(engine)
    request = finish(engine, tokens(100))
    size = engine.side.block_size
    num_tokens = told[request.request_id]["cpu_offload_from_tokens"]
    assert num_tokens % size == 0 and 99 - size < num_tokens < 100
    come_to_rest(engine)
    usable = engine.side.allocator.usable_depth(engine.side._engine.chain(request), 99 // size)
    assert usable * size == num_tokens


def test_all_that_is_told_can_be_read(engines: Engines) -> None:
    engine = engines(fleet=fleet(lease_share=0.1))
    told = responses(engine)
    for index in range(3):
        finish(engine, tokens(21, index))
    for params in told.values():
        read = KVTransferParams.read(json.loads(json.dumps(params)))
        assert (read.peer is None) == (read.refused is not None)
    assert [set(params) & {"cpu_offload_refused"} for params in told.values()][1:] == [
        {"cpu_offload_refused"}
    ] * 2


@pytest.mark.parametrize("seed", range(OTHER_SEEDS, OTHER_SEEDS + 6))
def test_random_runs(seed: int) -> None:
    run_seed(seed, turns=200, kind="hand-offs")
