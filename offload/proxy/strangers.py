"""Whether decode engines know the prefill engines whose hand-offs they are sent, by their own counters."""

import re

from offload.proxy.core import Core
from offload.proxy.faults import EngineError
from offload.proxy.members import Leg, Member

__all__ = ["Strangers"]

_COUNTER = re.compile(
    rb'^vllm:cpu_offload_unused_hand_offs_total\{[^}\n]*reason="unknown_peer"[^}\n]*\} (\S+)', re.M
)


class Strangers:
    """Reads the counter of hand-offs that came from no peer, of engines that were sent some since.

    Engines tell nothing of that in their answers. So the proxy says what it has sent where.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._counts: dict[str, float] = {}

    async def look(self, member: Member) -> None:
        """Ask an engine, if it has been sent hand-offs since it was asked last. Never raises."""
        if not member.handed:
            return
        senders, member.handed = sorted(member.handed), set()
        leg = Leg(lambda: False)
        try:
            told = await self._core.upstreams.get(
                f"{member.url}/metrics", leg, self._core.settings.health_seconds
            )
        except EngineError:
            return
        count = count_in(told.body) if told.status == 200 else None
        if count is None:
            return
        more = count - self._counts.get(member.url, 0.0)
        self._counts[member.url] = count
        if more <= 0:  # it was started again
            return
        self._core.metrics.strangers.labels("unknown peer").inc(more)
        self._core.warn_once(
            "stranger",
            member.url,
            *senders,
            text=f"decode engine {member.url} was sent hand-offs of {', '.join(senders)}, and does not know "
            f"who that is; name all prefill engines among its peers: it computes their prompts again",
        )


def count_in(text: bytes) -> float | None:
    """The counter, over all engines of a server. None: it has none yet."""
    found = _COUNTER.findall(text)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None
