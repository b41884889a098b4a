"""Settings of random engines."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from evictor import available_policies
from offload.config import AUTO
from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit
from offload.testing.copiers.faulty import Fault
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.media.faulty import MediumFault
from offload.testing.media.store import MemoryStore
from offload.testing.virtual.groups import CHUNK, FULL, MODELS, STATE, WINDOW, Group
from offload.testing.virtual.region import VirtualRegion, sibling_place
from offload.testing.virtual.resizes import Resizes
from offload.testing.virtual.settings import DRAFTERS, VirtualSettings
from offload.testing.virtual.several import VirtualTiers
from offload.testing.virtual.store import VirtualStore
from offload.testing.virtual.tier import VirtualTier
from offload.worker.media.base import MediumJob

HAS_EXACT_STATES = "hash_block_size" in {field.name for field in fields(KVCacheConfig)}
"""Whether vLLM may be asked for states inside blocks: with steps that overlap, 0.31 has some a token late."""

_STORED_ANSWERS = (AUTO, AUTO, True, True, False)


def draw_settings(
    rng: random.Random, *, faults: bool = True, overlapped: bool | None = None, num_ranks: int | None = None
) -> VirtualSettings:
    """Settings of a random engine: tiny pools, any mode; the arguments fix what should not be drawn."""
    gpu_blocks = rng.choice([9, 14, 24, 40])
    verify = rng.choice(["always", "always", "always", "sampled", "never"])
    seals_of_blocks = rng.random() < 0.5
    kinds = [Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]
    if rng.random() < 0.5:
        kinds += [Fault.STUCK, Fault.DIE]
    if verify == "always" and seals_of_blocks:  # nothing less finds a copy that lies
        kinds.append(Fault.WRONG_BYTES)
    settings = VirtualSettings(
        num_ranks=num_ranks or rng.choice([1, 1, 2, 3]),
        gpu_blocks=gpu_blocks,
        cpu_slots=rng.choice([3, gpu_blocks // 2, 2 * gpu_blocks, 6 * gpu_blocks]),
        block_size=rng.choice([2, 4, 4]),
        block_outermost=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority"]),
        overlapped=rng.random() < 0.5 if overlapped is None else overlapped,
        v2_runner=rng.random() < 0.3,
        max_num_seqs=rng.choice([2, 4, 8]),
        chunk=rng.choice([5, 16, 48]),
        store_decode_blocks=_STORED_ANSWERS[int(rng.random() * len(_STORED_ANSWERS))],
        verify_loads=verify,
        seals_of_blocks=seals_of_blocks,
        first_part=rng.choice([1, 2, 16]),
        answer_run=rng.choice([1, 1, 3]),
        answer_interval=rng.choice([1, 1, 4]),
        rot_rate=rng.choice([0.0, 0.05]) if faults and verify == "always" else 0.0,
        copies=CopySchedule(
            longest_delay=rng.choice([0, 1, 3, 12]),
            burst_every=rng.choice([1, 1, 5]),
            fault_rate=rng.choice([0.0, 0.1, 0.4]) if faults else 0.0,
            faults=tuple(kinds),
            let_go_rate=1 / 60,  # what is stuck is mostly past its deadline by then, but not always
            threaded=rng.random() < 0.1,
        ),
        log_stats=rng.random() < 0.2,
        eviction_policy=rng.choice(available_policies()),
    )
    patience = 2 * settings.answer_run * (settings.answer_interval == 1)
    comes_in_bursts = settings.copies.burst_every > 1 and settings.copies.longest_delay > 0
    shares_blocks = settings.answer_run > 1
    return replace(
        settings,
        dcp=settings.num_ranks if shares_blocks else 1,
        step_restores=int(settings.first_part == 1),
        step_landed=int(settings.first_part == 2 and comes_in_bursts),
        answer_patience=patience,
    )


def with_drafts(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a random drafter.

    A step has room for a request with all of its drafts, and for a slot that draft models take. With less,
    vLLM would wait for ever for room to fill up a request whose prompt is computed but for its last token.
    """
    drafter = rng.choice([*DRAFTERS, "eagle"])
    num_drafts = rng.randint(1, 4)
    if drafter == "mtp":
        num_drafts = min(num_drafts, settings.block_size)  # vLLM refuses more
    chunk = max(settings.chunk, num_drafts + 2)
    skill = rng.choice([0.0, 0.5, 0.9])
    return replace(settings, dcp=1, drafter=drafter, num_drafts=num_drafts, chunk=chunk, draft_skill=skill)


