"""One seed, from an empty engine to an empty engine."""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from offload.testing.virtual.drawing import (
    draw_settings,
    with_drafts,
    with_hand_offs,
    with_lazy_stores,
    with_region,
    with_replicas,
    with_resizes,
    with_several,
    with_shared_blocks,
    with_siblings,
    with_stages,
    with_store,
    with_tier,
    with_varied_model,
)
from offload.testing.virtual.engine import VirtualEngine
from offload.testing.virtual.groups import MODELS
from offload.testing.virtual.leavers import Leavers
from offload.testing.virtual.pair import run_fleet
from offload.testing.virtual.settings import VirtualSettings
from offload.testing.virtual.workload import Workload

_CHANGES: Mapping[str, Callable[..., VirtualSettings]] = {
    "draft": with_drafts,
    "replica": with_replicas,
    "dcp": with_shared_blocks,
    "pipeline": with_stages,
    "tier": with_tier,
    "store": with_store,
    "several": with_several,
    "region": with_region,
    "siblings": with_siblings,
    "hand-offs": with_hand_offs,
    "resize": with_resizes,
    "lazy": with_lazy_stores,
    **{model: partial(with_varied_model, model=model) for model in MODELS if model != "plain"},
}

FLEET = "fleet"
KINDS = ("plain", *_CHANGES, FLEET)
"""Of engines: as they come, with speculative decoding, with other ranks, with a tier below the pool, with
a store that they share, with both, with a pool that outlives them, with siblings that read it, with prompts
for others, with a pool that is resized, with stores of what the GPU is about to evict, with the groups of a
hybrid model, or several of them that hand KV to each other."""

_KILLED = 0.01
"""In so many turns an engine among others is killed."""

LEAVERS_EVERY = 8
"""In one seed of so many, requests leave chains that are being restored, and do nothing else."""


class RunFailedError(AssertionError):
    """A run went wrong; the message has the seed, the step, the settings and the cause."""

    def __init__(self, seed: int, step: int, settings: VirtualSettings, cause: BaseException) -> None:
        super().__init__(f"seed {seed}, step {step}, {settings}\n{type(cause).__name__}: {cause}")
        self.seed = seed
        self.step = step
        self.cause = cause


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run that went well consisted of; ``counts`` by name, ``seconds`` of wall time."""

    seed: int
    steps: int
    seconds: float
    positions_checked: int
    counts: Counter[str] = field(default_factory=Counter)


def draw_kind(kind: str, seed: int, rng: random.Random) -> VirtualSettings:
    """Settings of an engine of one of ``KINDS``. What ``rng`` says next does not depend on the kind."""
    settings = draw_settings(rng)
    change = _CHANGES.get(kind)
    return settings if change is None else change(settings, rng=random.Random(f"{kind}s of {seed}"))


def run_seed(
    seed: int, turns: int = 300, settings: VirtualSettings | None = None, kind: str = "plain"
) -> RunReport:
    """Drive an engine through ``turns`` turns of a random workload, then let it come to rest.

    With a tier, or a pool that outlives them, engines follow each other. The last one comes to rest, and
    those before it are killed.

    Args:
        seed: decides everything.
        turns: turns before the workload stops sending.
        settings: of the engine; drawn from the seed if not given.
        kind: of ``KINDS``, for settings that are drawn.

    Raises:
        RunFailedError: something did not hold.
    """
    began = time.perf_counter()
    rng = random.Random(seed)
    settings = draw_kind(kind, seed, rng) if settings is None else settings
    if kind == FLEET:
        return _run_fleet(seed, turns, settings, rng)
    if settings.region is not None and settings.region.num_beside > 1:
        return _run_beside(seed, turns, settings, rng)
    outliving = [each.num_lives for each in (settings.tier, settings.region) if each is not None]
    num_lives = max(outliving, default=1)
    make = Leavers if seed % LEAVERS_EVERY == LEAVERS_EVERY - 1 else Workload
    num_steps = num_checked = 0
    counts = Counter[str]()
    workload: Leavers | Workload | None = None
    for life in range(num_lives):
        if settings.tier is not None:
            settings = replace(settings, places=settings.tier.places)
        engine = VirtualEngine(settings, rng)
        engine.audit.explain_failures = True
        if workload is None:
            workload = make(engine, rng)
        else:
            workload.move_to(engine)
        try:
            for _ in range(turns // num_lives):
                workload.turn()
            if life == num_lives - 1:
                engine.drain()
                engine.audit.check_drained()
                engine.audit.check_gpu_cache()
        except Exception as error:
            raise RunFailedError(seed, num_steps + engine.num_steps, settings, error) from error
        finally:
            engine.close()
        num_steps += engine.num_steps
        num_checked += engine.runner.num_positions_checked
        counts += engine.counts
        if settings.tier is not None:
            counts += settings.tier.moved
    if settings.region is not None:
        settings.region.close()
    return RunReport(seed, num_steps, time.perf_counter() - began, num_checked, counts)


def _run_beside(seed: int, turns: int, settings: VirtualSettings, rng: random.Random) -> RunReport:
    """Several engines at once, which take turns and are asked for the same. Now and then one is killed."""
    began, region = time.perf_counter(), settings.region
    assert region is not None
    over: list[VirtualEngine] = []
    engines = [_explained(VirtualEngine(settings, rng)) for _ in range(region.num_beside)]
    workloads = [Workload(engine, rng) for engine in engines]
    for workload in workloads:
        workload.ask_as(workloads[0])
    try:
        for _ in range(turns):
            which = rng.randrange(len(engines))
            if rng.random() < _KILLED:
                engines[which].close()
                over.append(engines[which])
                engines[which] = _explained(VirtualEngine(settings, rng))
                workloads[which].move_to(engines[which])
            workloads[which].turn()
        for engine in engines:
            engine.drain()
            engine.audit.check_drained()
            engine.audit.check_gpu_cache()
    except Exception as error:
        num_steps = sum(engine.num_steps for engine in [*over, *engines])
        raise RunFailedError(seed, num_steps, settings, error) from error
    finally:
        for engine in engines:
            engine.close()
    over += engines
    region.close()
    counts = sum((engine.counts for engine in over), Counter[str]())
    num_checked = sum(engine.runner.num_positions_checked for engine in over)
    num_steps = sum(engine.num_steps for engine in over)
    return RunReport(seed, num_steps, time.perf_counter() - began, num_checked, counts)


def _run_fleet(seed: int, turns: int, settings: VirtualSettings, rng: random.Random) -> RunReport:
    """Several engines at once, which hand KV to each other."""
    began = time.perf_counter()
    try:
        fleet = run_fleet(seed, turns, settings, rng)
    except Exception as error:
        raise RunFailedError(seed, 0, settings, error) from error
    num_checked = sum(engine.runner.num_positions_checked for engine in fleet.over)
    num_steps = sum(engine.num_steps for engine in fleet.over)
    return RunReport(seed, num_steps, time.perf_counter() - began, num_checked, fleet.counts)


def _explained(engine: VirtualEngine) -> VirtualEngine:
    engine.audit.explain_failures = True
    return engine
