"""Connections to peers within one thread: whoever is called is asked as soon as something is sent."""

from collections import deque
from collections.abc import Callable, Sequence

from offload.peering.talk import Buffer, Talk
from offload.worker.peers.link import LostError
from offload.worker.peers.session import Session
from offload.worker.peers.shown import Shown

Carry = Callable[[bytes], Sequence[bytes]]
"""What becomes of bytes on their way, in pieces as they arrive; OSError: the connection is lost."""


class JoinedLink:
    """A ``Link`` to a session in this process. The protocol is the product's own on both sides."""

    def __init__(
        self,
        shown: Shown,
        key: bytes,
        *,
        to_peer: Carry = lambda sent: [sent],
        from_peer: Carry = lambda sent: [sent],
    ) -> None:
        """Call a peer.

        Args:
            shown: what it shows.
            key: of its fleet.
            to_peer: what becomes of what is sent.
            from_peer: the same of what comes back; of each piece before more is asked of the peer.
        """
        self.session = Session(shown, key)
        self._talk: Talk[None] | None = self.session.talk()
        self._to_peer, self._from_peer = to_peer, from_peer
        self._wants: memoryview | None = None
        self._says: deque[bytes | memoryview] = deque()  # of the peer, not sent yet
        self._arrived: deque[memoryview] = deque()
        self._inbox = bytearray()  # of the peer
        self.is_closed = False
        self._go_on()

    def send(self, buffers: Sequence[Buffer]) -> None:
        if self.is_closed:
            raise LostError("it is closed")
        for piece in self._to_peer(b"".join(bytes(each) for each in buffers)):
            self._inbox += piece
        self._go_on()

    def recv_into(self, view: memoryview) -> int:
        while not self._arrived:
            if self.is_closed:
                raise LostError("it is closed")
            if not self._says:
                if self._talk is None:
                    return 0
                raise TimeoutError("the peer says nothing")
            sent = bytes(self._says.popleft())
            self._arrived += [memoryview(piece) for piece in self._from_peer(sent) if piece]
            if not self._says:
                self._go_on()
        piece = self._arrived.popleft()
        taken = min(len(piece), len(view))
        view[:taken] = piece[:taken]
        if taken < len(piece):
            self._arrived.appendleft(piece[taken:])
        return taken

    def close(self) -> None:
        self.is_closed = True
        self.hang_up()

    def hang_up(self) -> None:
        """The peer is gone. What has arrived of it can still be received."""
        if self._talk is not None:
            self._talk.close()
        self._talk, self._wants = None, None
        self._says.clear()

    def _go_on(self) -> None:
        """Until the peer has something to send, or waits for more than has come."""
        while self._talk is not None and not self._says:
            if self._wants is not None and len(self._wants):
                taken = min(len(self._inbox), len(self._wants))
                if not taken:
                    return
                self._wants[:taken] = self._inbox[:taken]
                self._wants = self._wants[taken:]
                del self._inbox[:taken]
                continue
            try:
                wants = next(self._talk)
            except (OSError, StopIteration):
                self._talk = None
                return
            if isinstance(wants, memoryview):
                self._wants = wants
            else:
                self._wants = None
                self._says.extend(wants)
