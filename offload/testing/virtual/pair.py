"""Virtual engines that hand KV to each other, over a network that may harm what goes between them."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from offload.fleet_config import Address, peer_name
from offload.scheduler.tiers.tier import TierLimits
from offload.testing.virtual.drawing import (
    with_drafts,
    with_replicas,
    with_shared_blocks,
    with_stages,
    with_varied_model,
)
from offload.testing.virtual.engine import VirtualEngine
from offload.testing.virtual.groups import MODELS
from offload.testing.virtual.network import Harm, VirtualNetwork
from offload.testing.virtual.settings import VirtualSettings
from offload.testing.virtual.workload import Workload
from offload.transfer_params import KVTransferParams

_HOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 1000, 16
_NO_HARM = Harm()
_NAMED = 1_000_000
_KILLED, _CUT_OFF = 0.005, 0.01
"""In so many turns an engine is killed, or cannot be reached for a while."""
_REST_STEPS, _REST_SECONDS = 5000, 100.0
"""Enough to come to rest: copies and the queue are given up after 30 seconds, one after the other."""


class FleetWorkload(Workload):
    """Asks an engine of a fleet for what others were asked for, with references of all kinds."""

    def __init__(self, fleet: "VirtualFleet", index: int, rng: random.Random) -> None:
        """That one of the fleet is asked."""
        super().__init__(fleet.engines[index], rng)
        self._fleet = fleet
        self._index = index

    def _with_reference(self, prompt: list[int], hints: dict[str, Any] | None) -> dict[str, Any] | None:
        rng, fleet = self._rng, self._fleet
        others = [index for index in range(len(fleet.engines)) if index != self._index]
        draw, other = rng.random(), rng.choice(others)
        told = list(fleet.engines[other].told.values())
        if draw < 0.3 and told:  # of some prompt, perhaps of this one
            reference = rng.choice(told[-8:]).to_dict()
        elif draw < 0.6:
            reference = KVTransferParams(**fleet.reference(other)).to_dict()
        elif draw < 0.7:
            number = rng.choice([0, 5, 1 << 40])
            reference = KVTransferParams(**fleet.reference(other)).to_dict() | {
                rng.choice(["cpu_offload_from_tokens", "cpu_offload_from_epoch"]): number
            }
        else:
            return hints
        return {**(hints or {}), **reference}

    def _reset(self) -> None:
        engine = self._engine
        before = engine.generation
        super()._reset()
        if engine.generation != before and engine.generation < _NAMED:
            engine.generation = next(self._fleet.generations)  # of weights that no other engine has


class VirtualFleet:
    """Engines that step in turn. Each listens or fetches, or does both.

    Attributes:
        network: over which they meet.
        engines: that live, in the order of their addresses.
        counts: of engines that are over.
    """

    def __init__(
        self,
        settings: VirtualSettings,
        roles: Sequence[str],
        rng: random.Random,
        *,
        network: VirtualNetwork | None = None,
    ) -> None:
        """Start an engine for each role: "prefill" listens, "decode" fetches, and "both" does both.

        Args:
            settings: of each of them.
            roles: of each.
            rng: decides all that is random.
            network: that they have; None: one that does no harm.
        """
        self.network = VirtualNetwork() if network is None else network
        self._settings = replace(settings, network=self.network)
        self._roles = list(roles)
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self.generations = itertools.count(1)
        """Of weights without a name."""
        self.over: list[VirtualEngine] = []
        """Engines that have ended."""
        self.engines = [self._start(index) for index in range(len(roles))]

    def address(self, index: int) -> Address:
        """Where the first rank of that engine listens."""
        return Address(_HOST, _FIRST_PORT + index * _PORTS)

    def reference(self, index: int) -> dict[str, Any]:
        """What a request says of an engine that listens; nothing if nobody listens there."""
        address = self.address(index)
        door = self.network.doors.get((address.host, address.port))
        if door is None or door.shown.life is None:
            return {}
        epoch = door.shown.life.epoch
        known = {"epoch": epoch.hex()} if any(epoch) else {}
        return {"peer": peer_name(address).hex(), **known}

    def kill(self, index: int) -> None:
        """That engine ends, whatever it is at, and another starts at the same address."""
        self._end(index)
        self.engines[index] = self._start(index)

    def cut_off(self, index: int) -> None:
        """Nothing reaches that engine any more."""
        self.network.cut_off |= self._wheres(index)

    def reach(self, index: int) -> None:
        """It can be reached again."""
        self.network.cut_off -= self._wheres(index)

    def come_to_rest(self) -> None:
        """All engines end what they have begun, and none holds anything for another."""
        self.network.harm, self.network.cut_off = _NO_HARM, set()
        steps = max(_REST_STEPS, int(_REST_SECONDS / self._settings.step_seconds))
        for engine in self.engines:
            engine.drain(steps)
        for engine in self.engines:  # what they have told each other since
            engine.add([0], 1)
            engine.drain(steps)
        for engine in self.engines:
            engine.audit.check_drained()
            engine.audit.check_gpu_cache()
        self.network.check_invariants()

    def close(self) -> None:
        """Release threads and memory."""
        for index in range(len(self.engines)):
            self._end(index)
        self.engines = []
        assert not self.network.doors, f"{list(self.network.doors)} are open, and nobody is there"

    # Private

    def _start(self, index: int) -> VirtualEngine:
        role = self._roles[index]
        listens, fetches = role != "decode", role != "prefill"
        fleet: dict[str, Any] = {**self._settings.fleet, "role": role}
        if listens:
            fleet["listen"] = self.address(index).shown
        if fetches:
            fleet["peers"] = [
                self.address(other).shown
                for other, role in enumerate(self._roles)
                if role != "decode" and other != index
            ]
        engine = VirtualEngine(replace(self._settings, fleet=fleet), self._rng)
        engine.audit.explain_failures = True
        self.network.engines.append(engine)
        return engine

    def _end(self, index: int) -> None:
        engine = self.engines[index]
        self.counts += engine.counts
        self.over.append(engine)
        engine.close()

    def _wheres(self, index: int) -> set[tuple[str, int]]:
        host, port = self.address(index)
        return {(host, port + rank) for rank in range(self._settings.num_ranks)}


def draw_fleet(
    settings: VirtualSettings, rng: random.Random
) -> tuple[VirtualSettings, list[str], VirtualNetwork]:
    """Engines of a fleet, of models and ranks of any kind, their roles, and what lies between them."""
    models = [partial(with_varied_model, model=each) for each in MODELS if each != "plain"]
    changes: list[Callable[..., VirtualSettings]] = [*models, with_drafts, with_replicas]
    changes += [with_shared_blocks, with_stages]
    if rng.random() < 0.6:
        settings = rng.choice(changes)(settings, rng=rng)
    harm = Harm()
    if rng.random() < 0.7:
        rates = {each.name: rng.choice([0.0, 0.0, 0.0, 0.02, 0.1]) for each in fields(Harm)}
        harm = Harm(**rates)
    limits = TierLimits(
        least_tokens=rng.choice([1, 4, 20]),
        pool_share=rng.choice([0.1, 0.25, 1.0]),
        wait_seconds=rng.choice([0.02, 0.2, 3.0]),
    )
    settings = replace(
        settings,
        fleet={"lease_seconds": rng.choice([3, 20, 60]), "lease_share": rng.choice([0.25, 0.5, 1.0])},
        peer_limits=limits,
        peer_extent=rng.choice([1, 1, 4, 16]),
        step_seconds=rng.choice([0.005, 0.05, 1.0]),
        fetch_gpu_share=rng.choice([0.1, 1.0, 1.0]),
    )
    roles = rng.choice(
        [["prefill", "decode"], ["prefill", "both"], ["both", "both"], ["prefill", "prefill", "decode"]]
    )
    network = VirtualNetwork(random.Random(rng.random()), harm, is_far=rng.random() < 0.5)
    return settings, roles, network


def run_fleet(seed: int, turns: int, settings: VirtualSettings, rng: random.Random) -> VirtualFleet:
    """Drive a fleet through a random workload until it rests. Whatever does not hold is raised.

    ``seed`` decides what the fleet is like beside ``settings``, ``rng`` what happens to it.
    """
    settings, roles, network = draw_fleet(settings, random.Random(f"fleet of {seed}"))
    fleet = VirtualFleet(settings, roles, rng, network=network)
    workloads = [FleetWorkload(fleet, index, rng) for index in range(len(roles))]
    for workload in workloads:
        workload.ask_as(workloads[0])
    try:
        for _ in range(turns):
            which = rng.randrange(len(roles))
            if rng.random() < _KILLED:
                fleet.kill(which)
                workloads[which].move_to(fleet.engines[which])
            if rng.random() < _CUT_OFF:
                fleet.cut_off(which)
            elif rng.random() < 10 * _CUT_OFF:
                fleet.reach(which)
            workloads[which].turn()
            network.check_invariants()
        fleet.come_to_rest()
    finally:
        fleet.close()
    fleet.counts += network.counts
    return fleet
