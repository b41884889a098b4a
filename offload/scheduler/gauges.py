"""What metrics say besides counts: how full the pool is, what waits, and what is paused."""

from collections.abc import Sequence
from typing import Any

from offload.scheduler.common import Common
from offload.scheduler.flow import Flow
from offload.scheduler.other_sizes import OtherSizes
from offload.scheduler.stores import Stores


class Gauges:
    """Shows how one scheduler's side stands, whenever metrics are taken."""

    def __init__(
        self, common: Common, stores: Stores, flows: Sequence[Flow[Any]], other_sizes: OtherSizes
    ) -> None:
        """Show how large the pool is, and that nothing is paused."""
        self._other_sizes = other_sizes
        self._common = common
        self._stores = stores
        self._flows = flows
        self._num_evicted_seen = 0
        self._show_size()
        self._paused = [False] * len(flows)
        self._show_paused()

    def show(self) -> None:
        """Show how things stand now. O(routes)."""
        common = self._common
        allocator, ledger, metrics = common.allocator, common.ledger, common.metrics
        metrics.count("evicted_blocks", allocator.num_evicted - self._num_evicted_seen)
        self._num_evicted_seen = allocator.num_evicted
        num_used = allocator.resizing.num_used
        self._show_size()
        metrics.show("pool_used_blocks", num_used)
        self._other_sizes.show()
        metrics.show("pool_used_tokens", common.engine.groups.tokens_in(num_used))
        metrics.show("leased_blocks", allocator.leases.num_slots)
        metrics.show("jobs_in_flight", len(ledger))
        metrics.show("queued_blocks", self._stores.backlog.num_queued)
        metrics.show("stores_answers", self._stores.answers.is_open)
        metrics.show("stuck_jobs", ledger.num_given_up)
        paused = [flow.breaker.is_outage for flow in self._flows]
        if paused != self._paused:
            self._paused = paused
            self._show_paused()

    def take(self) -> dict[str, float]:
        """Show how things stand, and take all metrics; see ``Metrics.take``."""
        self.show()
        return self._common.metrics.take()

    def check_invariants(self) -> None:
        """Nothing is counted that the pool has not evicted."""
        num_evicted = self._common.allocator.num_evicted
        assert self._num_evicted_seen <= num_evicted, f"{num_evicted} evicted, more were counted"

    def _show_size(self) -> None:
        common, num_slots = self._common, self._common.allocator.capacity
        common.metrics.show("pool_blocks", num_slots)
        common.metrics.show("pool_tokens", common.engine.groups.tokens_in(num_slots))
        common.metrics.show("pool_bytes", num_slots * common.slot_bytes)

    def _show_paused(self) -> None:
        for flow, is_paused in zip(self._flows, self._paused, strict=True):
            self._common.metrics.show("route_paused", is_paused, flow.route)
        self._common.metrics.show("paused", any(self._paused))
