"""What an engine says of itself at its operator socket."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig

from offload.config import OffloadConfig
from offload.errors import OperatorError
from offload.messages import MemoryFacts
from offload.observe.lately import Lately
from offload.operator.directory import runtime_directory
from offload.operator.server import OperatorSocket
from offload.scheduler.pool_target import PoolTarget
from offload.scheduler.side import SchedulerSide
from offload.scheduler.weights import Weights
from offload.scheduler.why.notes import Notes
from offload.vllm.about import about_engine, settings_of
from offload.vllm.places import Place
from offload.vllm.request_ids import MOST_CHARACTERS, names

logger = logging.getLogger(__name__)

_MOST_EXPLAINED = 64
"""Requests of one id: choices, and prompts."""
_SECONDS = 0.5
"""What is said is that old at most while the engine makes steps."""


class Operator:
    """Tells the operator socket how the scheduler's side stands; of one engine, in its scheduler's process.

    Only the engine's thread calls it, and reads the scheduler's side here. What it makes of that, the
    socket's thread gets as a whole. If there is no socket, it does nothing.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: OffloadConfig,
        places: Sequence[Place],
        weights: Weights,
        target: PoolTarget,
    ) -> None:
        """Open the socket. A warning says why if it cannot be had; the engine goes on without it."""
        about = {"about": about_engine(vllm_config), "settings": settings_of(vllm_config, config)}
        self._engine: dict[str, Any] = about | {"memory": []}
        self._lately = Lately(time.monotonic())
        self._tiers = [place.about for place in places]
        self._weights = weights
        self._next = 0.0
        self._shows_jobs = False  # in what was published last
        self._socket: OperatorSocket | None = None
        self._notes: Notes | None = None  # once there is a scheduler's side
        told: dict[str, Any] = self._engine | {"as_of": None, "pool": None, "jobs": None}
        told |= {
            "counters": self._lately.told(time.monotonic(), {}),
            "routes": [],
            "prefill": [],
            "tiers": [],
            "peers": [],
            "askers": [],
            "leases": {"num_leases": 0},
        }
        try:
            handlers = {
                "weights": lambda request: weights.told,
                "reset": self._name_weights,
                "explain": self._explain,
                "size": lambda request: target.told,
                "resize": lambda request: target.ask(request.get("gib")),
            }
            self._socket = OperatorSocket(runtime_directory(config.operator_socket), told, handlers)
        except OperatorError as error:
            logger.warning("no operator socket: %s; kv-offload status will not find this engine", error)

    def learn(self, memory: Sequence[MemoryFacts | None]) -> None:
        """Ranks say where their parts of the pool lie, in any order."""
        self._engine["memory"] = [each._asdict() for each in memory if each is not None]

    def tell(self, side: SchedulerSide) -> None:
        """A step begins: publish how things stand, if that was not done just before. O(routes)."""
        self._notes = side.notes
        if self._socket is None or time.monotonic() < self._next:
            return
        self._publish(side)

    def settle(self, side: SchedulerSide) -> None:
        """Workers reported. Where nothing is in flight any more, the engine may be idle from now on."""
        if self._shows_jobs and not len(side.ledger):
            self._publish(side)

    def close(self) -> None:
        """The engine ends."""
        if self._socket is not None:
            self._socket.close()

    def check_invariants(self) -> None:
        """It tells of the process that it is in."""
        assert self._socket is None or self._socket.name.startswith(f"{os.getpid()}-"), "it was forked"
        self._lately.check_invariants()

    def _publish(self, side: SchedulerSide) -> None:
        assert self._socket is not None, "there is no socket"
        self._next = time.monotonic() + _SECONDS
        self._shows_jobs = len(side.ledger) > 0
        self._socket.publish(self._told(side))

    def _name_weights(self, request: Mapping[str, Any]) -> dict[str, object]:
        """On the socket's thread."""
        after = request.get("after")
        if not isinstance(after, int | None):
            raise OperatorError(f"after is {after!r}; give the number of a reset")
        self._weights.name(request.get("weights_version"), after)  # type: ignore[arg-type]  # looked at there
        return self._weights.told

    def _explain(self, request: Mapping[str, Any]) -> dict[str, object]:
        """On the socket's thread."""
        asked, notes = request.get("id"), self._notes
        if not isinstance(asked, str) or not 0 < len(asked) <= MOST_CHARACTERS:
            raise OperatorError(f"give the id of a request, a text of {MOST_CHARACTERS} characters at most")
        found = [] if notes is None else notes.of(lambda each: names(each, asked), _MOST_EXPLAINED)
        return {"requests": [] if notes is None else [each.told(notes.now) for each in found]}

    def _told(self, side: SchedulerSide) -> Mapping[str, Any]:
        allocator, gauges = side.allocator, side.metrics.gauges
        totals = side.metrics.totals | {"evicted_blocks": float(allocator.num_evicted)}
        return {
            **self._engine,
            "as_of": time.time(),
            "counters": self._lately.told(time.monotonic(), totals),
            "pool": {
                "num_blocks": allocator.capacity,
                "num_used_blocks": allocator.resizing.num_used,
                "num_bytes": int(gauges["pool_bytes"]),
                "num_tokens": int(gauges["pool_tokens"]),
                "num_evicted_blocks": allocator.num_evicted,
                "num_adopted_blocks": int(gauges.get("adopted_blocks", 0)),
                "is_lazy": side.stores.later is not None,
            },
            "jobs": {
                "num_in_flight": len(side.ledger),
                "num_stuck": side.ledger.num_given_up,
                "num_queued_blocks": side.stores.backlog.num_queued,
            },
            "routes": [
                {
                    "route": flow.route.label,
                    "is_paused": flow.breaker.is_outage,
                    "seconds_per_job": link.per_job,
                    "seconds_per_byte": link.per_byte,
                }
                for flow in side.flows
                for link in [side.costs.link(flow.route)]
            ],
            "prefill": [
                {"from_tokens": depth, "seconds_per_token": seconds}
                for depth, seconds in side.costs.prefill.by_depth().items()
            ],
            "peers": [each for below in side.below if below.peers is not None for each in below.peers()],
            "askers": side.askers.told(),
            "leases": {"num_leases": len(side.stores.hand_offs.leases)},
            "tiers": [
                {
                    **about,
                    **({"namespace": below.namespace} if below.namespace else {}),
                    **({} if below.standing is None else below.standing()._asdict()),
                }
                for about, below in zip(self._tiers, side.below, strict=True)
            ],
        }
