"""What an engine does wrong on purpose, and when."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Fault", "Faults"]

Kind = Literal["status", "drop", "hang", "end", "error_event", "garbage", "wait", "write"]


@dataclass(frozen=True)
class Fault:
    """One fault of one answer.

    Attributes:
        kind: ``status``: answer with a status; ``drop``: cut the connection; ``hang``: say nothing more;
            ``end``: end the stream in order, but early; ``error_event``: an event with an error, then an end;
            ``garbage``: what is not JSON, then the end; ``wait``: go on once ``until`` is set.
        after: how many tokens are sent before it; -1: before the head of the answer.
        status: of ``status``, and of the error of ``error_event``.
        body: of ``status``, instead of an error in JSON; of ``write``.
        until: what ``wait`` waits for.
    """

    kind: Kind
    after: int = -1
    status: int = 500
    body: bytes | None = None
    until: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Faults:
    """What an engine does with its next requests.

    Attributes:
        queue: faults of the next requests, one each; then none.
        always: the fault of all others.
        choose: says the fault of a request by its path and body; asked first.
    """

    queue: list[Fault | None] = field(default_factory=list)
    always: Fault | None = None
    choose: Callable[[str, Mapping[str, Any]], Fault | None] | None = None

    def next(self, path: str, body: Mapping[str, Any]) -> Fault | None:
        """That of a request which has come."""
        if self.choose is not None and (chosen := self.choose(path, body)) is not None:
            return chosen
        return self.queue.pop(0) if self.queue else self.always
