"""Who asks this rank, and what each of them has had."""

from dataclasses import astuple, dataclass

from offload.peer_messages import MOST_ASKERS, AskerFacts


@dataclass(slots=True, eq=False)
class Asker:
    """An engine that fetches from this rank, or several of one machine that do not listen themselves.

    It has what ``AskerFacts`` has behind the rank, in that order.
    """

    host: str
    peer: str
    connections: int = 0
    questions: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    is_near: bool = False


class Askers:
    """All of them. One thread changes them, and any other may ask for what there is to tell."""

    def __init__(self, own: str = "", most: int = MOST_ASKERS) -> None:
        """Nobody has asked.

        Args:
            own: this engine's id: it may find itself among its peers, and is none of those that ask.
            most: that are remembered, more than are ever connected at once.
        """
        self._own = own
        self._most = most
        self._askers: dict[tuple[str, str], Asker] = {}  # who came first is first
        self.served_bytes = 0
        """Of slots that all have had, those that were forgotten as well."""

    def enter(self, host: str, peer: str) -> Asker:
        """It has connected. O(1), but for the first of more than are remembered: O(``most``)."""
        if peer and peer == self._own:
            return Asker(host, peer, connections=1)
        asker = self._askers.get((host, peer))
        if asker is None:
            if len(self._askers) >= self._most:
                gone = next((key for key, each in self._askers.items() if not each.connections), None)
                del self._askers[next(iter(self._askers)) if gone is None else gone]
            asker = self._askers[(host, peer)] = Asker(host, peer)
        asker.connections += 1
        return asker

    def leave(self, asker: Asker) -> None:
        """One of its connections is over."""
        asker.connections -= 1

    def serve(self, asker: Asker, num_bytes: int) -> None:
        """So many bytes of slots were sent to it, or may have been read."""
        if not asker.peer or asker.peer != self._own:
            self.served_bytes += num_bytes
        asker.nbytes += num_bytes

    def facts(self, rank: int) -> list[AskerFacts]:
        """What there is to tell of each, to the scheduler's side."""
        return [AskerFacts(rank, *astuple(each)) for each in list(self._askers.values())]

    def check_invariants(self) -> None:
        """No more are remembered than may be, and each is filed where it belongs."""
        assert len(self._askers) <= self._most, f"{len(self._askers)} askers"
        known = sum(each.nbytes for each in list(self._askers.values()))
        assert known <= self.served_bytes, f"askers have had {known} bytes, {self.served_bytes} are counted"
        for key, each in list(self._askers.items()):
            assert key == (each.host, each.peer) and each.connections >= 0, f"{each} is filed under {key}"
