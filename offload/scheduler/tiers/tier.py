"""Tiers: what they have, and their flows."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from allocator import Event
from offload.config import DEFAULT_POLICY
from offload.errors import UnsupportedError
from offload.messages import Route, TierFacts
from offload.scheduler.common import Common
from offload.scheduler.flow import Below, BelowEvents, Standing, TierEvent
from offload.scheduler.groups import Groups
from offload.scheduler.tiers.announced import Announced
from offload.scheduler.tiers.beliefs import Beliefs
from offload.scheduler.tiers.budget import WriteBudget
from offload.scheduler.tiers.contents import Contents
from offload.scheduler.tiers.directory import Directory
from offload.scheduler.tiers.fetch import LEAST_TOKENS, POOL_SHARE
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.names import Grid
from offload.scheduler.tiers.pace import Pace
from offload.scheduler.tiers.peer_fetches import PeerFetches
from offload.scheduler.tiers.peer_standings import PeerStandings
from offload.scheduler.tiers.peers import PeerDirectory
from offload.scheduler.tiers.probes import WAIT_SECONDS, Probes
from offload.scheduler.tiers.shared import SharedDirectory
from offload.scheduler.tiers.siblings import SiblingDirectory, SiblingFetches
from offload.scheduler.tiers.spills import Spills
from offload.scheduler.tiers.told import ToldExtents, kept_path, spelled
from offload.settings import Admit
from offload.tier_config import SHUTDOWN_SECONDS

logger = logging.getLogger(__name__)

EXTENT_BYTES = 1 << 20
"""Of a position or several that siblings are asked for together, at least; on each rank."""

_NO_LIMIT = 1e18
"""Bytes that nobody writes."""


class TierLimits(NamedTuple):
    """What bounds a tier.

    Attributes:
        policy: name of its eviction policy.
        admit: what is written.
        bytes_per_day: that are written; None: as many as it holds.
        least_tokens: fewer are not worth a fetch.
        wait_seconds: that a request waits for answers of a store.
        shutdown_seconds: that a shutdown takes at most for what is yet to be written.
        pool_share: fetches under way fill at most that part of the pool.
    """

    policy: str = DEFAULT_POLICY
    admit: Admit = Admit.POLICY
    bytes_per_day: float | None = None
    least_tokens: int = LEAST_TOKENS
    wait_seconds: float = WAIT_SECONDS
    shutdown_seconds: float = SHUTDOWN_SECONDS
    pool_share: float = POOL_SHARE


def make_tier(
    spill: Route, fetch: Route, common: Common, facts: Sequence[TierFacts], limits: TierLimits
) -> Below:
    """What decides about a tier of which all ranks have told.

    Raises:
        UnsupportedError: their extents are of different sizes.
    """
    grid = _grid(fetch.source, common, facts)
    groups = common.engine.groups
    directory = Directory(
        facts,
        policy=limits.policy,
        clock=common.clock,
        has_bags=groups.has_bags,
        is_hollow=not grid.columns,
        admits_all=limits.admit is not Admit.POLICY,
        record_events=common.record_events,
        path_from=partial(kept_path, grid=grid, groups=groups) if groups.has_bags else None,
    )
    extent_bytes = grid.slots * common.slot_bytes
    if directory.num_used:
        logger.info(
            "the tier %s has %d extents of %d blocks from before",
            *(fetch.source, directory.num_used, grid.slots),
        )
    tier_bytes = directory.num_places * extent_bytes
    budget = WriteBudget(limits.bytes_per_day or tier_bytes, tier_bytes, common.clock)
    budget.begin_again(
        directory.num_used * extent_bytes,
        min(fact.seconds for fact in facts),
        directory.num_written_before * extent_bytes,
    )
    common.metrics.count("route_orphaned_extents", directory.num_orphans, fetch)
    spills, fetches = _flows(spill, fetch, common, directory, grid, budget, facts, limits)

    def standing() -> Standing:
        used, places = directory.num_used, directory.num_places
        left = max(0, int(min(budget.left, tier_bytes)))
        return Standing(used, places, extent_bytes, directory.epoch, directory.is_private, left)

    events = BelowEvents(
        _turned(directory.take_events, grid, groups), lambda: directory.is_listing, grid.positions
    )
    return Below(
        [spills, fetches],
        [fetches],
        spills.ending,
        standing,
        events if common.record_events else None,
        directory.name_weights,
    )


def make_store(
    spill: Route, fetch: Route, probe: Route, common: Common, facts: Sequence[TierFacts], limits: TierLimits
) -> Below:
    """What decides about a tier that others write, too. Its policy is its own.

    Raises:
        UnsupportedError: ranks have extents of different sizes.
    """
    grid = _grid(fetch.source, common, facts)
    probes = Probes(probe, common, wait_seconds=limits.wait_seconds)
    announced = Announced() if common.record_events else None
    directory = SharedDirectory(
        Beliefs(common.clock), probes, common.clock, announced=announced, num_parts=_parts(facts)
    )
    budget = WriteBudget(limits.bytes_per_day or _NO_LIMIT, _NO_LIMIT, common.clock)
    spills, fetches = _flows(spill, fetch, common, directory, grid, budget, facts, limits)
    events = None
    if announced is not None:
        take = _turned(announced.take, grid, common.engine.groups)
        events = BelowEvents(take, lambda: announced.is_listing, grid.positions, is_shared=True)
    return Below(
        [spills, fetches, probes],
        [fetches],
        spills.ending,
        events=events,
        name_weights=directory.name_weights,
    )


def make_siblings(
    fetch: Route,
    probe: Route,
    common: Common,
    facts: Sequence[TierFacts],
    limits: TierLimits = TierLimits(),  # noqa: B008 (immutable)
    extent_bytes: int = EXTENT_BYTES,
) -> Below:
    """What decides about fetches from pools of siblings. Their extents are only names: of any size."""
    grid = _grid_by_name(common, facts, extent_bytes)
    probes = Probes(probe, common, wait_seconds=limits.wait_seconds)
    fetches = SiblingFetches(
        fetch,
        common,
        SiblingDirectory(Beliefs(common.clock), probes, common.clock, num_parts=_parts(facts)),
        grid,
        lambda request_id, num_there: False,
        Pace(common.costs.prefill, common.clock),
        least_tokens=limits.least_tokens,
        pool_share=limits.pool_share,
    )
    return Below([fetches, probes], [fetches])


def make_peers(
    fetch: Route,
    probe: Route,
    common: Common,
    facts: Sequence[TierFacts],
    limits: TierLimits = TierLimits(),  # noqa: B008 (immutable)
    extent_bytes: int = EXTENT_BYTES,
    peer_wait_seconds: float = 0.0,
) -> Below:
    """What decides about fetches from pools of peers. Extents are of any size there, too.

    ``peer_wait_seconds``: that a request waits at least for progress at the peer that was named to it.
    """
    probes = Probes(probe, common, wait_seconds=limits.wait_seconds)
    directory = PeerDirectory(
        Beliefs(common.clock),
        probes,
        common.clock,
        num_parts=_parts(facts),
        has_bags=common.engine.groups.has_bags,
    )
    fetches = PeerFetches(
        fetch,
        common,
        directory,
        _grid_by_name(common, facts, extent_bytes),
        lambda request_id, num_there: False,
        Pace(common.costs.prefill, common.clock),
        least_tokens=limits.least_tokens,
        pool_share=limits.pool_share,
        peer_wait_seconds=peer_wait_seconds,
    )
    standings = PeerStandings(common.metrics)
    return Below(
        [fetches, probes],
        [fetches],
        name_weights=directory.name_weights,
        hear=standings.hear,
        peers=standings.told,
    )


def _grid_by_name(common: Common, facts: Sequence[TierFacts], extent_bytes: int) -> Grid:
    """How chains are cut where extents are only names: into so many bytes on each rank, at least."""
    groups, num_parts = common.engine.groups, facts[0].num_parts
    slot_bytes = common.slot_bytes * num_parts // len(facts)
    positions = 0
    if groups.columns:
        positions = 1 << max(0, (extent_bytes - 1) // (slot_bytes * groups.columns)).bit_length()
    return Grid(positions, groups.columns, max(positions * groups.columns, groups.bag_slots))


def _turned(take: Callable[[], list[Event]], grid: Grid, groups: Groups) -> Callable[[], Sequence[TierEvent]]:
    """Events of extents, in words of positions and bags where there are bags."""
    if not groups.has_bags:
        return lambda: list(spelled(take(), grid.positions))
    told = ToldExtents(grid.positions)
    return lambda: list(told.turned(take()))


def _parts(facts: Sequence[TierFacts]) -> int:
    """Ranks that share bytes, where most do."""
    return max(fact.num_parts for fact in facts)


def _grid(name: str, common: Common, facts: Sequence[TierFacts]) -> Grid:
    """How chains are cut for the tier of that name, on all ranks alike."""
    sizes = {fact.extent_slots for fact in facts}
    if len(sizes) != 1:
        raise UnsupportedError(
            f"ranks have extents of {sorted(sizes)} blocks in the tier {name}, as their layers take "
            f"different numbers of bytes; remove the tier, or the pipeline stages"
        )
    (slots,) = sizes
    if slots < common.engine.groups.columns:
        raise UnsupportedError(
            f"an extent of the tier {name} has {slots} blocks, and a position of this model "
            f"{common.engine.groups.columns}; its files are of another release, delete them"
        )
    return Grid.of(slots, common.engine.groups.columns)


def _flows(
    spill: Route,
    fetch: Route,
    common: Common,
    contents: Contents,
    grid: Grid,
    budget: WriteBudget,
    facts: Sequence[TierFacts],
    limits: TierLimits,
) -> tuple[Spills, Fetches]:
    """The flow down and the flow up."""
    if common.record_events and grid.columns:
        common.tokens.want()
    spills = Spills(spill, common, contents, grid, budget, limits.admit, limits.shutdown_seconds)
    fetches = Fetches(
        fetch,
        common,
        contents,
        grid,
        spills.arrived,
        Pace(common.costs.prefill, common.clock),
        least_tokens=limits.least_tokens,
        pool_share=limits.pool_share,
    )
    return spills, fetches
