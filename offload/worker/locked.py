"""Methods that one thread at a time is in."""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Lockable(Protocol):
    """What has such methods. Its lock lets a thread in again that is in already."""

    lock: threading.RLock


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Lockable)


def locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Wait until no other thread is in a method of the same object that is locked."""

    @functools.wraps(method)
    def inside(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return inside