def with_replicas(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with ranks of which some hold the same KV."""
    shapes: list[dict[str, Any]] = [
        {"num_ranks": 2, "replicas": 2},
        {"num_ranks": 3, "replicas": 3},
        {"num_ranks": 2, "pcp": 2},
        {"num_ranks": 4, "pcp": 2, "replicas": 2},
        {"num_ranks": 4, "stages": 2, "replicas": 2},
        {"num_ranks": 6, "replicas": 2},
    ]
    return replace(settings, dcp=1, **rng.choice(shapes))


def with_model(settings: VirtualSettings, model: str, rng: random.Random) -> VirtualSettings:
    """The same with the groups of that one of ``MODELS``, and as many GPU blocks for each."""
    return _with_groups(settings, MODELS[model], rng)


def with_varied_model(settings: VirtualSettings, model: str, rng: random.Random) -> VirtualSettings:
    """The same with groups like those of that one of ``MODELS``, and room for a few requests.

    Blocks, windows and chunks are of other lengths. A pool holds a checkpoint at least.
    """
    hybrid = _with_groups(settings, _varied(MODELS[model], rng), rng)
    position, endless = hybrid.block_tokens, 1 << 20
    least = sum(
        position // group.block_size if group.kind == FULL else group.blocks_for(endless, 1, 0)
        for group in hybrid.groups
    )
    return replace(
        hybrid,
        gpu_blocks=rng.choice([40, 80]),
        cpu_slots=max(rng.choice([20, 60, 200]), least),
        chunk=rng.choice([5, 16, 24, 48]),
        retention=hybrid.retention if rng.random() < 0.5 else 0,
    )


def with_shared_blocks(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with ranks that share the tokens of a block, some or all of them."""
    dcp = rng.choice([2, 2, 3])
    return replace(settings, num_ranks=dcp * rng.choice([1, 1, 2]), dcp=dcp)


def with_stages(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a pipeline."""
    stages = rng.choice([2, 2, 3])
    return replace(settings, num_ranks=stages * rng.choice([1, 1, 2]), stages=stages, dcp=1)


def with_resizes(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a pool that is made larger and smaller again and again, on ranks of any kind."""
    changes = [with_drafts, with_shared_blocks, with_stages, with_tier]
    models = [model for model in MODELS if model != "plain"]
    if rng.random() < 0.4:
        settings = rng.choice(changes)(settings, rng)
    elif rng.random() < 0.5:
        settings = with_varied_model(settings, rng.choice(models), rng)
    cpu_slots = max(settings.cpu_slots, 8)
    most = cpu_slots * rng.choice([1, 2, 3])
    resizes = Resizes(most, rng.choice([1, 1, 2, 4]), rng.choice([0.02, 0.1, 0.3]))
    return replace(settings, cpu_slots=cpu_slots, resizes=resizes)


def with_lazy_stores(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with blocks that are stored once the GPU is about to evict them, or with more than that."""
    change = rng.choice([None, None, with_drafts, with_shared_blocks, with_tier, with_resizes])
    settings = settings if change is None else change(settings, rng)
    gpu_blocks = settings.gpu_blocks * rng.choice([1, 2, 4])
    return replace(settings, store="lazy", gpu_blocks=gpu_blocks)


def with_tier(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a small pool and a tier below it, whose medium may misbehave.

    With ranks of any kind, or with the groups of any model.
    """
    changes = [with_drafts, with_replicas, with_shared_blocks, with_stages]
    models = [model for model in MODELS if model != "plain"]
    settings = replace(settings, cpu_slots=settings.gpu_blocks * rng.choice([1, 2, 4]) // 2)
    if rng.random() < 0.5:
        settings = rng.choice(changes)(settings, rng)
    elif rng.random() < 0.5:
        settings = with_varied_model(settings, rng.choice(models), rng)
    tier = _tier(settings, rng)
    return replace(settings, tier=tier, fetch_gpu_share=rng.choice([0.1, 1.0, 1.0]))


def with_hand_offs(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same of an engine whose prompts others fetch, all or some. Nobody does.

    With ranks of any kind, or with the groups of any model.
    """
    models = [model for model in MODELS if model != "plain"]
    if rng.random() < 0.3:
        settings = rng.choice([with_drafts, with_replicas, with_shared_blocks, with_stages])(settings, rng)
    elif rng.random() < 0.5:
        settings = with_varied_model(settings, rng.choice(models), rng)
    fleet = {
        "role": rng.choice(["prefill", "prefill", "both"]),
        "listen": "127.0.0.1:7100",
        "lease_seconds": rng.choice([3, 20, 60]),
        "lease_share": rng.choice([0.0, 0.25, 0.5, 1.0]),
    }
    return replace(settings, fleet=fleet)


def with_store(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a store that engines share, and models of any kind."""
    model = rng.choice(list(MODELS)) if rng.random() < 0.5 else "plain"
    if model != "plain":
        settings = with_varied_model(settings, model, rng)
    elif rng.random() < 0.5:
        settings = rng.choice([with_replicas, with_shared_blocks, with_stages])(settings, rng)
    tier = _store(settings, rng)
    share = rng.choice([0.1, 1.0, 1.0])
    return replace(settings, tier=tier, step_seconds=rng.choice([0.05, 1.0]), fetch_gpu_share=share)


def with_several(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a small pool, and a tier and a store below it, in either order, which go wrong apart."""
    settings = with_tier(settings, rng)
    assert isinstance(settings.tier, VirtualTier)
    tiers = {"disk": settings.tier, "store": _store(settings, rng)}
    if rng.random() < 0.5:
        tiers = dict(reversed(tiers.items()))
    return replace(settings, tier=VirtualTiers(tiers), step_seconds=rng.choice([0.05, 1.0]))


def _tier(settings: VirtualSettings, rng: random.Random) -> VirtualTier:
    choose = _choosing(settings, rng)
    limits = TierLimits(
        rng.choice(available_policies()),
        rng.choice(list(Admit)),
        rng.choice([None, 1e5, 1e12]),
        least_tokens=rng.choice([1, 1, 4, 20]),
        pool_share=rng.choice([0.25, 1.0, 1.0]),
    )
    return VirtualTier(
        rng.choice([3, 6, 60]),
        positions=rng.choice([8, 16] if settings.groups else [1, 2, 4]),
        limits=limits,
        choose=choose,
        stuck_polls=50,
        num_lives=rng.choice([1, 2, 3]),
    )


def _store(settings: VirtualSettings, rng: random.Random) -> VirtualStore:
    """It loses what it has, at random or the ends of chains, it changes bytes, and it is gone for a while."""
    lost, changed = rng.choice([0.0, 0.05, 0.3]), rng.choice([0.0, 0.0, 0.02])
    gone = rng.choice([0.0, 0.0, 0.02])

    def disturb(store: MemoryStore) -> None:
        keys = list(store.kept)
        if keys and rng.random() < lost:
            if rng.random() < 0.5:
                store.evict_deepest()
            else:
                store.evict(rng.choice(keys))
        if store.kept and rng.random() < changed:
            content = store.kept[rng.choice(list(store.kept))].content
            content[rng.randrange(len(content))] ^= 1
            tier.num_faults += 1
        if rng.random() < gone:
            for medium in tier.media:
                medium.is_gone = not medium.is_gone
            tier.num_faults += 1

    tier = VirtualStore(
        positions=rng.choice([8, 16] if settings.groups else [1, 2, 4]),
        limits=TierLimits(
            admit=rng.choice([Admit.ALL, Admit.SECOND_USE]),
            least_tokens=rng.choice([1, 4, 20]),
            pool_share=rng.choice([0.25, 1.0]),
            wait_seconds=rng.choice([0.02, 0.2, 3.0]),
        ),
        choose=_choosing(settings, rng),
        disturb=disturb,
        stuck_polls=50,
        num_lives=rng.choice([1, 2, 3]),
    )
    return tier


def _choosing(settings: VirtualSettings, rng: random.Random) -> Callable[[MediumJob], MediumFault]:
    """Chooses the fault of each job of a medium."""
    kinds = [fault for fault in MediumFault if fault is not MediumFault.NONE]
    if settings.verify_loads != "always":  # nothing less finds a medium that lies
        kinds.remove(MediumFault.WRONG_BYTES)
    rate = rng.choice([0.0, 0.0, 0.1, 0.3])

    def choose(job: MediumJob) -> MediumFault:
        return rng.choice(kinds) if rng.random() < rate else MediumFault.NONE

    return choose


def with_region(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with a pool that outlives the engine, of models and ranks of any kind that it can be of."""
    models = [partial(with_varied_model, model=each) for each in ("columns", "window", "chunked", "mixed")]
    changes: list[Callable[..., VirtualSettings]] = [*models, with_drafts, with_replicas]
    changes += [with_shared_blocks, with_stages]
    if rng.random() < 0.7:
        settings = rng.choice(changes)(settings, rng=rng)
    return replace(settings, region=VirtualRegion(rng.choice([2, 3, 5])))


def with_siblings(settings: VirtualSettings, rng: random.Random) -> VirtualSettings:
    """The same with engines beside it whose pools outlive them, of models and ranks of any kind."""
    models = [partial(with_varied_model, model=each) for each in MODELS if each != "plain"]
    changes: list[Callable[..., VirtualSettings]] = [*models, with_drafts, with_replicas]
    changes += [with_shared_blocks, with_stages]
    if rng.random() < 0.7:
        settings = rng.choice(changes)(settings, rng=rng)
    limits = TierLimits(
        least_tokens=rng.choice([1, 4, 20]),
        pool_share=rng.choice([0.1, 0.25, 1.0]),
        wait_seconds=rng.choice([0.02, 0.2, 3.0]),
    )
    place = sibling_place(
        settings.columns, extent_bytes=settings.slot_bytes * rng.choice([1, 1, 4, 16]), limits=limits
    )
    return replace(
        settings,
        region=VirtualRegion(num_beside=rng.choice([2, 2, 3])),
        places=(place,),
        step_seconds=rng.choice([0.05, 1.0]),
        fetch_gpu_share=rng.choice([0.1, 1.0, 1.0]),
    )


def _with_groups(settings: VirtualSettings, groups: tuple[Group, ...], rng: random.Random) -> VirtualSettings:
    kinds = {group.kind for group in groups}
    hybrid = replace(
        settings,
        dcp=1,
        groups=groups,
        gpu_blocks=settings.gpu_blocks * len(groups),
        cpu_slots=max(settings.cpu_slots, 16),  # so many may have to be kept together
    )
    is_thinned = CHUNK not in kinds and kinds != {FULL}
    retentions = [0, 0, None, 2 * hybrid.block_tokens] if is_thinned else [0, 0, None]
    has_checkpoints = any(group.has_checkpoints for group in groups)  # vLLM confuses them with such hits
    is_exact = HAS_EXACT_STATES and STATE in kinds and len(groups) > 1 and not has_checkpoints
    return replace(
        hybrid, retention=rng.choice(retentions), match_unit=rng.choice([0, 0, 2]) if is_exact else 0
    )


def _varied(groups: tuple[Group, ...], rng: random.Random) -> tuple[Group, ...]:
    """Groups of the same kinds: all blocks half or twice as long, windows of any length, chunks of blocks.

    Where a chunk ends within a block, vLLM's own hit may end in the chunk before, without what that needs:
    it counts empty places from the last chunk that the request could reach.
    """
    half, twice = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    size = max(group.block_size // half * twice for group in groups)
    reaches = {WINDOW: lambda: rng.randint(2, 28), CHUNK: lambda: size * rng.randint(1, 24 // size)}
    return tuple(
        replace(
            group,
            block_size=group.block_size // half * twice,
            reach=reaches[group.kind]() if group.kind in reaches else 0,
        )
        for group in groups
    )
