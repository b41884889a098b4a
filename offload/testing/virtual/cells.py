"""What a rank's layers keep in GPU blocks, by group: a tag per token, or a state per block.

A layer keeps tags and states masked with its number, its rank's and the generation of the weights. So bytes
of another group, rank or layer are as wrong as those of another chain. GPU blocks are shared by all groups:
each has its own view of the same memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.kv_cache_interface import (
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

from offload.messages import Ids
from offload.testing.virtual.groups import STATE, Group
from offload.testing.virtual.tags import Words, mix

GARBAGE = 0xBADBADBADBADBADB
"""In blocks since they were taken for something new, until somebody writes to them."""

NULL_BLOCK = 0
"""vLLM's stand-in for a block that is not there. Nothing may be in it."""


class BlockSizes(NamedTuple):
    """Tokens of a block as the scheduler counts them, from one prefix hash to the next, and between hits."""

    scheduler: int
    hashes: int
    hits: int


class Work(NamedTuple):
    """What a request computes in a step.

    Attributes:
        req_id: its id.
        start: first token position to be computed.
        stop: the position after the last one.
        tags: ``uint64[stop]`` of its tokens, drafts included.
        generation: of the weights.
        tables: GPU blocks of each group.
        writer: says in each cell who wrote it when.
    """

    req_id: str
    start: int
    stop: int
    tags: Words
    generation: int
    tables: Sequence[list[int]]
    writer: int


class Misread(NamedTuple):
    """Somebody was about to use what is not its own.

    Attributes:
        work: whose it was.
        positions: tokens whose tags, or after which the state, are wrong.
        layers: by number within the group.
        block_id: the first GPU block that is wrong.
        held: the first wrong word.
        unmasked: the same without its mask.
    """

    work: Work
    positions: list[int]
    layers: list[int]
    block_id: int
    held: int
    unmasked: int


