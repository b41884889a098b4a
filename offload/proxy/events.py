"""Server-sent events: cut out of the bytes of a stream, as they come, and made."""

from collections.abc import Iterator

import msgspec

from offload.proxy.faults import EngineError

__all__ = ["DONE", "Events", "data_of", "error_event", "event"]

DONE = b"data: [DONE]\n\n"


class Events:
    """Bytes in, whole events out, each with the empty line at its end. O(bytes)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Events that are whole now. Raises EngineError if one is too long."""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if self._parts:
            # The empty line may be cut in two.
            if b"\n\n" not in self._parts[-1][-1:] + data:
                self._keep(data)
                return
            data = b"".join([*self._parts, data])
            self._parts, self._size = [], 0
        *whole, rest = data.split(b"\n\n")
        if rest:
            self._keep(rest)
        for each in whole:
            if each.strip(b"\n"):
                yield each.lstrip(b"\n") + b"\n\n"

    @property
    def is_empty(self) -> bool:
        """Whether no part of an event is left."""
        return not self._parts

    def _keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._max_bytes:
            raise EngineError(f"an event of more than {self._max_bytes} bytes")


def data_of(whole: bytes) -> bytes | None:
    """The data of an event; None: it is a comment, or has none. O(bytes)."""
    if whole.startswith(b"data: ") and whole.count(b"\n") == 2:
        return whole[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in whole.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event(data: object) -> bytes:
    """An event of JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(message: str, code: int = 502) -> bytes:
    """What ends a stream that cannot go on, as vLLM and OpenAI's clients have it."""
    return event({"error": {"message": message, "type": "proxy_error", "param": None, "code": code}}) + DONE
