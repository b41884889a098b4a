"""Takes the time of every call that vLLM's scheduler makes into a connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PHASES = {
    "on_new_request": "lookup",
    "get_num_new_matched_tokens": "lookup",
    "update_state_after_alloc": "plan",
    "build_connector_meta": "plan",
    "update_connector_output": "complete",
    "request_finished": "finish",
    "request_finished_all_groups": "finish",
    "get_external_cache_hit_sources": "other",
    "get_kv_connector_stats": "other",
    "get_loaded_kv_cache_group_ids": "other",
    "has_pending_block_frees": "other",
    "has_pending_push_work": "other",
    "take_events": "other",
}
"""Which phase of a request's life each of the scheduler's calls belongs to."""


class Stopwatch:
    """Nanoseconds of ``clock`` spent in a connector of scheduler role since the last ``take``, by phase."""

    def __init__(self, connector: Any, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._spent: dict[str, int] = {}
        for name, phase in PHASES.items():
            setattr(connector, name, self._timed(getattr(connector, name), phase))

    def take(self) -> dict[str, int]:
        """Nanoseconds by phase, and start again at 0."""
        spent, self._spent = self._spent, {}
        return spent

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        clock = self._clock

        def timed(*arguments: Any) -> Any:
            began = clock()
            result = method(*arguments)
            ended = clock()
            self._spent[phase] = self._spent.get(phase, 0) + ended - began
            return result

        return timed
