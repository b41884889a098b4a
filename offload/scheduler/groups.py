"""Cache groups: which blocks of a request's tables belong to a chain position, and which to a checkpoint.

Groups with full attention need every block up to the place where a request goes on: *prefix* groups. The
others need a few blocks right before that place, the *bag* of a checkpoint there. All hand out blocks of
one GPU pool, and all blocks fit a slot.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

GpuBlocks = list[Any]
"""Handles of GPU blocks, opaque here."""

HOLE = 0
"""Id of the block that stands in tables where a group needs none."""


class Kind(Enum):
    """What a group needs to go on after ``m`` tokens."""

    FULL = auto()
    """All tokens."""
    WINDOW = auto()
    """The last ``span`` tokens: those that the next token attends to, without itself."""
    CHUNK = auto()
    """The tokens since the last multiple of ``span``."""
    STATE = auto()
    """The one block that was written last."""


class Group(NamedTuple):
    """A cache group.

    Attributes:
        kind: what it needs.
        block_size: tokens per block, as the scheduler counts them.
        span: tokens; 0 where the kind has none.
        moves: a state's block may become another place's: tables do not tell which state is in it.
    """

    kind: Kind
    block_size: int
    span: int = 0
    moves: bool = False

    def needed(self, num_tokens: int) -> range:
        """Table indices of the blocks that it needs to go on after ``num_tokens``, in full blocks."""
        stop = num_tokens // self.block_size
        match self.kind:
            case Kind.FULL:
                first = 0
            case Kind.WINDOW:
                first = max(num_tokens - self.span, 0) // self.block_size
            case Kind.CHUNK:
                first = num_tokens // self.span * self.span // self.block_size
            case Kind.STATE:
                first = stop - 1
        return range(first, stop)

    @property
    def most(self) -> int:
        """Blocks that a bag has of it, at most."""
        match self.kind:
            case Kind.FULL:
                return 0
            case Kind.WINDOW:
                return -(-self.span // self.block_size)
            case Kind.CHUNK:
                return -(-(self.span - gcd(self.span, self.block_size)) // self.block_size)
            case Kind.STATE:
                return 1


class Groups:
    """All groups of one engine, and the length of a chain position: a multiple of all their blocks.

    Attributes:
        position_tokens: tokens of a chain position.
        columns: blocks of prefix groups for a position.
        bag_slots: blocks of a bag, at most.
        least: blocks of the smallest store: a position, and its bag if there are any.
        has_bags: whether some groups are no prefix groups, so that a request can go on at checkpoints only.
        has_states: whether some keep states, which stand at the end of a step only.
        reach: positions that a bag has blocks of, at most.
        spacing: positions between checkpoints at which bags take half as much room as the prefix.
    """

    def __init__(self, groups: Sequence[Group], position_tokens: int) -> None:
        """``groups`` in the order of a request's tables."""
        self.position_tokens = position_tokens
        self._groups = tuple(groups)
        self._prefix = [
            (index, position_tokens // group.block_size)
            for index, group in enumerate(groups)
            if group.kind is Kind.FULL
        ]
        self._others = [(index, group) for index, group in enumerate(groups) if group.kind is not Kind.FULL]
        self.columns = sum(num for _, num in self._prefix)
        self.has_bags = bool(self._others)
        self.bag_slots = sum(group.most for _, group in self._others)
        self.least = self.columns + self.bag_slots
        self.has_states = any(group.kind is Kind.STATE for group in groups)
        reaches = (-(-group.most * group.block_size // position_tokens) for _, group in self._others)
        self.reach = max(reaches, default=0)
        self.spacing = -(-2 * self.bag_slots // max(self.columns, 1))

    @property
    def is_plain(self) -> bool:
        """Whether a position is one block, and nothing else is needed."""
        return self.columns == 1 and not self.has_bags

    def tokens_in(self, num_slots: int) -> int:
        """Tokens that so many slots hold, without bags if there is anything else."""
        return num_slots // (self.columns or self.bag_slots) * self.position_tokens

    def least_blocks(self, num_tokens: int) -> int:
        """GPU blocks that so many leading tokens take at least, without those of windows and states.

        Where there is nothing else, as many as there are positions.
        """
        sizes = [self.position_tokens // num for _, num in self._prefix] or [self.position_tokens]
        return sum(-(-num_tokens // size) for size in sizes)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """GPU blocks that so many tokens more take at most, computed ``step_tokens`` at a time.

        A window gives blocks back from one step to the next. A state has up to three at once.
        """
        num_blocks = 0
        for group in self._groups:
            if group.kind is Kind.STATE:
                num_blocks += 3
            else:
                at_once = num_tokens if group.kind is Kind.FULL else min(num_tokens, step_tokens)
                num_blocks += -(-at_once // group.block_size) + 1
        return num_blocks

    def num_positions(self, tables: Sequence[GpuBlocks]) -> int:
        """Chain positions for which a request has blocks."""
        return min(
            len(table) * group.block_size // self.position_tokens
            for table, group in zip(tables, self._groups, strict=True)
        )

    def prefix(self, tables: Sequence[GpuBlocks], positions: range) -> GpuBlocks:
        """Blocks of prefix groups for these positions, ``columns`` for each, one position after the other."""
        if self.columns == 1:
            return tables[self._prefix[0][0]][positions.start : positions.stop]
        columns = [
            tables[index][positions.start * num + offset : positions.stop * num : num]
            for index, num in self._prefix
            for offset in range(num)
        ]
        return list(chain.from_iterable(zip(*columns, strict=True)))

    def num_in_bag(self, depth: int) -> int:
        """Blocks of the bag of a checkpoint at that depth."""
        num_tokens = depth * self.position_tokens
        return sum(len(group.needed(num_tokens)) for _, group in self._others)

    def bag(
        self, tables: Sequence[GpuBlocks], depth: int, states: Mapping[int, Any], *, is_standing: bool
    ) -> GpuBlocks:
        """Blocks of the bag of a checkpoint at that depth, with holes where some have left the request.

        Fewer than ``num_in_bag`` where some are not there at all.

        Args:
            tables: of the request.
            depth: in positions.
            states: handed over at that depth, by group.
            is_standing: whether a step begins or ends there, so that tables have the states of it.
        """
        num_tokens = depth * self.position_tokens
        blocks: GpuBlocks = []
        for index, group in self._others:
            needed = group.needed(num_tokens)
            if index in states:
                blocks.append(states[index])
            elif group.kind is not Kind.STATE or (is_standing and not group.moves):
                blocks += tables[index][needed.start : needed.stop]
        return blocks

    def missing(
        self, tables: Sequence[GpuBlocks], first: int, depth: int
    ) -> Iterator[tuple[GpuBlocks, int, range]]:
        """What a request that has the first ``first`` positions lacks of the bag at ``depth``, by group.

        Yields:
            The blocks that its table has for the positions from ``first`` on; how many of these, the leading
            ones, must be holes; and which entries of the bag fill the rest.
        """
        num_tokens = depth * self.position_tokens
        at = 0
        for index, group in self._others:
            needed = group.needed(num_tokens)
            local = first * self.position_tokens // group.block_size
            start = max(needed.start, local)
            yield (
                tables[index][local : needed.stop],
                start - local,
                range(at + start - needed.start, at + len(needed)),
            )
            at += len(needed)
