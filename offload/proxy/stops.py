"""Stop strings of an answer that goes on at another engine: they may begin before the place where it does."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Found", "Stops", "stops_of"]


class Found(NamedTuple):
    """What may be sent of new text.

    Attributes:
        text: it.
        stop: the stop string that ends the answer here; None: it goes on.
    """

    text: str
    stop: str | None


def stops_of(value: object) -> tuple[str, ...]:
    """The stop strings of a request."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(each for each in value if isinstance(each, str) and each) if isinstance(value, list) else ()


class Stops:
    """Text in, text out, less what may be the beginning of a stop string.

    Args:
        stops: at least one, none empty.
        is_included: the answer keeps the stop string that ends it.
        sent: the end of the text that the client has.
        held: what follows it and the client does not have. No stop string ends in it.
    """

    def __init__(self, stops: Sequence[str], is_included: bool, sent: str, held: str) -> None:
        self._stops = stops
        self._is_included = is_included
        self._reach = max(map(len, stops)) - 1
        tail = sent[max(0, len(sent) - self._reach) :]
        self._text = tail + held
        self._sent = len(tail)

    def push(self, text: str, is_last: bool, may_stop: bool) -> Found:
        """What may be sent with ``text`` new. ``may_stop``: there are as many tokens as there must be."""
        before = len(self._text)
        self._text += text
        if may_stop and (found := self._first_after(before)) is not None:
            end, stop = found
            return Found(self._text[self._sent : end if self._is_included else end - len(stop)], stop)
        held = 0 if is_last or self._is_included else self._reach
        upto = max(self._sent, len(self._text) - held)
        told = self._text[self._sent : upto]
        cut = max(0, min(upto, len(self._text) - self._reach))
        self._text, self._sent = self._text[cut:], upto - cut
        return Found(told, None)

    def _first_after(self, before: int) -> tuple[int, str] | None:
        """The stop string that ends first after a place, and its end."""
        ends = []
        for rank, stop in enumerate(self._stops):
            at = self._text.find(stop, max(0, before + 1 - len(stop)))
            if at >= 0:
                ends.append((at + len(stop), rank, stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop
