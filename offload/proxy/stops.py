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

    An engine looks for stop strings in what it says itself. What begins before that is found here.

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
        self._start = len(self._text)  # of what the engine says

    def push(self, text: str, is_last: bool, ends_with: object, may_stop: bool) -> Found:
        """What may be sent with ``text`` new.

        Args:
            is_last: the engine says that the answer ends with it.
            ends_with: the stop string that the engine has found at its end, if that is why.
            may_stop: all of its tokens come after those that there must be.
        """
        before = len(self._text)
        self._text += text
        found = self._across(before) if may_stop else None
        if found is None and ends_with in self._stops and self._text.endswith(str(ends_with)):
            found = len(self._text), str(ends_with)
        if found is not None:
            end, stop = found
            return Found(self._text[self._sent : end if self._is_included else end - len(stop)], stop)
        held = 0 if is_last or self._is_included else self._reach
        upto = max(self._sent, len(self._text) - held)
        told = self._text[self._sent : upto]
        cut = max(0, min(upto, len(self._text) - self._reach))
        self._text, self._sent, self._start = self._text[cut:], upto - cut, self._start - cut
        return Found(told, None)

    def _across(self, before: int) -> tuple[int, str] | None:
        """Of the stop strings that begin before what the engine says, the first to end after a place."""
        ends = []
        for rank, stop in enumerate(self._stops if self._start > 0 else ()):
            at = self._text.find(stop, max(0, before + 1 - len(stop)), self._start + len(stop) - 1)
            if at >= 0:
                ends.append((at + len(stop), rank, stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop
