"""Who fetches from this engine, as the ranks that listen have told: for operators."""

from collections.abc import Sequence
from typing import Any

from offload.observe.metrics import Metrics
from offload.peer_messages import MOST_ASKERS, AskerFacts


class Askers:
    """The last word of each rank on each of those that ask it."""

    def __init__(self, metrics: Metrics) -> None:
        """Nobody asks."""
        self._metrics = metrics
        self._facts: dict[tuple[str, str], dict[int, AskerFacts]] = {}  # by host and id, by rank

    def hear(self, facts: Sequence[AskerFacts], served_bytes: int) -> None:
        """Ranks tell of these, and how many bytes all have had since they told last. O(these)."""
        self._metrics.count("served_bytes", served_bytes)
        for fact in facts:
            key = (fact.host, fact.peer)
            if key not in self._facts and len(self._facts) >= MOST_ASKERS:
                self._forget_one()
            self._facts.setdefault(key, {})[fact.rank] = fact

    def told(self) -> list[dict[str, Any]]:
        """For operators, plain: each with what all ranks together have let it have."""
        return [
            {
                "host": host,
                "peer": peer,
                "num_connections": sum(each.connections for each in by_rank.values()),
                "num_ranks": len(by_rank),
                "num_questions": sum(each.questions for each in by_rank.values()),
                "num_bytes": sum(each.nbytes for each in by_rank.values()),
                "seconds": max(each.seconds for each in by_rank.values()),
                "is_near": any(each.is_near for each in by_rank.values()),
            }
            for (host, peer), by_rank in self._facts.items()
        ]

    def check_invariants(self) -> None:
        """What is told of a rank is that rank's."""
        for key, by_rank in self._facts.items():
            for rank, fact in by_rank.items():
                assert (fact.rank, (fact.host, fact.peer)) == (rank, key), f"{fact} is filed under {key}"
        assert len(self._facts) <= MOST_ASKERS, f"{len(self._facts)} askers"

    def _forget_one(self) -> None:
        """One that is not connected any more, and the one that came first if all are."""
        gone = [
            key
            for key, by_rank in self._facts.items()
            if not any(each.connections for each in by_rank.values())
        ]
        del self._facts[gone[0] if gone else next(iter(self._facts))]
