"""The policy behind vLLM's own connector, driven by vLLM's own manager."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from offload.testing.virtual.native import VirtualNativeSpec
from offload.vllm.native.policy import HazardCachePolicy
from tests.seeds import OTHER_SEEDS
from tests.strategies import chain_of

KEYS = {"eviction_policy": "HazardCachePolicy", "cache_policy_module_path": "offload.vllm.native_policy"}
"""What a user writes."""


def manager_of(num_chunks: int, policy: str = "HazardCachePolicy", **options: Any) -> CPUOffloadingManager:
    module = KEYS["cache_policy_module_path"]
    return CPUOffloadingManager(num_chunks, policy, module, enable_events=True, **options)


def keys_of(*tokens: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(each, group) for each in chain_of(*tokens)]


def resident(manager: CPUOffloadingManager, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    return [key for key in keys if manager._policy.get(key) is not None]


class Requests:
    """Makes requests as vLLM's scheduler announces them."""

    def __init__(self, manager: CPUOffloadingManager) -> None:
        self.manager = manager
        self.numbers = count()

    def begin(self, *groups: Sequence[OffloadKey], tokens_per_chunk: int = 16) -> ReqContext:
        context = ReqContext(req_id=str(next(self.numbers)))
        for keys in groups:
            for number, key in enumerate(keys, 1):
                context.set_offload_key_position(key, number * tokens_per_chunk)
        self.manager.on_new_request(context)
        return context

    def serve(self, keys: Sequence[OffloadKey]) -> int:
        """All of a request, alone; how many leading keys it found."""
        manager, context = self.manager, self.begin(keys)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        if hits:
            manager.prepare_load(keys[:hits], context)
            manager.complete_load(set(keys[:hits]), context)
        if keys[hits:]:
            output = manager.prepare_store(keys[hits:], context)
            if output is not None:
                manager.complete_store(set(output.keys_to_store), context)
        manager.on_request_finished(context)
        policy = manager._policy
        if isinstance(policy, HazardCachePolicy):
            policy.check_invariants()
        return hits


def cycle_hits(policy: str, passes: int) -> list[int]:
    """Hits by pass of 64 documents of 5 chunks, one after the other, in a pool for 30."""
    requests = Requests(manager_of(150, policy))
    documents = [keys_of(number, 1, 2, 3, 4) for number in range(64)]
    return [sum(map(requests.serve, documents)) for _ in range(passes)]


def test_a_cycle_larger_than_the_pool() -> None:
    """Where LRU and ARC find nothing, nearly what can be kept is found: all but the room of one document."""
    assert cycle_hits("lru", 3) == cycle_hits("arc", 3) == [0, 0, 0]
    first, *others = cycle_hits("HazardCachePolicy", 8)
    assert first == 0
    assert all(25 * 5 <= hits <= 30 * 5 for hits in others), others


def test_tails_go_before_heads() -> None:
    manager = manager_of(12)
    requests = Requests(manager)
    trunk, one, other = keys_of(0, 0, 0), keys_of(0, 0, 0, 1, 1, 1), keys_of(0, 0, 0, 2, 2, 2)
    requests.serve(one)
    requests.serve(other)
    requests.serve(keys_of(9, 9, 9, 9, 9))  # 3 are free
    assert resident(manager, one) == one[:4] and resident(manager, other) == other
    requests.serve(keys_of(8, 8, 8))
    assert resident(manager, trunk) == trunk
    for keys in (one, other):
        assert resident(manager, keys) == keys[: len(resident(manager, keys))]


def test_a_request_does_not_push_out_what_it_continues() -> None:
    manager = manager_of(8)
    requests = Requests(manager)
    requests.serve(keys_of(1, 1, 1, 1))
    requests.serve(keys_of(2, 2, 2, 2))
    longer = keys_of(1, 1, 1, 1, 3, 3, 3, 3)
    assert requests.serve(longer) == 4
    assert resident(manager, longer) == longer
    assert requests.serve(longer) == 8


def test_what_follows_a_refused_store_is_stored_where_it_belongs() -> None:
    """The scheduler offers refused chunks again, with more, and only the new ones are announced as misses."""
    manager = manager_of(6)
    requests = Requests(manager)
    old, new = keys_of(*[5] * 6), keys_of(*[7] * 6)
    holder, context = requests.begin(old), requests.begin(new)
    output = manager.prepare_store(old, holder)
    assert output is not None
    assert manager.prepare_store(new[:3], context) is None
    other = requests.begin(keys_of(6, 6))
    assert manager.prepare_store(keys_of(6, 6), other) is None
    manager.complete_store(output.keys_to_store, holder)
    taken = manager.prepare_store(new[:5], context)
    assert taken is not None and taken.keys_to_store == new[:5]
    manager.complete_store(taken.keys_to_store, context)
    for each in (holder, context, other):
        manager.on_request_finished(each)
    assert requests.serve(new) == 5 and resident(manager, new) == new


