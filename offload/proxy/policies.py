"""Which engines serve a request: the seam for strategies, and the two that look at nothing but engines."""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

__all__ = ["Engine", "Fleet", "LeastLoad", "Policy", "Request", "RoundRobin", "Route"]


class Engine(NamedTuple):
    """An engine that may be chosen, as it is at this moment.

    Attributes:
        url: by which it is known.
        role: ``prefill``, ``decode`` or ``both``.
        running: decode legs that run there now.
        prompt_tokens: of prompts that are being prefilled there now, estimated where nobody has counted.
    """

    url: str
    role: str
    running: int
    prompt_tokens: int


class Fleet(NamedTuple):
    """Engines that may be chosen now: they live, do not drain, and have not failed this request.

    Attributes:
        prefill: those that may prefill for another; empty if the request is to be decoded alone.
        decode: those that may decode; never empty.
    """

    prefill: Sequence[Engine]
    decode: Sequence[Engine]


class Request(NamedTuple):
    """What is known of a request before it is sent anywhere.

    Attributes:
        path: such as ``/v1/completions``.
        model: its name, as the client gives it.
        num_tokens: of the prompt, estimated where the client sends text.
        token_ids: of the prompt, where the client sends them; None: it sends text, or several prompts.
        text: pieces of the prompt, in order, as bytes; empty where there are token ids. They begin with what
            else must be equal for a prefix to be equal, such as model and ``cache_salt``.
        body: the whole request, as JSON. Nobody changes it.
        authorization: the client's header, for questions to engines in its name.
    """

    path: str
    model: str
    num_tokens: int
    token_ids: Sequence[int] | None
    text: Sequence[bytes]
    body: dict[str, object]
    authorization: str | None


class Route(NamedTuple):
    """Engines that serve a request.

    Attributes:
        prefill: computes the prompt's KV first; None: nobody does.
        decode: answers.
    """

    prefill: Engine | None
    decode: Engine


class Policy(Protocol):
    """A strategy. One object serves all requests, on one thread.

    It may remember what it wants. What it raises, and a route to engines that are not in the fleet, count as
    no choice: the request goes where the load is least.
    """

    def choose(self, request: Request, fleet: Fleet) -> Route | Awaitable[Route]:
        """Where a request goes. Called again, with the rest of the fleet, when an engine has failed it."""
        ...


class RoundRobin:
    """Each engine in its turn, whatever it has to do. O(1)."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: Request, fleet: Fleet) -> Route:
        number = self._num_chosen
        self._num_chosen += 1
        prefill = fleet.prefill[number % len(fleet.prefill)] if fleet.prefill else None
        return Route(prefill, fleet.decode[number % len(fleet.decode)])


class LeastLoad:
    """The fewest prompt tokens to prefill, the fewest requests to decode; else in turn. O(engines)."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: Request, fleet: Fleet) -> Route:
        self._num_chosen += 1
        prefill = least(fleet.prefill, [each.prompt_tokens for each in fleet.prefill], self._num_chosen)
        decode = least(
            fleet.decode,
            [each.running + each.prompt_tokens / 4096 for each in fleet.decode],
            self._num_chosen,
        )
        assert decode is not None
        return Route(prefill, decode)


def least(engines: Sequence[Engine], loads: Sequence[float], turn: int) -> Engine | None:
    """The engine with the least load; among equals, the next from place ``turn`` on. None: there are none."""
    if not engines:
        return None
    start = turn % len(engines)
    places = [*range(start, len(engines)), *range(start)]
    return engines[min(places, key=loads.__getitem__)]
