"""Speculative decoding on the virtual engine: drafts, some of them wrong, and the KV of layers that draft."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offload.testing.virtual.history import History, WrongBytesError
from offload.testing.virtual.rank import VirtualRank
from offload.testing.virtual.settings import VirtualSettings
from offload.testing.virtual.tags import TagChain, Words, mix


@dataclass(slots=True)
class Drafted:
    """What a worker remembers of a request because of drafts.

    Attributes:
        tokens: drafted for its next step.
        num_done: tokens computed, without those of rejected drafts.
        first: token at which it began to compute when it was admitted last; what is before came from a cache.
        admitted: step in which that was, by number.
    """

    tokens: list[int] = field(default_factory=list)
    num_done: int = 0
    first: int = 0
    admitted: int = 0


class Span(NamedTuple):
    """What a request computes in a step: token positions ``start .. stop - 1``, the last ones drafts."""

    request_id: str
    start: int
    stop: int
    drafts: list[int]


class Turn(NamedTuple):
    """A request whose tokens of a step are known, so that the draft layers' are to be computed."""

    span: Span
    chain: TagChain
    table: list[int]
    drafted: Drafted
    generation: int


class _First(NamedTuple):
    """Who computed a block before anybody else, and in which step."""

    request_id: str
    step: int


class Drafter:
    """Drafts tokens, and writes and checks the KV of draft layers, as the methods of vLLM do.

    The KV of a draft layer at a position depends on as many tokens behind it as the layer *reaches*: none for
    a draft model, one for EAGLE, one more with each module of multi-module MTP. So the last positions of a
    block may hold KV that was computed for another continuation, and prefix caches cannot tell. vLLM accepts
    this where chains have parted in both caches. A request that is the first to go on as it does must find
    nothing of the kind: the last block of its hit is computed again.
    """

    def __init__(
        self,
        settings: VirtualSettings,
        ranks: Sequence[VirtualRank],
        vocabulary: int,
        history: History,
        counts: Counter[str],
        rng: random.Random,
    ) -> None:
        """``rng`` decides which drafts are right. ``counts`` has drafts, and those that were right."""
        self._settings = settings
        self._ranks = ranks
        self._vocabulary = vocabulary
        self._history = history
        self._counts = counts
        self._rng = rng
        self._step = 0
        self._endings: dict[tuple[int, int, int], set[int]] = {}
        self._firsts: dict[tuple[int, int], _First] = {}
        self._family = [self]  # of engines that have each other's KV

    def begin_step(self) -> None:
        """Steps are counted, so that it can be told who computed a block first."""
        self._step += 1

    def admitted(self, num_computed: int) -> Drafted:
        """A request begins to compute, at that token."""
        return Drafted(num_done=num_computed, first=num_computed, admitted=self._step)

    def accepted(self, chain: TagChain, drafts: list[int]) -> list[int]:
        """Append to ``chain`` the drafts that are right, and the token behind them. Returns these."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            tokens.append(self._next(chain.last))
            chain.extend(tokens[-1:])
            if draft != tokens[-1]:
                break
        if drafts:
            self._counts["drafts"] += len(drafts)
            self._counts["right drafts"] += len(tokens) - 1
        return tokens

    def propose(self, chain: TagChain) -> list[int]:
        """Drafts of what follows, right or wrong; with a scheduler that waits for them there may be fewer."""
        settings, rng = self._settings, self._rng
        num_drafts = settings.num_drafts
        if not settings.overlapped and rng.random() < 0.1:
            num_drafts = rng.randint(0, num_drafts)
        drafts: list[int] = []
        tag = chain.last
        for _ in range(num_drafts):
            is_right = rng.random() < settings.draft_skill
            drafts.append(self._next(tag) if is_right else rng.randrange(self._vocabulary))
            tag = mix(tag, drafts[-1])
        return drafts

    def run(self, turns: Sequence[Turn]) -> None:
        """Compute the draft layers of a step: write all, then attend to all.

        Raises:
            WrongBytesError: KV of a draft layer is not of the tokens that it should be of.
        """
        if not self._settings.draft_reaches:
            return
        for turn in turns:
            self._note_blocks(turn)
            for layer, reach in enumerate(self._settings.draft_reaches):
                self._write(turn, layer, reach)
        for turn in turns:
            for layer, reach in enumerate(self._settings.draft_reaches):
                for rank in self._ranks:
                    self._check(rank, turn, layer, reach)

    def follow(self, other: "Drafter") -> None:
        """What the drafter of an earlier engine has left at ends of blocks may come back from a tier."""
        self._endings = {key: set(endings) for key, endings in other._endings.items()}
        self._firsts = {key: first._replace(step=-1) for key, first in other._firsts.items()}
        if len(other._family) > 1:
            self.stand_beside(other)

    def stand_beside(self, other: "Drafter") -> None:
        """What the drafters of either engine leave at ends of blocks may come to the other one."""
        self._family = other._family
        self._family.append(self)

    def wrong_positions(self, held: Words, tags: Words, reach: int, generation: int) -> list[int]:
        """Positions of whole blocks at which a draft layer holds what was never computed for them.

        Args:
            held: tags that it holds there.
            tags: of the tokens there.
            reach: of the layer.
            generation: of the weights.
        """
        size = self._settings.block_size
        inside = np.arange(len(tags)) % size < size - reach
        due = np.append(tags[reach:], np.zeros(reach, dtype=np.uint64))
        wrong = np.flatnonzero(inside & (held != due)).tolist()
        return sorted(
            wrong
            + [
                position
                for position in np.flatnonzero(~inside).tolist()
                if int(held[position]) not in self._endings_of((reach, int(tags[position]), generation))
            ]
        )

    def _next(self, tag: int) -> int:
        """The token that the target model says after the one with this tag."""
        return mix(tag, 7) % self._vocabulary

    def _note_blocks(self, turn: Turn) -> None:
        size, tags = self._settings.block_size, turn.chain.tags
        for stop in range((turn.span.start // size + 1) * size, turn.drafted.num_done + 1, size):
            first = _First(turn.span.request_id, self._step)
            self._firsts.setdefault((int(tags[stop - 1]), turn.generation), first)

    def _num_final(self, turn: Turn, reach: int) -> int:
        """Positions whose KV is final: drafters read the sampled token, or the prompt's next one, too."""
        return max(0, min(turn.drafted.num_done + (not reach), len(turn.chain) - reach))

    def _write(self, turn: Turn, layer: int, reach: int) -> None:
        """Final KV as far as tokens are known, and junk behind it: KV of drafts that nobody has verified."""
        settings, drafted = self._settings, turn.drafted
        start = max(drafted.first, turn.span.start - settings.num_unsettled)
        stop = max(start, self._num_final(turn, reach))
        tags = turn.chain.tags[start + reach : stop + reach]
        end = min(drafted.num_done + settings.num_drafts - (reach > 0), settings.longest)
        room = len(turn.table) * settings.block_size
        assert end <= room, f"{turn.span.request_id} drafts up to {end}, and has blocks for {room} tokens"
        junk = np.full(max(end - stop, 0), mix(self._step, layer), dtype=np.uint64)
        for rank in self._ranks:
            words = rank.drafted(np.concatenate([tags, junk]), layer, turn.generation)
            rank.write_drafted(turn.table, start, words, layer)
        self._note_endings(turn, start, stop, reach)

    def _note_endings(self, turn: Turn, start: int, stop: int, reach: int) -> None:
        size, tags = self._settings.block_size, turn.chain.tags
        for position in range(start, stop):
            if position % size >= size - reach:
                key = (reach, int(tags[position]), turn.generation)
                self._endings.setdefault(key, set()).add(int(tags[position + reach]))

    def _check(self, rank: VirtualRank, turn: Turn, layer: int, reach: int) -> None:
        stop = self._num_final(turn, reach)
        held = rank.read_drafted(turn.table, stop, layer, turn.generation)
        due = turn.chain.tags[reach : stop + reach]
        wrong = [
            at for at in np.flatnonzero(held != due).tolist() if not self._may_differ(turn, held, at, reach)
        ]
        if wrong:
            block_id = turn.table[wrong[0] // self._settings.block_size]
            raise WrongBytesError(
                f"rank {self._ranks.index(rank)}: {turn.span.request_id}, computing from token "
                f"{turn.span.start}, drafts from wrong bytes at token positions {wrong} of its table "
                f"{turn.table}, draft layer {layer}\n{self._history.of_block(block_id)}"
            )

    def _may_differ(self, turn: Turn, held: Words, position: int, reach: int) -> bool:
        """Whether the position may hold KV for another continuation: one that was met before this one."""
        size, tags = self._settings.block_size, turn.chain.tags
        follower = (position // size + 2) * size - 1
        if position >= turn.drafted.first or position % size < size - reach or follower >= len(tags):
            return False
        first = self._first_of((int(tags[follower]), turn.generation))
        others = self._endings_of((reach, int(tags[position]), turn.generation))
        if first is None or int(held[position]) not in others:
            return False
        is_others = first.request_id != turn.span.request_id and first.step == turn.drafted.admitted
        return first.step < turn.drafted.admitted or is_others

    def _endings_of(self, key: tuple[int, int, int]) -> set[int]:
        return set().union(*(each._endings.get(key, ()) for each in self._family))

    def _first_of(self, key: tuple[int, int]) -> _First | None:
        """What an engine beside this one has met, it may have given away before."""
        if any(key in each._firsts for each in self._family if each is not self):
            return _First("", -1)
        return self._firsts.get(key)
