"""How peers and askers stand, out of what ranks tell now and then."""

from offload.observe.metrics import Metrics
from offload.peer_messages import REMOVED, AskerFacts, PeerFacts
from offload.scheduler.askers import Askers
from offload.scheduler.tiers.peer_standings import OTHER, PeerStandings
from offload.worker.peers.askers import Askers as OfRank


def fact(port: int, *, rank: int = 0, nbytes: int = 0, state: str = "connected") -> PeerFacts:
    address = f"10.0.0.1:{port + rank}"
    return PeerFacts(rank, address, "0" * 16, "1" * 16, state, "", "tcp", nbytes, 1.0, 2, 3, 4, 0)


def asker(host: str, *, rank: int = 0, nbytes: int = 0, connections: int = 1) -> AskerFacts:
    return AskerFacts(rank, host, "", connections, 5, nbytes, 0.5, False)


class TestPeers:
    def test_a_peer_that_was_removed_on_all_ranks_is_forgotten(self) -> None:
        metrics = Metrics()
        standings = PeerStandings(metrics)
        standings.hear([fact(7000, nbytes=10), fact(7000, rank=1, nbytes=20)])
        standings.hear([fact(7000, nbytes=10, state=REMOVED)])
        [told] = standings.told()
        assert (told["state"], told["num_bytes"]) == (REMOVED, 30)
        standings.hear([fact(7000, rank=1, nbytes=20, state=REMOVED)])
        assert standings.told() == []
        assert metrics.gauges["peer_connected:10.0.0.1:7000"] == 0
        standings.hear([fact(7000, nbytes=5)])  # it is a peer again, and counts from nothing
        assert metrics.take()["peer_bytes:10.0.0.1:7000"] == 35
        assert metrics.gauges["peer_connected:10.0.0.1:7000"] == 1
        standings.check_invariants()

    def test_peers_that_come_and_go_are_all_told_of_and_names_of_metrics_are_bounded(self) -> None:
        metrics = Metrics()
        standings = PeerStandings(metrics)
        for number in range(1000):
            standings.hear([fact(1000 + 2 * number, nbytes=1)])
            assert [each["num_bytes"] for each in standings.told()] == [1]
            standings.hear([fact(1000 + 2 * number, nbytes=1, state=REMOVED)])
            standings.check_invariants()
        counted = {key: value for key, value in metrics.take().items() if key.startswith("peer_bytes:")}
        assert sum(counted.values()) == 1000 and counted[f"peer_bytes:{OTHER}"] == 1000 - 256
        assert len(counted) == 257


class TestAskers:
    def test_ranks_are_added_up(self) -> None:
        metrics = Metrics()
        askers = Askers(metrics)
        askers.hear([asker("a", nbytes=10), asker("a", rank=1, nbytes=30), asker("b", nbytes=1)], 41)
        askers.hear([asker("a", nbytes=15)], 5)
        first, second = askers.told()
        assert (first["host"], first["num_bytes"], first["num_ranks"]) == ("a", 45, 2)
        assert (second["host"], second["num_bytes"], second["num_ranks"]) == ("b", 1, 1)
        assert metrics.take()["served_bytes"] == 46
        askers.hear([asker("a", nbytes=4)], 4)  # a rank had forgotten it
        assert metrics.take()["served_bytes"] == 4
        askers.check_invariants()

    def test_bytes_count_once_however_many_askers_there_are(self) -> None:
        """Two ranks remember 256 each, and not the same: more than are remembered of both."""
        metrics = Metrics()
        askers, ranks = Askers(metrics), [OfRank(), OfRank()]
        for number in range(300):
            for rank, of_rank in enumerate(ranks):
                of_rank.serve(of_rank.enter(f"{number + 200 * rank}", ""), 7)
        for is_new in (True, False):  # ranks tell again of those that were forgotten here
            for rank, of_rank in enumerate(ranks):
                askers.hear(of_rank.facts(rank), of_rank.served_bytes * is_new)
                of_rank.check_invariants()
        askers.check_invariants()
        assert metrics.take()["served_bytes"] == 2 * 300 * 7

    def test_they_are_bounded_and_those_that_are_connected_stay(self) -> None:
        askers = Askers(Metrics())
        askers.hear([asker("stays")], 0)
        askers.hear([asker(f"gone {number}", connections=0) for number in range(1000)], 0)
        askers.check_invariants()
        hosts = [each["host"] for each in askers.told()]
        assert len(hosts) == 256 and hosts[0] == "stays" and hosts[-1] == "gone 999"
