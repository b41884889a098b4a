"""Users who ask, wait for the answer, think, and ask again: five kinds of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.engine_replay.engine import own_hash

__all__ = ["BLOCK", "KINDS", "Kind", "Turn"]

BLOCK = 64
"""Tokens of a block: larger than usual, so that a replay is short. What a token takes is the same."""

_ANSWER = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: hashes of its prompt, its tokens, and the pause after the answer before, in seconds."""

    hashes: list[bytes]
    num_prompt: int
    num_output: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Users of one kind, and the memory that they meet.

    Attributes:
        users: at a time.
        gpu_tokens: that the GPU's cache holds.
        pool_tokens: that the CPU pool holds.
        turns: what one of them asks, without end.
        longest: tokens of a request at most.
    """

    users: int
    gpu_tokens: int
    pool_tokens: int
    turns: Callable[[random.Random, int], Iterator[Turn]]
    longest: int = 8_192


@cache
def _named(name: str, num_blocks: int) -> tuple[bytes, ...]:
    return tuple(own_hash(name, block) for block in range(num_blocks))


def _turn(
    rng: random.Random,
    known: tuple[bytes, ...],
    own_tokens: int,
    num_output: int = _ANSWER,
    pause: float = 0.0,
) -> Turn:
    """A prompt that begins with these blocks, and goes on with tokens that nobody else has."""
    num_prompt = len(known) * BLOCK + own_tokens
    own = _own(rng, len(known), num_prompt // BLOCK)
    return Turn([*known, *own], num_prompt, num_output, pause)


def _own(rng: random.Random, start: int, stop: int) -> list[bytes]:
    name = f"own {rng.getrandbits(128)}"
    return [own_hash(name, block) for block in range(start, stop)]


def _new_prompts(rng: random.Random, user: int) -> Iterator[Turn]:
    while True:
        yield _turn(rng, (), rng.randint(2_000, 6_000))


def _documents(rng: random.Random, user: int) -> Iterator[Turn]:
    while True:
        document = f"document {rng.randrange(8)}"
        yield _turn(rng, _named(document, 7_680 // BLOCK), rng.randint(20, 200))


def _shared_prefix(rng: random.Random, user: int) -> Iterator[Turn]:
    """A prompt that all share, then notes of each user, then a question."""
    shared = _named("shared", 4_096 // BLOCK)
    notes = _named(f"notes {user}", 64 + 2_048 // BLOCK)[64:]
    while True:
        yield _turn(rng, (*shared, *notes), rng.randint(20, 200))


def _long_documents(rng: random.Random, user: int) -> Iterator[Turn]:
    while True:
        number = rng.randrange(12)
        num_blocks = (16_384 + 2_048 * number) // BLOCK
        yield _turn(rng, _named(f"long document {number}", num_blocks), rng.randint(20, 200))


def _agents(rng: random.Random, user: int) -> Iterator[Turn]:
    """Sessions over one system prompt. Each turn has all before it, and the result of a tool."""
    system = _named("system", 4_096 // BLOCK)
    while True:
        known, pause = system, 0.0
        for _ in range(rng.randint(8, 24)):
            turn = _turn(rng, known, rng.randint(200, 2_000), 2 * _ANSWER, pause)
            yield turn
            answered = (turn.num_prompt + turn.num_output) // BLOCK
            known = (*turn.hashes, *_own(rng, len(turn.hashes), answered))
            pause = min(rng.expovariate(1 / 4.0), 30.0)


KINDS = {
    "no reuse": Kind(16, 131_072, 524_288, _new_prompts),
    "documents": Kind(8, 49_152, 262_144, _documents),
    "shared prefix": Kind(50, 65_536, 262_144, _shared_prefix),
    "long documents": Kind(6, 131_072, 524_288, _long_documents, 49_152),
    "agents": Kind(24, 131_072, 1_048_576, _agents, 65_536),
}
"""By name."""
