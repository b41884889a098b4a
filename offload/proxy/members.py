"""The engines behind the proxy: what each has to do, and whether it may be given more."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from offload.errors import ProxyError
from offload.proxy.policies import Engine, Fleet
from offload.proxy.settings import ROLES

__all__ = ["Leg", "Member", "Members"]

MAX_PAUSE = 12
"""Times the first pause, that is, of an engine which fails whenever it is tried."""


class Leg:
    """One request at one engine.

    Attributes:
        why: it has to end here and go on elsewhere; empty: it may go on.
        at: when something last came from the engine, on the clock of the loop.
    """

    def __init__(self, can_move: Callable[[], bool]) -> None:
        self.can_move = can_move
        self.why = ""
        self.at = 0.0
        self._timer: asyncio.Timeout | None = None
        self._is_paused = False
        self._left: float | None = None

    @contextmanager
    def watched(self, timer: asyncio.Timeout) -> Iterator[None]:
        """While ``timer`` is the one that ends waits for the engine."""
        self._timer = timer
        try:
            yield
        finally:
            self._timer = None

    def heard(self, seconds: float) -> None:
        """Something came; the next thing has so long."""
        self.at = asyncio.get_running_loop().time()
        if self._timer is not None and not self.why:
            self._timer.reschedule(self.at + seconds)

    def pause(self) -> None:
        """It is the client who is waited for now: the engine has as long afterwards as it has now."""
        self._is_paused = True
        if self._timer is not None:
            when = self._timer.when()
            self._left = None if when is None else when - asyncio.get_running_loop().time()
            self._timer.reschedule(None)

    def resume(self) -> None:
        """The engine is waited for again."""
        self._is_paused = False
        if self._timer is not None and self._left is not None:
            self._timer.reschedule(asyncio.get_running_loop().time() + (0.0 if self.why else self._left))

    def move(self, why: str) -> None:
        """End here, and go on elsewhere."""
        if self.why:
            return
        self.why = why
        if self._timer is not None and not self._is_paused and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())


class Member:
    """An engine.

    Attributes:
        url, role: of it.
        legs: decode legs that run there.
        prompt_tokens: of prompts that are prefilled there now.
        handed: prefill engines whose hand-offs it was sent since it was asked about them.
        peer, epoch: by which its hand-offs are named, as it said last; None: it has said nothing.
        is_up: it has answered when its health was asked for last, or nobody has asked.
        is_draining: nothing new is begun there.
        num_failures: in a row.
        ejected_until: on the clock; 0: it is not ejected.
        is_on_trial: the one request that tries it is under way.
    """

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.legs: set[Leg] = set()
        self.prompt_tokens = 0
        self.handed: set[str] = set()
        self.peer: str | None = None
        self.epoch: str | None = None
        self.is_up = True
        self.down_since = 0.0
        self.is_draining = False
        self.num_failures = 0
        self.ejected_until = 0.0
        self.is_on_trial = False
        self._num_ejections = 0

    @property
    def engine(self) -> Engine:
        """As policies see it."""
        return Engine(self.url, self.role, len(self.legs), self.prompt_tokens)

    def rank(self, now: float) -> int:
        """How willingly it is given work: 0 as any, 1 ejected, 2 down, 3 draining. O(1)."""
        if self.is_draining:
            return 3
        if not self.is_up:
            return 2
        if self.ejected_until and (now < self.ejected_until or self.is_on_trial):
            return 1
        return 0

    def state(self, now: float) -> str:
        """The same as a word."""
        return ("up", "ejected", "down", "draining")[self.rank(now)]

    def begin(self) -> None:
        """It is given work."""
        if self.ejected_until:
            self.is_on_trial = True

    def heard(self) -> None:
        """It has begun to answer: a trial is over, but the next failure ejects it again."""
        if self.ejected_until:
            self.ejected_until, self.is_on_trial = 0.0, False

    def succeeded(self) -> None:
        """It has answered as an engine does."""
        self.num_failures = self._num_ejections = 0
        self.ejected_until, self.is_on_trial = 0.0, False

    def failed(self, now: float, is_dead: bool, limit: int, pause: float) -> bool:
        """It has not. Returns whether it is ejected now and was not."""
        self.num_failures += 1
        was_ejected, self.is_on_trial = bool(self.ejected_until), False
        if was_ejected and now < self.ejected_until:
            return False  # of what it had been given before
        if not was_ejected and not is_dead and self.num_failures < limit:
            return False
        self._num_ejections += 1
        self.ejected_until = now + pause * min(self._num_ejections, MAX_PAUSE)
        return not was_ejected

    def forgotten(self) -> None:
        """Nobody knows how it would have answered: a trial is over without an end."""
        self.is_on_trial = False

    def check_invariants(self) -> None:
        """What holds between any two calls."""
        assert self.role in ROLES and self.prompt_tokens >= 0, vars(self)
        assert not self.is_on_trial or self.ejected_until, vars(self)
        assert self.num_failures >= 0 and self._num_ejections >= 0, vars(self)


class Members:
    """All engines. Those that are removed while requests run there are forgotten when these have ended."""

    def __init__(self, engines: Iterable[tuple[str, str]], clock: Callable[[], float]) -> None:
        self._by_url = {url: Member(url, role) for url, role in engines}
        self._clock = clock

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_url.values()))

    def get(self, url: str) -> Member | None:
        return self._by_url.get(url)

    def add(self, url: str, role: str) -> Member:
        """From now on it may be chosen. Raises ProxyError if it is there already."""
        if role not in ROLES:
            raise ProxyError(f"role {role!r} is not known; use one of {', '.join(ROLES)}")
        if url in self._by_url:
            raise ProxyError(f"{url} is there already; remove it first to change its role")
        member = self._by_url[url] = Member(url, role)
        return member

    def remove(self, url: str) -> Member:
        """From now on it is not chosen; its requests go on elsewhere. Raises ProxyError if there is none."""
        member = self._by_url.pop(url, None)
        if member is None:
            raise ProxyError(f"{url} is not there; there are: {', '.join(self._by_url) or 'none'}")
        member.is_draining = True
        for leg in list(member.legs):
            leg.move("removed")
        return member

    def fleet(self, but: set[str], is_alone: bool) -> Fleet | None:
        """What a request may choose from. O(engines).

        Args:
            but: engines that have failed it.
            is_alone: it is to have no prefill leg.

        Returns: engines of the best rank that there is, so that a request finds one while any lives; None:
            each has failed it.
        """
        decode = self._best([each for each in self._by_url.values() if each.role != "prefill"], but)
        if not decode:
            return None
        prefill: list[Member] = []
        if not is_alone:
            now, all_roles = self._clock(), {each.role for each in self._by_url.values()}
            # Without engines for prefill alone, those of both roles do it for those that only decode.
            role = "prefill" if "prefill" in all_roles else "both" if "decode" in all_roles else None
            prefill = [
                each
                for each in self._by_url.values()
                if each.role == role and each.url not in but and each.rank(now) == 0
            ]
        return Fleet([each.engine for each in prefill], [each.engine for each in decode])

    def any_of(self, but: set[str]) -> list[Member]:
        """Engines that other requests may be passed to, those that decode first. O(engines)."""
        decode = self._best([each for each in self._by_url.values() if each.role != "prefill"], but)
        return decode or self._best(list(self._by_url.values()), but)

    def _best(self, members: list[Member], but: set[str]) -> list[Member]:
        now = self._clock()
        left = [(each.rank(now), each) for each in members if each.url not in but]
        best = min((rank for rank, _ in left), default=0)
        return [each for rank, each in left if rank == best]

    def check_invariants(self) -> None:
        """What holds between any two calls."""
        for url, member in self._by_url.items():
            assert member.url == url
            member.check_invariants()
