"""How peers stand, as the ranks have told: for metrics, and for operators."""

from collections.abc import Sequence
from typing import Any

from offload.observe.metrics import Metrics
from offload.peer_messages import REMOVED, PeerFacts

CONNECTED = "connected"
OTHER = "other"
_MOST_PEERS = 256
"""That are told of at one time, and that have metrics of their own: further ones count as ``OTHER``."""


class PeerStandings:
    """The last word of each rank on each of its peers. A peer of all ranks is called as its first rank is.

    One that is no peer any more is forgotten. Its metrics stay, as such names do in Prometheus.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Nothing was told."""
        self._metrics = metrics
        self._facts: dict[str, dict[int, PeerFacts]] = {}  # by peer, by rank
        self._named: set[str] = set()

    def hear(self, facts: Sequence[PeerFacts]) -> None:
        """Ranks tell. O(these)."""
        for fact in facts:
            name = first_rank_of(fact)
            if name not in self._facts and len(self._facts) >= _MOST_PEERS:
                continue
            of_peer = self._facts.setdefault(name, {})
            before = of_peer.get(fact.rank)
            of_peer[fact.rank] = fact
            self._count(name, fact, None if before is None or before.state == REMOVED else before)
            if all(each.state == REMOVED for each in of_peer.values()):
                del self._facts[name]

    def _count(self, name: str, fact: PeerFacts, before: PeerFacts | None) -> None:
        label = name if name in self._named or len(self._named) < _MOST_PEERS else OTHER
        was = (0, 0.0, 0) if before is None else (before.nbytes, before.seconds, before.errors)
        self._metrics.count("peer_bytes", max(0, fact.nbytes - was[0]), label)
        self._metrics.count("peer_seconds", max(0.0, fact.seconds - was[1]), label)
        self._metrics.count("peer_errors", max(0, fact.errors - was[2]), label)
        if label != OTHER:
            self._named.add(label)
            is_connected = all(each.state == CONNECTED for each in self._facts[name].values())
            self._metrics.show("peer_connected", float(is_connected), label)

    def told(self) -> list[dict[str, Any]]:
        """For operators, plain: each peer with what all ranks together had of it."""
        found = []
        for name, of_peer in self._facts.items():
            facts = [of_peer[rank] for rank in sorted(of_peer)]
            worst = next((each for each in facts if each.state != CONNECTED), facts[0])
            found.append(
                {
                    "address": name,
                    "peer": facts[0].peer,
                    "epoch": facts[0].epoch,
                    "state": worst.state,
                    "reason": worst.reason,
                    "transport": worst.transport,
                    "num_ranks": len(facts),
                    "num_bytes": sum(each.nbytes for each in facts),
                    "seconds": max(each.seconds for each in facts),
                    "num_fetches": sum(each.gets for each in facts),
                    "num_questions": sum(each.probes for each in facts),
                    "num_misses": sum(each.misses for each in facts),
                    "num_errors": sum(each.errors for each in facts),
                }
            )
        return found

    def check_invariants(self) -> None:
        """What is told of a rank is that rank's."""
        for name, of_peer in self._facts.items():
            for rank, fact in of_peer.items():
                assert (fact.rank, first_rank_of(fact)) == (rank, name), f"{fact} is filed under {name}"
        assert len(self._facts) <= _MOST_PEERS, f"{len(self._facts)} peers"
        assert len(self._named) <= _MOST_PEERS, f"{len(self._named)} names of peers"


def first_rank_of(fact: PeerFacts) -> str:
    """The address of a peer's first rank: ports of the others follow."""
    host, _, port = fact.address.rpartition(":")
    return f"{host}:{int(port) - fact.rank}"
