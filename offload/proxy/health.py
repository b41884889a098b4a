"""Looks after engines: asks how they are, and moves what runs there when they go."""

import asyncio
import logging

from offload.proxy.core import Core
from offload.proxy.faults import EngineError
from offload.proxy.members import Leg, Member
from offload.proxy.strangers import Strangers

__all__ = ["drain", "watch"]

logger = logging.getLogger(__name__)

NUM_MISSED = 3
"""Questions in a row without an answer after which an engine is down."""
STRANGER_TURNS = 5
"""Looks at health between two looks at what became of hand-offs."""


async def watch(core: Core) -> None:
    """Ask all engines, again and again. Ends when it is cancelled."""
    missed: dict[Member, int] = {}
    strangers, turn = Strangers(core), 0
    while True:
        turn += 1
        members = list(core.members)
        answers = await asyncio.gather(*(_is_well(core, each) for each in members))
        for member, is_well in zip(members, answers, strict=True):
            missed[member] = 0 if is_well else missed.get(member, 0) + 1
            tell(core, member, is_well, missed[member])
        if turn % STRANGER_TURNS == 0:
            await asyncio.gather(*(strangers.look(each) for each in members))
        missed = {member: count for member, count in missed.items() if member in members}
        await asyncio.sleep(core.settings.health_seconds)


def tell(core: Core, member: Member, is_well: bool, num_missed: int) -> None:
    """An engine has said how it is, or has said nothing ``num_missed`` times in a row."""
    if is_well:
        if not member.is_up:
            logger.warning("engine %s is up again", member.url)
        member.is_up = True
        return
    if member.is_up and num_missed == 1:
        member.down_since = core.now()
    if not member.is_up or num_missed < NUM_MISSED:
        return
    logger.warning("engine %s does not say that it is well; others are asked", member.url)
    member.is_up = False
    for leg in list(member.legs):  # what it is asked from now on, for lack of others, may stay
        if leg.at < member.down_since:
            leg.move("its engine is down")


async def drain(core: Core, member: Member) -> int:
    """Wait until requests may not go on at an engine that drains, and move those that can be moved.

    Returns: how many that were. Those that cannot go on elsewhere stay until they end.
    """
    if core.settings.drain_seconds:
        await asyncio.sleep(core.settings.drain_seconds)
    fleet = core.members.fleet({member.url}, True)
    if not member.is_draining or fleet is None:
        return 0
    moved = [leg for leg in member.legs if leg.can_move()]
    for leg in moved:
        leg.move("drained")
    return len(moved)


async def _is_well(core: Core, member: Member) -> bool:
    leg = Leg(lambda: False)
    try:
        told = await core.upstreams.get(f"{member.url}/health", leg, core.settings.health_seconds)
    except EngineError:
        return False
    return told.status < 500
