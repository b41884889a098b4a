"""Asks documents through a replay engine whose GPU cache forgets, and counts what is computed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.common.prompts import fresh_hashes
from benchmarks.common.shapes import SHAPES
from benchmarks.engine_replay import ReplayEngine, ReplaySettings

__all__ = [
    *("CONNECTORS", "ENDS", "OURS", "Asked", "Bar", "Document", "Sizes", "Stored", "ask_in_turn"),
    *("ask_together", "bar_of", "draw", "engine_for", "stored"),
]

OURS, ENDS = "offload", "offload, ends only"
CONNECTORS = {
    "none": ("none", 0),
    "native": ("native", 0),
    "native, all kept": ("native", None),
    "simple": ("simple", 0),
    "simple, all kept": ("simple", None),
    ENDS: ("offload", 0),
    OURS: ("offload", 0),
}
"""By name: the connector, and between which tokens vLLM keeps windows and states on the GPU (None: all)."""
_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked; lengths in tokens.

    Attributes:
        documents: how many there are.
        document_tokens: of each, a quarter more or less.
        question_tokens: another question each time.
        asks: of each document.
        siblings: of the same document that arrive at the same time.
        chunk: computed in a step, at most.
    """

    documents: int = 8
    document_tokens: int = 40_000
    question_tokens: int = 800
    asks: int = 3
    siblings: int = 4
    chunk: int = 8192


@dataclass(frozen=True, slots=True)
class Document:
    """``blocks``: prefix hashes of its full blocks. It ends somewhere in the next one."""

    num_tokens: int
    blocks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request took, in tokens.

    Attributes:
        document: which one.
        ask: 1 for the first of that document.
        computed: of its prompt, without its question.
        missing: of the document's full blocks, those that our pool does not have as it arrives.
    """

    document: int
    ask: int
    computed: int
    missing: int


@dataclass(frozen=True, slots=True)
class Bar:
    """What our second ask may compute, in tokens: ``near``, and ``spacing`` more once the pool fills up."""

    near: int
    spacing: int

    def is_met_by(self, asked: Asked, *, is_half: bool) -> bool:
        """``is_half``: of the pool more than half is free, so it has all that was asked."""
        return asked.computed <= self.near + (0 if is_half else self.spacing + asked.missing)


class Stored(NamedTuple):
    """What a pool has, in slots.

    Attributes:
        prefix: of full attention.
        bags: of checkpoints: what windows and states need to go on there.
        thinned: bags that were evicted, of inner checkpoints.
    """

    prefix: int
    bags: int
    thinned: int


def draw(shape: str, sizes: Sizes, rng: random.Random) -> list[Document]:
    """Documents that share nothing."""
    block = SHAPES[shape][0].block_size
    quarter = sizes.document_tokens // 4
    lengths = [sizes.document_tokens + rng.randint(-quarter, quarter) for _ in range(sizes.documents)]
    return [Document(length, fresh_hashes(rng, length // block)) for length in lengths]


@contextmanager
def engine_for(shape: str, connector: str, sizes: Sizes, slots: int) -> Iterator[ReplayEngine]:
    """An engine whose GPU cache has room for all siblings, and for stores in flight beside them."""
    groups = SHAPES[shape]
    kind, retention = CONNECTORS[connector]
    longest = sizes.document_tokens * 5 // 4 + sizes.question_tokens + _ANSWER_TOKENS
    of_one = sum(group.blocks_for(longest, 1, sizes.chunk) for group in groups)
    engine = ReplayEngine(
        ReplaySettings(
            connector=kind,
            groups=groups,
            retention=retention,
            gpu_blocks=2 * (sizes.siblings + 1) * of_one,
            cpu_blocks=slots + (kind == "simple"),  # takes one block of its pool for itself
            block_size=groups[0].block_size,
            max_num_seqs=max(sizes.siblings, 1),
            chunk=sizes.chunk,
            max_model_len=longest + 1,
            watch=False,
            inner_checkpoints=connector != ENDS,
        )
    )
    try:
        yield engine
    finally:
        engine.close()


def bar_of(engine: ReplayEngine) -> Bar:
    """Of an engine with our connector."""
    groups = engine.connector._scheduler._engine.groups
    block = groups.position_tokens
    return Bar(max(engine.settings.chunk, block), groups.spacing * block)


def stored(engine: ReplayEngine) -> Stored:
    """What our connector's pool has."""
    allocator = engine.connector._scheduler.allocator
    return Stored(allocator.num_resident, allocator.num_bagged, allocator.num_thinned)


def ask_in_turn(engine: ReplayEngine, documents: Sequence[Document], sizes: Sizes) -> list[Asked]:
    """Ask them one after the other, again and again. Before each request the GPU has forgotten everything."""
    rng = random.Random("questions")
    return [
        asked
        for ask in range(1, sizes.asks + 1)
        for index in range(len(documents))
        for asked in _ask(engine, documents, index, ask, 1, sizes.question_tokens, rng)
    ]


def ask_together(engine: ReplayEngine, documents: Sequence[Document], sizes: Sizes) -> list[Asked]:
    """Ask each once. Then several ask each at the same time, with questions of their own."""
    rng = random.Random("questions")
    return [
        asked
        for ask, at_once in ((1, 1), (2, sizes.siblings))
        for index in range(len(documents))
        for asked in _ask(engine, documents, index, ask, at_once, sizes.question_tokens, rng)
    ]


def _ask(
    engine: ReplayEngine,
    documents: Sequence[Document],
    index: int,
    ask: int,
    at_once: int,
    question_tokens: int,
    rng: random.Random,
) -> list[Asked]:
    document = documents[index]
    num_prompt = document.num_tokens + question_tokens
    missing = _missing(engine, document)
    computed: Counter[str] = Counter()
    for sibling in range(at_once):
        name = f"{index}-{ask}-{sibling}"
        own = fresh_hashes(rng, num_prompt // engine.hash_tokens - len(document.blocks))
        engine.add(name, [*document.blocks, *own], num_prompt, _ANSWER_TOKENS)
        computed[name] = -question_tokens
    while not engine.is_idle():
        for name, num_scheduled in engine.step().output.num_scheduled_tokens.items():
            computed[name] += num_scheduled
    if not engine.scheduler.kv_cache_manager.reset_prefix_cache():
        raise RuntimeError("idle, but some GPU blocks are still held")
    # All tokens of an answer but its last one are computed, too.
    return [Asked(index, ask, tokens - _ANSWER_TOKENS + 1, missing) for tokens in computed.values()]


def _missing(engine: ReplayEngine, document: Document) -> int:
    if engine.settings.connector != "offload":
        return 0
    num_blocks = len(document.blocks)
    known = engine.connector._scheduler.allocator.known_depth(document.blocks, num_blocks)
    return (num_blocks - known) * engine.hash_tokens
