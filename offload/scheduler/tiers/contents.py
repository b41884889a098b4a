"""What a tier has, as its two flows see it: the seam between them and what knows about it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from allocator import Note
from offload.messages import Extents, Ids
from offload.scheduler.tiers.names import Path


class Reading(Protocol):
    """Extents of a chain that are being read."""

    @property
    def place(self) -> str:
        """The place that they are read from, if it has a name of its own beside the tier's; or ``""``."""

    def extents(self, starts: Ids, skips: Ids) -> Extents:
        """What workers must know of them: ``starts`` and ``skips`` as in ``Extents``."""


class Writing(Protocol):
    """Extents ``start <= i < stop`` of a chain that are being written."""

    @property
    def start(self) -> int:
        """The first."""

    @property
    def stop(self) -> int:
        """Behind the last."""


class Contents(Protocol):
    """Says what a tier has, without I/O and without waiting. Names are those of a chain's extents, in order.

    A ``Directory`` knows it, as nobody else writes there. A ``SharedDirectory`` has beliefs, and asks.
    """

    @property
    def num_used(self) -> int | None:
        """Extents that it keeps; None: nobody knows."""

    @property
    def has_room(self) -> bool:
        """Whether nothing has to go for what is written."""

    def find(self, request_id: str, names: Sequence[bytes]) -> int | None:
        """How many leading extents it has, for that request; None: not known yet, ask again in a step."""

    def find_checkpoint(
        self, request_id: str, chain: Sequence[bytes], limit: int, path_to: Callable[[int], Path]
    ) -> int | None:
        """The deepest checkpoint within the first ``limit`` positions of which it has all; 0: none; None: see
        ``find``. ``path_to`` gives the extents that it takes to go on at a depth."""

    def touch(self, names: Sequence[bytes]) -> None:
        """A request asks for these. Once for each request."""

    def answered(self) -> list[str]:
        """Requests of which more is known since the last call."""

    def depth(self, names: Sequence[bytes]) -> int:
        """How many leading extents it has, as far as is known now."""

    def known_depth(self, names: Sequence[bytes]) -> int:
        """The same, with those that are being written."""

    def read(self, names: Sequence[bytes], start: int, stop: int) -> Reading:
        """Begin to read these extents, which it has."""

    def end_read(self, reading: Any) -> None:
        """That is over."""

    def write(
        self, names: Sequence[bytes], stop: int, limit: int, note: Note | None = None
    ) -> Writing | None:
        """Begin to write unknown ones of the first ``stop`` extents, ``limit`` at most; None: it has none.

        ``note``: makes an ``ExtentsNote`` of those that are written, for events.
        """

    def extents(self, writing: Any, job_id: int, starts: Ids) -> Extents:
        """What workers must know of them: ``starts`` as in ``Extents``."""

    def end_write(self, writing: Any, *, is_good: bool) -> None:
        """They are there, or never will be."""

    def drop(self, names: Sequence[bytes], index: int) -> int:
        """That extent is wrong or gone: it and what follows it are no longer known.

        Returns how many of these names followed it, as far as was known.
        """

    def reset(self) -> None:
        """Weights may have changed: it has nothing for this life."""

    def name_weights(self, suffix: bytes) -> None:
        """There was a reset, and nothing was written since: it has what was written with that suffix."""

    def tidy(self) -> None:
        """A step ends."""

    def check_invariants(self) -> None:
        """It agrees with itself. For tests."""
