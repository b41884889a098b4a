"""What things cost here, as measured: bytes on a link, tokens that are computed."""

from collections import deque
from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

import numpy as np

from offload.messages import Route

_LATEST = 32
"""Samples that count."""
_SPREAD = 2
"""Sizes must differ by that factor to tell what a job costs from what a byte costs."""
_FAR = 1.5
"""A sample is far from what was expected by that factor."""
_CHANGED = 4
"""Samples in a row that are far, all on one side, tell that a link has changed."""
_LEAST_TOKENS = 256
"""Of a step, to say something about prefill."""
_LEAST_SAMPLES = 4
"""Of a class, to say something: fewer may all be of steps in which the engine has paused."""
_MOST_PLANNED = 64
"""Steps under way. An engine has one or two, and a few more with pipeline stages."""
TOKEN_SECONDS = 0.25e-3
"""That a token is taken to cost as long as nothing was measured."""
_SHORT_TOKENS = 1024
"""Depths below are alike. Behind, each doubling has a class of its own."""


class LinkCost:
    """Seconds per job and per byte of what moves bytes, by what was measured of late.

    A line through the samples, by medians (Theil and Sen): what took long by chance changes nothing. Jobs of
    about one size do not tell what a job takes and what a byte does. Then the last line that is known holds,
    but for the greater part of what such a job takes: that part is as measured. Where no line is known, all
    that they take counts for the bytes.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._samples: deque[tuple[int, float]] = deque(maxlen=_LATEST)
        self._line: tuple[float, float] | None = None
        self._expected: tuple[float, float] | None = None  # the line before the latest samples
        self._told: tuple[float, float] | None = None  # the last line that jobs of several sizes have told
        self._num_faster = self._num_slower = 0  # samples in a row that are far from it
        self.measured_at = -inf
        """When the latest sample came."""

    def add(self, num_bytes: int, seconds: float, now: float = -inf) -> None:
        """A job of so many bytes took that long, and ended ``now``. One without bytes says nothing."""
        if num_bytes <= 0:
            return
        self._samples.append((num_bytes, seconds))
        self._line, self.measured_at = None, now
        if self._expected is not None:
            per_job, per_byte = self._expected
            expected = per_job + num_bytes * per_byte
            self._num_faster = self._num_faster + 1 if seconds * _FAR < expected else 0
            self._num_slower = self._num_slower + 1 if seconds > expected * _FAR else 0
            if max(self._num_faster, self._num_slower) >= _CHANGED:
                self._forget()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._samples)

    @property
    def seems_faster(self) -> bool:
        """Whether the latest jobs took far less than expected, and are too few to tell of a change."""
        return self._num_faster > 0

    @property
    def per_job(self) -> float:
        """Seconds that a job takes whatever its size; 0 if nothing is known."""
        return self._fitted()[0]

    @property
    def per_byte(self) -> float:
        """Seconds that each byte takes beside; 0 if nothing is known."""
        return self._fitted()[1]

    def seconds(self, num_bytes: int) -> float:
        """That a job of so many bytes takes."""
        per_job, per_byte = self._fitted()
        return per_job + num_bytes * per_byte

    def check_invariants(self) -> None:
        """Nothing took less than no time."""
        assert all(seconds >= 0 for _, seconds in self._samples), f"a clock went backwards: {self._samples}"
        assert min(self._fitted()) >= 0, f"more bytes take less time: {self._fitted()}"

    def _forget(self) -> None:
        """The link is another one than before: only what was measured since counts."""
        self._samples = deque(list(self._samples)[-_CHANGED:], maxlen=_LATEST)
        self._num_faster = self._num_slower = 0
        self._expected = None

    def _fitted(self) -> tuple[float, float]:
        if self._line is None:
            self._line = self._expected = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        if not self._samples:
            return 0.0, 0.0
        sizes, times = np.array(self._samples).T
        if sizes.max() >= _SPREAD * sizes.min():
            first, second = np.triu_indices(len(sizes), 1)
            runs = sizes[second] - sizes[first]
            differ = runs != 0
            slope = float(np.median((times[second] - times[first])[differ] / runs[differ]))
            rest = float(np.median(times - slope * sizes))
            if slope >= 0 and rest >= 0:
                self._told = rest, slope
                return self._told
        elif self._told is not None:
            (rest, slope), size, seconds = self._told, float(np.median(sizes)), float(np.median(times))
            changed = (
                (seconds - slope * size, slope) if rest > slope * size else (rest, (seconds - rest) / size)
            )
            if min(changed) >= 0:
                return changed
        return 0.0, float(np.median(times / sizes))


class _Planned(NamedTuple):
    """A step under way: when it was planned, its tokens, and how many are before these in the mean."""

    at: float
    num_tokens: int
    depth: float


class _Ended(NamedTuple):
    """A step that was measured."""

    num_tokens: int
    seconds: float

    def differs(self, other: "_Ended") -> bool:
        """Whether both tell what a step takes, and what a token does."""
        few, many = sorted((self.num_tokens, other.num_tokens))
        return many >= _SPREAD * few

    def without_tokens(self, other: "_Ended") -> float:
        """Seconds of a step without tokens, on the line through both."""
        crossed = self.seconds * other.num_tokens - other.seconds * self.num_tokens
        return crossed / (other.num_tokens - self.num_tokens)


class PrefillCost:
    """Seconds that tokens of a prompt take, by how many tokens are before them.

    A step takes the time from its plan to its end. If it was planned while another one ran, as vLLM does with
    async scheduling, it begins with the other one's end.

    Part of that is the step's own, whatever it computes. Steps of about one depth and of different sizes tell
    how much: each makes a line with each of the latest. The rest is that of its tokens. A prompt needs
    another step for as many tokens as a step can have, so a token takes that part of a step's own time.

    All by medians of the latest steps, as an engine may pause in one, or tell of several ends at once. Of a
    depth with few steps, the nearest one with more.
    """

    def __init__(self, clock: Callable[[], float], step_tokens: int) -> None:
        """``clock`` in seconds. ``step_tokens``: that a step computes at most."""
        self._clock = clock
        self._step_tokens = step_tokens
        self._planned: dict[int, _Planned] = {}  # steps that have not ended, by number
        self._number = 0  # of the latest of these
        self._ended_at = -inf  # the step whose end was told last
        self._classes: dict[int, deque[_Ended]] = {}
        self._own: deque[float] = deque(maxlen=_LATEST)  # what a step takes without tokens, as each has told
        self._known: dict[int, float] = {}  # what was said of classes since the last sample

    def begin(self, num_tokens: int, depth: Callable[[], float | None]) -> int:
        """A step of so many tokens is planned. Returns the number to tell its end by; 0: that says nothing.

        ``depth``: says how many tokens are before them in the mean, None if most of them are of answers. Only
        asked where it matters.
        """
        mean = depth() if num_tokens >= _LEAST_TOKENS else None
        if mean is None:
            return 0
        self._number += 1
        self._planned[self._number] = _Planned(self._clock(), num_tokens, mean)
        if len(self._planned) > _MOST_PLANNED:
            del self._planned[next(iter(self._planned))]
        return self._number

    def end(self, number: int) -> None:
        """A step has ended: that of this number; 0: one without. Steps end in the order of their plans."""
        now = self._clock()
        step = self._planned.pop(number, None)
        if step is not None:
            self._note(_class_of(step.depth), _Ended(step.num_tokens, now - max(step.at, self._ended_at)))
            self._planned = {other: each for other, each in self._planned.items() if other > number}
        self._ended_at = now

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._classes)

    def seconds(self, first: int, stop: int) -> float:
        """That it takes to compute these tokens of a prompt; 0 if nothing is known."""
        total, at = 0.0, first
        while at < stop and self._classes:
            number = _class_of(at)
            end = min(stop, _SHORT_TOKENS << number)
            total += (end - at) * self._per_token(number)
            at = end
        return total

    def expected(self, first: int, stop: int) -> float:
        """The same; if nothing is known, a guess."""
        return self.seconds(first, stop) if self._classes else TOKEN_SECONDS * (stop - first)

    def by_depth(self) -> dict[int, float]:
        """Seconds per token, by the least number of tokens before it that is of the class."""
        return {_first_of(number): self._per_token(number) for number in sorted(self._classes)}

    def check_invariants(self) -> None:
        """Nothing took less than no time, and few steps are under way."""
        assert len(self._planned) <= _MOST_PLANNED, f"{len(self._planned)} steps are under way"
        for number, latest in self._classes.items():
            assert latest, f"class {number} has no steps"
            assert min(step.seconds for step in latest) >= 0, f"a clock went backwards: {latest}"
            assert self._per_token(number) >= 0, f"more tokens take less time in class {number}: {latest}"

    def _note(self, number: int, step: _Ended) -> None:
        latest = self._classes.setdefault(number, deque(maxlen=_LATEST))
        own = [step.without_tokens(other) for other in latest if step.differs(other)]
        if own:
            self._own.append(_median(own))
        latest.append(step)
        self._known.clear()

    def _per_token(self, number: int) -> float:
        known = self._known.get(number)
        if known is None:
            sure = [each for each, latest in self._classes.items() if len(latest) >= _LEAST_SAMPLES]
            nearest = min(sure or self._classes, key=lambda each: (abs(each - number), each))
            latest = self._classes[nearest]
            own = min(self._own_seconds(), sorted(step.seconds for step in latest)[len(latest) // 4])
            each = _median([(step.seconds - own) / step.num_tokens for step in latest])
            known = self._known[number] = max(each, 0.0) + own / self._step_tokens
        return known

    def _own_seconds(self) -> float:
        """What a step takes without tokens, as far as enough of them have told."""
        return max(_median(self._own), 0.0) if len(self._own) >= _LEAST_SAMPLES else 0.0


class Costs:
    """What was measured of one engine."""

    def __init__(self, clock: Callable[[], float], step_tokens: int) -> None:
        """``clock`` in seconds. ``step_tokens``: that a step computes at most."""
        self.prefill = PrefillCost(clock, step_tokens)
        self._links: dict[Route, LinkCost] = {}

    def link(self, route: Route) -> LinkCost:
        """What jobs of that route take once they copy, on the slowest rank."""
        return self._links.setdefault(route, LinkCost())

    def check_invariants(self) -> None:
        """Nothing took less than no time."""
        self.prefill.check_invariants()
        for link in self._links.values():
            link.check_invariants()


def _median(values: Collection[float]) -> float:
    """The lower one of two."""
    return sorted(values)[(len(values) - 1) // 2]


def _class_of(depth: float) -> int:
    return int(depth // _SHORT_TOKENS).bit_length()


def _first_of(number: int) -> int:
    return _SHORT_TOKENS << (number - 1) if number else 0