def test_a_prompt_stored_in_parts_is_one_use() -> None:
    manager = manager_of(20)
    requests = Requests(manager)
    keys = keys_of(*range(12))
    context = requests.begin(keys)
    for start in range(0, 12, 4):
        output = manager.prepare_store(keys[start : start + 4], context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    policy = manager._policy
    assert isinstance(policy, HazardCachePolicy)
    policy.check_invariants()
    assert len({id(policy._segments._segments[key]) for key in keys}) == 1


def test_reset_forgets_requests_too() -> None:
    manager = manager_of(8)
    requests = Requests(manager)
    keys = keys_of(1, 2, 3, 4, 5, 6)
    context = requests.begin(keys)
    assert manager.prepare_store(keys[:4], context) is not None
    manager.reset_cache()
    assert not resident(manager, keys) and manager._get_num_free_chunks() == 8
    output = manager.prepare_store(keys, context)
    assert output is not None and output.keys_to_store == keys
    manager.complete_store(keys, context)
    manager.on_request_finished(context)
    assert requests.serve(keys) == 6


@dataclass
class Live:
    """A request under way in the random test."""

    context: ReqContext
    keys: list[OffloadKey]
    offered: int = 0
    next_start: int = 0
    storing: list[list[OffloadKey]] = field(default_factory=list)
    loading: list[OffloadKey] = field(default_factory=list)


class Naive:
    """What the manager promises, by key: users of each chunk, -1 while it is filled."""

    def __init__(self, seed: int, groups: int, positions: float, capacity: int, threshold: int) -> None:
        self.rng = random.Random(seed)
        self.groups = groups
        self.positions = positions
        self.capacity = capacity
        self.threshold = threshold
        self.manager = manager_of(capacity, store_threshold=threshold)
        self.requests = Requests(self.manager)
        self.users: dict[OffloadKey, int] = {}
        self.live: list[Live] = []
        self.num_evicted = self.num_refused = 0

    def step(self) -> None:
        actions = [self.begin, self.begin, self.store, self.store, self.store, self.end_store, self.end_load]
        self.rng.choice([*actions, self.end_store, self.finish, self.touch])()
        if self.rng.random() < 0.01:
            self.reset()
        self.check()

    def pick(self) -> Live | None:
        return self.rng.choice(self.live) if self.live else None

    def begin(self) -> None:
        if len(self.live) == 4:
            return
        tokens = [self.rng.choice([0, 0, 0, 1, 2]) for _ in range(self.rng.randint(1, 9))]
        keys = [key for group in range(self.groups) for key in keys_of(*tokens, group=group)]
        context = ReqContext(req_id=str(next(self.requests.numbers)))
        for group in range(self.groups):
            for number, key in enumerate(keys_of(*tokens, group=group), 1):
                if self.rng.random() < self.positions:
                    context.set_offload_key_position(key, 16 * number)
        self.manager.on_new_request(context)
        request = Live(context, keys)
        self.live.append(request)
        if self.groups == 1:
            for key in keys:
                found = self.manager.lookup(key, context)
                expected = {None: LookupResult.MISS, -1: LookupResult.HIT_PENDING}
                assert found is expected.get(self.users.get(key), LookupResult.HIT)
                if found is not LookupResult.HIT:
                    break
                request.loading.append(key)
        else:
            ready = [key for key in keys if self.users.get(key, -1) >= 0]
            request.loading = self.rng.sample(ready, self.rng.randint(0, len(ready)))
        request.next_start = len(request.loading) if self.groups == 1 else 0
        if request.loading:
            self.manager.prepare_load(request.loading, context)
            for key in request.loading:
                self.users[key] += 1

    def end_load(self) -> None:
        request = self.pick()
        if request is not None and request.loading:
            self.manager.complete_load(set(request.loading), request.context)
            for key in request.loading:
                self.users[key] -= 1
            request.loading = []

    def store(self) -> None:
        request = self.pick()
        if request is None or request.loading:
            return
        stop = self.rng.randint(request.next_start, len(request.keys))
        offered = [key for key in request.keys[request.next_start : stop] if self.rng.random() < 0.9]
        wanted = [key for key in offered if key not in self.users]
        before = dict(self.users)
        busy = {key for key, users in before.items() if users}
        output = self.manager.prepare_store(offered, request.context)
        if output is None:
            self.num_refused += 1
            free = self.capacity - len(self.users)
            mine = self.users.keys() & set(request.keys)
            assert busy or mine or free + len(self.users) < len(wanted), "nothing was in the way"
            return
        if self.threshold:
            wanted = [key for key in wanted if key in output.keys_to_store]
        assert output.keys_to_store == wanted
        evicted = set(output.evicted_keys)
        assert (
            len(evicted) == len(output.evicted_keys) == max(0, len(wanted) - (self.capacity - len(before)))
        ), "not exactly as many as it takes"
        assert not evicted & set(offered) and not evicted & busy and evicted <= before.keys()
        self.num_evicted += len(evicted)
        for key in evicted:
            del self.users[key]
        self.users |= dict.fromkeys(wanted, -1)
        request.next_start = stop
        if wanted:
            request.storing.append(wanted)

    def end_store(self) -> None:
        request = self.pick()
        if request is None or not request.storing:
            return
        keys = request.storing.pop(self.rng.randrange(len(request.storing)))
        success = self.rng.random() < 0.8
        self.manager.complete_store(set(keys), request.context, success)
        for key in keys:
            if success:
                self.users[key] = 0
            else:
                del self.users[key]

    def touch(self) -> None:
        request = self.pick()
        if request is not None:
            self.manager.touch(request.keys[: self.rng.randint(0, 9)], request.context)

    def finish(self) -> None:
        request = self.pick()
        if request is not None and not request.loading and not request.storing:
            self.live.remove(request)
            self.manager.on_request_finished(request.context)

    def reset(self) -> None:
        """As the scheduler does it: what is under way is forgotten, and stored again from the beginning."""
        self.manager.reset_cache()
        self.users.clear()
        for request in self.live:
            request.loading, request.storing, request.next_start = [], [], 0

    def check(self) -> None:
        manager, policy = self.manager, self.manager._policy
        assert isinstance(policy, HazardCachePolicy)
        chunks = policy._chunks
        assert {key: chunk.ref_cnt for key, chunk in chunks.items()} == self.users
        assert len({chunk.chunk_id for chunk in chunks.values()}) == len(chunks)
        assert manager._get_num_free_chunks() == self.capacity - len(chunks)
        assert manager._num_evictable_cache_chunks == sum(not users for users in self.users.values())
        if self.rng.random() < 0.3:  # what vLLM said last may still have to be taken in
            policy.check_invariants()


@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize(("groups", "positions"), [(1, 1), (2, 1), (1, 0), (2, 0.7)])
def test_contract(groups: int, positions: float, threshold: int) -> None:
    """Never what is in use or protected, all or nothing, nothing lost: whatever is known of positions."""
    evicted = refused = 0
    for seed in range(8):
        capacity = random.Random(seed).choice([4, 9, 16]) * groups
        naive = Naive(seed, groups, positions, capacity, threshold)
        for _ in range(500):
            naive.step()
        evicted += naive.num_evicted
        refused += naive.num_refused
    assert (evicted > 20 and refused > 10) or OTHER_SEEDS, f"{evicted} evicted, {refused} refused"


def config_of(extra: dict[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=100,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=OffloadingModelConfig("model", "float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


@pytest.mark.parametrize("context", [[], [ReqContext(req_id="0")]], ids=["before 0.33", "from 0.33 on"])
def test_every_vllm_can_insert_a_chunk(context: list[ReqContext]) -> None:
    policy = HazardCachePolicy(4)
    [key] = keys_of(1)
    policy.insert(key, ChunkStatus(0), *context)
    assert policy.get(key) is not None
    policy.check_invariants()


@pytest.mark.parametrize("spec_class", [CPUOffloadingSpec, VirtualNativeSpec])
def test_two_configuration_keys_are_enough(spec_class: type[CPUOffloadingSpec]) -> None:
    spec = spec_class(config_of({"cpu_bytes_to_use": 1 << 20, **KEYS}))
    manager = spec.get_manager()
    assert isinstance(manager, CPUOffloadingManager)
    assert isinstance(manager._policy, HazardCachePolicy)
    assert manager._policy.cache_capacity == spec.num_chunks > 0