class GroupCells(ABC):
    """One group's cells on one rank: ``cells[layer, block, place, word]``.

    Word 0 is the tag or state, word 1 says who wrote it when. Places of a block are tokens, or a single one.
    """

    def __init__(
        self, index: int, group: Group, masks: Words, cells: Words, own: slice, sizes: BlockSizes
    ) -> None:
        """The ``index``th group of the model.

        Args:
            index: in vLLM's list of groups.
            group: what it is like.
            masks: ``uint64[layers, 1]``.
            cells: a view of the rank's memory.
            own: of a request's token positions, those that this rank holds.
            sizes: of the model's blocks.
        """
        self.index = index
        self.group = group
        self.masks = masks
        self.cells = cells
        self.own = own
        self.sizes = sizes
        self.span: int = group.block_size * own.step
        """Tokens of a block, on all ranks together."""

    def expected(self, tags: Words, generation: int) -> Words:
        """``uint64[layers, len(tags)]``: what layers hold for these; or the reverse, for what they hold."""
        masked: Words = tags ^ self.masks ^ np.uint64(mix(3, generation))
        return masked

    @abstractmethod
    def compute(self, works: Sequence[Work]) -> Misread | None:
        """Let all of a step read what they need and write what they compute; the first that reads wrong."""

    def _misread(self, work: Work, positions: Ids, held: Words, due: Words) -> Misread | None:
        """Whether ``held`` for these positions is not what is due, both ``uint64[layers, positions]``."""
        wrong = held != due
        if not wrong.any():
            return None
        columns = np.flatnonzero(wrong.any(axis=0))
        layers = np.flatnonzero(wrong.any(axis=1))
        layer, column = int(np.flatnonzero(wrong[:, columns[0]])[0]), int(columns[0])
        return Misread(
            work,
            positions[columns].tolist(),
            layers.tolist(),
            work.tables[self.index][int(positions[column]) // self.span],
            int(held[layer, column]),
            int(self.expected(held, work.generation)[layer, column]),
        )


class TokenCells(GroupCells):
    """Layers that attend to tokens: to all before, to a window, or to those of the same chunk.

    Under decode context parallelism ranks have every so many tokens, as vLLM deals them out one by one.
    """

    def compute(self, works: Sequence[Work]) -> Misread | None:
        """Write all, then attend to all: what one request writes, another may share in the same step."""
        for work in works:
            words = self.expected(work.tags[work.start :], work.generation)
            self._write(work.tables[self.index], work.start, words, work.writer)
        return next(filter(None, map(self._attend, works)), None)

    def _write(self, table: list[int], start: int, words: Words, writer: int) -> None:
        """Store what is this rank's of ``words[layers, n]``, for token positions from ``start`` on."""
        own = slice((self.own.start - start) % self.own.step, None, self.own.step)
        positions = np.arange(start, start + words.shape[1])[own]
        blocks = np.asarray(table)[positions // self.span]
        offsets = positions % self.span // self.own.step
        assert NULL_BLOCK not in blocks, f"group {self.index} writes tokens {positions} to null blocks"
        self.cells[:, blocks, offsets, 0] = words[:, own]
        self.cells[:, blocks, offsets, 1] = writer

    def _attend(self, work: Work) -> Misread | None:
        first = self.group.first_read(work.start)
        begin = first // self.span * self.span
        blocks = work.tables[self.index][begin // self.span : -(-work.stop // self.span)]
        pages = self.cells[..., 0][:, blocks].reshape(len(self.cells), -1)
        positions = np.arange(begin, work.stop)[self.own]
        due = self.expected(work.tags[begin:][self.own], work.generation)
        skipped = len(range(begin, first)[self.own])
        held = pages[:, skipped : len(positions)]
        return self._misread(work, positions[skipped:], held, due[:, skipped:])


class StateCells(GroupCells):
    """Layers with a state: that after token n is made of the one before it and of the token.

    It lies in the block of its last token. A step that ends in another block than the one before it begins
    with a copy, as vLLM's runner makes it.
    """

    def compute(self, works: Sequence[Work]) -> Misread | None:
        """Copy all, read all, write all: no request may use in a step what another writes in it."""
        for work in works:
            self._copy(work)
        misread = next(filter(None, map(self._read, works)), None)
        for work in works:
            self._write(work, self._block(work, work.stop), work.stop)
            if self.group.has_checkpoints:
                self._write_checkpoint(work)
        return misread

    def _block(self, work: Work, num_tokens: int) -> int:
        """Where the state after so many tokens lies."""
        return work.tables[self.index][(num_tokens - 1) // self.span]

    def _write(self, work: Work, block_id: int, num_tokens: int) -> None:
        words = self.expected(work.tags[num_tokens - 1 : num_tokens], work.generation)
        self.cells[:, block_id, 0, 0] = words[:, 0]
        self.cells[:, block_id, 0, 1] = work.writer

    def _write_checkpoint(self, work: Work) -> None:
        """As vLLM's ``compute_mamba_prefill_checkpoints`` says, in what all releases have of it."""
        position = get_mamba_prefill_checkpoint_position(work.stop, self.sizes.hits, drop_eagle_block=False)
        is_valid = is_mamba_prefill_checkpoint_valid(
            query_start=work.start,
            query_end=work.stop,
            checkpoint_position=position,
            hash_block_size=self.sizes.hashes,
            mamba_block_size=self.span,
            checkpoint_alignment=1,
        )
        block_id = work.tables[self.index][(work.stop - 1) // self.span - 1] if is_valid else NULL_BLOCK
        if block_id != NULL_BLOCK:
            self._write(work, block_id, position)

    def _copy(self, work: Work) -> None:
        target = self._block(work, work.stop)
        assert target != NULL_BLOCK, f"group {self.index} writes the state of {work.req_id} to the null block"
        if work.start and self._block(work, work.start) != target:
            self.cells[:, target] = self.cells[:, self._block(work, work.start)]

    def _read(self, work: Work) -> Misread | None:
        if not work.start:
            return None
        held = self.cells[:, self._block(work, work.stop), :, 0]
        due = self.expected(work.tags[work.start - 1 : work.start], work.generation)
        return self._misread(work, np.array([work.start - 1]), held, due)


def make_cells(
    index: int, group: Group, masks: Words, cells: Words, own: slice, sizes: BlockSizes
) -> GroupCells:
    """Of the group's kind; arguments as ``GroupCells`` takes them."""
    kind = StateCells if group.kind == STATE else TokenCells
    return kind(index, group, masks, cells, own, sizes)
