"""Virtual engines that hand KV to each other, over a network that may harm what goes between them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offload.fleet_config import Address, peer_name
from offload.testing.virtual.engine import VirtualEngine
from offload.testing.virtual.network import Harm, VirtualNetwork
from offload.testing.virtual.settings import VirtualSettings

_HOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 1000, 16
_NO_HARM = Harm()


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
        self.engines = [self._start(index) for index in range(len(roles))]

    def address(self, index: int) -> Address:
        """Where the first rank of that engine listens."""
        return Address(_HOST, _FIRST_PORT + index * _PORTS)

    def reference(self, index: int) -> dict[str, str]:
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
        for engine in self.engines:
            engine.drain()
        for engine in self.engines:  # what they have told each other since
            engine.add([0], 1)
            engine.drain()
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
        return engine

    def _end(self, index: int) -> None:
        engine = self.engines[index]
        self.counts += engine.counts
        engine.close()

    def _wheres(self, index: int) -> set[tuple[str, int]]:
        host, port = self.address(index)
        return {(host, port + rank) for rank in range(self._settings.num_ranks)}
