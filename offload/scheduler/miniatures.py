"""What pools of other sizes would find, learned from small pools that see a sample of what is asked for."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator import CpuOffloadingBlockAllocator
from evictor import make_policy

SIZES = (0.5, 1, 2, 4)
"""Of the pools that are told of, in sizes of the real one."""

MOST_POSITIONS = 512
"""Of the miniature that stands for the real pool."""

_HALF_LIFE = 600.0  # seconds after which what was seen counts half
_SHARE = 0.001  # of the thread's time that may be spent here
_FREE_SECONDS = 0.005  # that may be spent before a share of anything is known, and saved
_STEP_SECONDS = 0.001  # that chains are served in one step
_MOST_WAITING = 256  # sampled chains; beyond it the sample is halved
_TIDY_AFTER = 16  # chains


@dataclass(slots=True, eq=False)
class Sample:
    """What of a request is in the sample.

    Attributes:
        chain: prefix hashes of positions that are in it, in order, which it has asked for.
        num_all: positions that it and others since the chain before it have asked for, in the sample or not.
        pools: those that serve it.
        turns: its number in each of them, once they have.
    """

    chain: list[bytes]
    num_all: int
    pools: list[CpuOffloadingBlockAllocator]
    turns: list[int] = field(default_factory=list)


class _Finished(NamedTuple):
    """A request is over, has computed all of ``chain``, and its answer has ended so, if that is known."""

    sample: Sample
    chain: list[bytes]
    ending: int | None


class Miniatures:
    """Four small pools with the policy of the real one. What they miss says what pools of four sizes miss.

    A position is in the sample if its prefix hash is below a threshold. So it is in it for every request, and
    what a chain has in the sample is a chain again: the hash still stands for all that comes before. Whoever
    shares the beginning of a chain shares that of its sample. A miniature is therefore a prefix-closed pool,
    smaller by the rate of the sample, that sees reuse after as many of its own sizes as a real one would.

    Only misses are counted from the sample. How much was asked for is known. A block that everybody has,
    such as the first of a shared prompt, weighs much in a sample or is not in it. But it is not missed.

    What serving them costs is held to a share of the thread's time, by its own clock: chains wait until there
    is time, and if too many wait the sample is halved. Then the miniatures begin anew. To find what of a
    chain is in the sample is not held to that: it takes nanoseconds for each position.
    """

    def __init__(
        self,
        num_positions: int,
        policy: str,
        clock: Callable[[], float],
        timer: Callable[[], float] | None = None,
        most_positions: int = MOST_POSITIONS,
    ) -> None:
        """Begin with empty pools.

        Args:
            num_positions: that the real pool has room for, 1 at least.
            policy: of the real pool; see ``evictor.available_policies()``.
            clock: in seconds.
            timer: seconds that the thread has worked; None: the kernel says so.
            most_positions: of the miniature of the real pool; it has fewer if the real pool has.
        """
        self._policy = policy
        self._clock = clock
        self._timer = time.thread_time if timer is None else timer
        self._wall = time.perf_counter if timer is None else timer
        self._rests_until = -math.inf  # by the wall: before, no chain may be served
        self._began = self._looked_at = 0.0  # since when a share of the thread's time counts
        self._spent = 0.0  # of that, for serving
        self._sampling = 0.0  # beside it
        self._waiting: deque[Sample | _Finished] = deque()
        self._num_asked = 0.0  # positions, of late
        self._num_missed = [0.0] * len(SIZES)  # the same, by size
        self._new_asked = 0
        self._new_missed = [0.0] * len(SIZES)
        self._num_served = 0
        self._num_between = 0  # positions that were asked for behind the last chain that waits
        self._seen_at = clock()
        self._most_positions = most_positions
        self._num_positions = num_positions
        self._pools: list[CpuOffloadingBlockAllocator] = []
        self.rate = 1.0
        """Part of all positions that is in the sample."""
        self._threshold = np.uint64(0)
        self.resize(num_positions)

    def resize(self, num_positions: int) -> None:
        """The real pool has room for so many now. The miniatures begin anew, and so do their hit rates."""
        self._num_positions = num_positions
        self._num_asked = 0.0
        self._num_missed = [0.0] * len(SIZES)
        self._begin(min(1.0, self._most_positions / num_positions))

    def sample(self, chain: Sequence[bytes]) -> list[bytes]:
        """Those of a chain's positions that are in the sample, in order. Loops over the chain in C only."""
        if not chain:
            return []
        if self.rate == 1.0:
            return list(chain)
        words = np.frombuffer(b"".join(chain), dtype=np.uint64).reshape(len(chain), -1)[:, 0]
        return list(map(chain.__getitem__, np.flatnonzero(words <= self._threshold).tolist()))

    def asked(self, chain: Sequence[bytes]) -> Sample:
        """A request asks for ``chain``, and computes what it lacks. What of it is in the sample."""
        sample = Sample(self._timed_sample(chain), self._num_between + len(chain), self._pools)
        if sample.chain:
            self._wait(sample)
            self._num_between = 0
        elif self._waiting:
            self._num_between += len(chain)
        else:
            self._new_asked += len(chain)
        return sample

    def finished(self, sample: Sample, more: Sequence[bytes], ending: int | None) -> None:
        """It has computed and stored ``more`` behind its prompt, and its answer has ended so, if it has."""
        behind = self._timed_sample(more)
        if sample.pools is self._pools and (behind or (sample.chain and ending is not None)):
            self._wait(_Finished(sample, [*sample.chain, *behind], ending))

    def step(self) -> None:
        """Serve chains that wait, oldest first, as far as there is time for that, and for a millisecond."""
        if not self._waiting or self._wall() < self._rests_until:
            return
        now = self._timer()  # a system call, in which other threads may take the core
        stop = self._free_at(now)
        if stop < now:  # the thread works no faster than time passes
            self._rests_until = self._wall() + (now - stop) / _SHARE
        while self._waiting and now < stop:
            self._serve(self._waiting.popleft())
            began, now = now, self._timer()
            self._spent += now - began

    def take(self) -> tuple[int, list[float]]:
        """Positions that were asked for since the last call, and how many of them each size has missed.

        Those of chains that wait are yet to come.
        """
        taken = self._new_asked, self._new_missed
        self._fade()
        self._num_asked += self._new_asked
        self._num_missed = [old + new for old, new in zip(self._num_missed, self._new_missed, strict=True)]
        self._new_asked, self._new_missed = 0, [0.0] * len(SIZES)
        return taken

    def hit_rates(self) -> list[float]:
        """Of each size, of late, 0 to 1; 0 until something was asked for. Long ago counts less."""
        if not self._num_asked:
            return [0.0] * len(SIZES)
        return [max(0.0, 1 - missed / max(self._num_asked, missed)) for missed in self._num_missed]

    def reset(self) -> None:
        """All KV is forgotten."""
        self._begin(self.rate)

    @property
    def seconds(self) -> float:
        """Of the thread's time that were spent here since the start: for samples, and to serve them."""
        return self._sampling + self._spent

    def check_invariants(self) -> None:
        """Every pool is whole, and bounded; nothing is missed that was not asked for at a rate of 1."""
        assert 0 < self.rate <= 1, f"a sample of {self.rate}"
        assert len(self._waiting) <= _MOST_WAITING, f"{len(self._waiting)} chains wait"
        for size, pool in zip(SIZES, self._pools, strict=True):
            pool.check_invariants()
            assert pool.capacity <= max(1, math.ceil(size * self._most_positions)), f"{pool.capacity} slots"
            assert not pool.num_filling, f"{pool.num_filling} slots are being filled"
        assert min([*self._num_missed, *self._new_missed]) >= 0, f"{self._num_missed} missed"

    # Private

    def _timed_sample(self, chain: Sequence[bytes]) -> list[bytes]:
        began = self._wall()  # a system call for each request would cost more than most samples
        sampled = self.sample(chain)
        self._sampling += self._wall() - began
        return sampled

    def _begin(self, rate: float) -> None:
        self.rate = rate
        self._threshold = np.uint64(min(int(rate * 2**64), 2**64 - 1))
        self._waiting.clear()
        self._num_between = 0
        self._pools = []
        for size in SIZES:
            capacity = max(1, round(self._num_positions * rate * size))
            policy = make_policy(self._policy, capacity, self._clock)
            self._pools.append(CpuOffloadingBlockAllocator(capacity, policy=policy))

    def _wait(self, each: Sample | _Finished) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(each)
            return
        self._begin(self.rate / 2)  # nothing is known of chains that were not served
        self._num_asked, self._num_missed = 0.0, [0.0] * len(SIZES)
        self._new_asked, self._new_missed = 0, [0.0] * len(SIZES)

    def _free_at(self, now: float) -> float:
        """Until when chains may be served, by the timer. What was not spent is saved for a moment only."""
        saved = _FREE_SECONDS + _SHARE * (now - self._began) - self._spent
        if now < self._looked_at or saved > _FREE_SECONDS:  # or it is another thread's time
            self._began, saved = now - self._spent / _SHARE, _FREE_SECONDS
        self._looked_at = now
        return now + min(saved, _STEP_SECONDS)

    def _serve(self, each: Sample | _Finished) -> None:
        self._num_served += 1
        if isinstance(each, Sample):
            self._new_asked += each.num_all
            for index, pool in enumerate(self._pools):
                self._new_missed[index] += (len(each.chain) - pool.resident_depth(each.chain)) / self.rate
                each.turns.append(pool.touch(each.chain))
        for pool in self._pools:
            plan = pool.plan_store(each.chain, len(each.chain))
            if plan is not None:
                pool.commit(plan)
            if self._num_served % _TIDY_AFTER == 0:
                pool.tidy()
        if isinstance(each, _Finished) and each.ending is not None:
            for pool, turn in zip(self._pools, each.sample.turns, strict=False):  # none if nothing was asked
                pool.ended(each.chain, turn, each.ending)

    def _fade(self) -> None:
        now = self._clock()
        factor = 0.5 ** ((now - self._seen_at) / _HALF_LIFE)
        self._seen_at = now
        self._num_asked *= factor
        self._num_missed = [each * factor for each in self._num_missed]
