"""Learns whether answers come back: whether later prompts contain what was generated for earlier ones.

A template that strips the thinking from earlier turns sends no answer back as it was, and blocks are hit
whole or not at all. Then stored answers are wasted pool.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_PATIENCE = 128
"""Answers in a row that may stay away before no more of them are stored."""

_WORTH = 64
"""Answers that one which comes back makes up for: less than one in so many are not worth storing."""

_KIND_PATIENCE = 32
"""The same for answers of a kind that has not come back yet, while others do."""

_MOST_ANSWERS = 8_192
"""Answers that are looked for at a time: as many conversations may have a turn under way."""

_MOST_KINDS = 1_024

_LONGEST_LOOK = 2_048
"""Blocks of a prompt in which an earlier answer is looked for, so that a request costs no more than that."""


class Lineage(StrEnum):
    """What became of the answer before, when a request goes on where an earlier one ended."""

    RETURNED = "returned"
    STRIPPED = "stripped"


K = TypeVar("K")
V = TypeVar("V")

Kind = str | bytes
"""Answers that are judged together: of one ``Lineage``, or of new requests with the same first block."""


@dataclass(slots=True)
class _Account:
    """What is known of some answers.

    Attributes:
        credit: each answer spends one, each that comes back earns ``worth``.
        is_open: it has had credit, and not run out since; or two have come back in short order.
        proven_at: how often the account of all answers had been closed when one of these came back last.
    """

    credit: int
    is_open: bool = True
    proven_at: int = -1


class AnswerReuse:
    """Says whether to store an answer, by what became of others before it.

    An answer comes back when a request has its first block, the first that is not all prompt, in its own
    prompt. The hashes of these blocks are remembered, whether they were stored or not. So nothing has to be
    stored to find out that answers come back again. Found is only what could have served: all before it has
    to be on the GPU or in the pool.

    Answers are counted when the next request comes. If many end at once, the first that could come back are
    asked for no earlier than that. On the way between, however long it is, as many come back as are counted.

    Kinds are told apart, so that one template may strip what another returns. The kind of a request that goes
    on where an earlier one ended is what became of that one's answer. For others it is their first block: its
    template, tenant and adapter, as far as prompts begin with these. A kind of which little is known goes by
    all answers together, and as long as none has come back they are not told apart.

    Every call is O(1).
    """

    def __init__(self, fixed: bool | None = None, *, patience: int = _PATIENCE, worth: int = _WORTH) -> None:
        """Begin with storing. ``fixed``: always say that, and learn nothing; None: learn."""
        self._fixed = fixed
        self._patience = patience
        self._worth = worth
        self._all = _Account(patience)
        self._num_closed = 0  # how often that account was
        self._accounts: dict[Kind, _Account] = {}  # by kind, the one used longest ago first
        self._answers: dict[bytes, Kind | None] = {}  # by the first block; None once it has come back
        self._prompts: dict[bytes, None] = {}  # last full blocks of prompts that were answered
        self._uncounted: deque[Kind] = deque()
        self.num_ended = 0
        """Answers that have filled a block."""
        self.num_returned = 0
        """Answers that have come back."""

    @property
    def is_learning(self) -> bool:
        """Whether it is not fixed what it says."""
        return self._fixed is None

    @property
    def is_open(self) -> bool:
        """Whether it stores answers of which nothing is known."""
        return self._all.is_open if self._fixed is None else self._fixed

    def are_stored(self, kind: Kind) -> bool:
        """Whether to store answers of that kind now."""
        if self._fixed is not None:
            return self._fixed
        account = self._accounts.get(kind)
        if account is None:
            return self._all.is_open
        return account.is_open and (self._all.is_open or account.proven_at == self._num_closed)

    def arrived(self, chain: Sequence[bytes], num_prompt: int, num_found: int) -> Kind:
        """A request is admitted for the first time; returns the kind of its answer.

        Args:
            chain: its prefix hashes.
            num_prompt: full blocks of its prompt.
            num_found: how many of these, from the first one on, the GPU or the pool has.
        """
        if self._uncounted:
            self._spend(self._uncounted.popleft())
        if self._fixed is not None or not num_prompt:
            return ""
        stop = min(
            num_found + 1, num_prompt
        )  # an answer that was not stored begins right behind what is found
        last_blocks = chain[max(0, stop - _LONGEST_LOOK) : stop][::-1]
        first = next(filter(self._answers.__contains__, last_blocks), None)
        if first is not None:
            self._came_back(first)
            return Lineage.RETURNED
        before = last_blocks[int(stop == num_prompt) :]  # the same prompt once more goes on from nothing
        if next(filter(self._prompts.__contains__, before), None) is not None:
            return Lineage.STRIPPED
        return chain[0]

    def ended(self, chain: Sequence[bytes], num_prompt: int, kind: Kind) -> None:
        """An answer has ended that fills a block, ``chain[num_prompt]``, and may be stored."""
        if self._fixed is not None:
            return
        self.num_ended += 1
        self._uncounted.append(kind)
        self._answers.pop(chain[num_prompt], None)
        self._answers[chain[num_prompt]] = kind
        _forget_oldest(self._answers, _MOST_ANSWERS)
        if num_prompt:
            self._prompts.pop(chain[num_prompt - 1], None)
            self._prompts[chain[num_prompt - 1]] = None
            _forget_oldest(self._prompts, _MOST_ANSWERS)

    def check_invariants(self) -> None:
        """What is remembered is bounded, and accounts are within their limits."""
        for account in (self._all, *self._accounts.values()):
            assert 0 <= account.credit <= self._patience, f"{account} of {self._patience}"
            assert account.credit or not account.is_open, f"{account} has run out, and is open"
            assert account.proven_at <= self._num_closed, f"{account} after {self._num_closed}"
        assert len(self._accounts) <= _MOST_KINDS, f"{len(self._accounts)} kinds"
        assert max(len(self._answers), len(self._prompts)) <= _MOST_ANSWERS, "too many are remembered"
        assert self.num_returned <= self.num_ended, f"{self.num_returned} of {self.num_ended} came back"

    def _came_back(self, first: bytes) -> None:
        kind = self._answers[first]
        if kind is None:
            return
        self._answers[first] = None
        self.num_returned += 1
        self._earn(self._all)
        account = self._account(kind)
        self._earn(account)
        if account.is_open:
            account.proven_at = self._num_closed

    def _earn(self, account: _Account) -> None:
        account.credit = min(account.credit + self._worth, self._patience)
        account.is_open = account.is_open or account.credit > self._worth

    def _spend(self, kind: Kind) -> None:
        was_open = self._all.is_open
        for account in (self._all, self._account(kind)) if self.num_returned else (self._all,):
            account.credit = max(account.credit - 1, 0)
            account.is_open = account.is_open and account.credit > 0
        self._num_closed += was_open and not self._all.is_open

    def _account(self, kind: Kind) -> _Account:
        account = self._accounts.pop(kind, None) or _Account(min(self._patience, _KIND_PATIENCE))
        self._accounts[kind] = account
        _forget_oldest(self._accounts, _MOST_KINDS)
        return account


def _forget_oldest(known: dict[K, V], most: int) -> None:
    if len(known) > most:
        del known[next(iter(known))]
