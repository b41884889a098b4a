"""When to look at what next, so that nobody looks at everything in every step."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Lookout(Generic[K]):
    """Keys by the step in which they are due. Each is due once at most; the last word counts.

    Every call is O(1), ``due`` O(keys due).
    """

    def __init__(self) -> None:
        self._step = 0
        self._due_in: dict[K, int] = {}
        self._by_step: dict[int, list[K]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._due_in

    def __iter__(self) -> Iterator[K]:
        return iter(self._due_in)

    def expect(self, key: K, steps: int) -> None:
        """``key`` is due in the ``steps``-th step from now, at least 1."""
        step = self._step + max(steps, 1)
        if self._due_in.get(key) != step:
            self._due_in[key] = step
            self._by_step.setdefault(step, []).append(key)

    def forget(self, key: K) -> None:
        """``key`` is not due any longer."""
        self._due_in.pop(key, None)

    def skip(self) -> bool:
        """A step begins, if nobody is due in it. Else nothing has happened yet: call ``due``."""
        step = self._step + 1
        if step in self._by_step:
            if any(self._due_in.get(key) == step for key in self._by_step[step]):
                return False
            del self._by_step[step]  # all of these were forgotten, or are due in another one
        self._step = step
        return True

    def due(self) -> list[K]:
        """A step begins: the keys that are due in it, in the order in which they were expected."""
        self._step += 1
        keys = []
        for key in self._by_step.pop(self._step, ()):
            if self._due_in.get(key) == self._step:
                del self._due_in[key]
                keys.append(key)
        return keys

    def check_invariants(self) -> None:
        """Whoever is due is found in time, and no step is kept that is over."""
        assert all(step > self._step for step in self._by_step), f"{list(self._by_step)}, it is {self._step}"
        for key, step in self._due_in.items():
            assert step > self._step, f"{key!r} was due in step {step}, it is step {self._step}"
            assert key in self._by_step.get(step, ()), f"{key!r} is not among those due in step {step}"
