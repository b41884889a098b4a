"""Conversations whose templates send answers back as they were, or without their thinking, or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine_replay.engine import own_hash
from benchmarks.engine_replay.workloads import ReplayRequest

__all__ = ["Conversations", "Template"]

_SHARED_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Template:
    """How the turns of a conversation are made one prompt.

    Attributes:
        name: with which names of its requests begin.
        returns: an answer is in the next prompt as it was; else a quarter of it is, under other hashes.
        continues: how likely a turn is followed by another one.
        is_shared: its prompts begin with the same blocks.
    """

    name: str
    returns: bool
    continues: float = 0.9
    is_shared: bool = True


@dataclass(slots=True)
class _Turn:
    """The request that a user sent last; ``hashes`` are those of prompt and answer."""

    template: Template
    request: ReplayRequest
    hashes: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Users have their turns one after the other; each begins anew when its conversation is over.

    Attributes:
        templates: each new conversation takes one of these, in turns.
        users: so many other requests are between two turns of a conversation, less one.
        requests: in all.
        block_size: in tokens.
        prompt_tokens: of a first message, or of a later one; drawn from this range.
        answer_tokens: drawn from this range.
        turns: of a conversation at most.
        later: templates that conversations have from request ``switch_at`` on, those under way too.
        switch_at: None: never.
    """

    templates: tuple[Template, ...]
    users: int = 48
    requests: int = 1_000
    block_size: int = 4
    prompt_tokens: tuple[int, int] = (10, 50)
    answer_tokens: tuple[int, int] = (10, 40)
    turns: int = 8
    later: tuple[Template, ...] = ()
    switch_at: int | None = None

    def ask(self, seed: int) -> Iterator[ReplayRequest]:
        """The requests, in order. Each user's next one comes long after its last one has been answered."""
        rng = random.Random(seed)
        last: list[_Turn | None] = [None] * self.users
        num_turns = [0] * self.users
        num_begun = 0
        for index in range(self.requests):
            user = index % self.users
            templates = (
                self.later if self.switch_at is not None and index >= self.switch_at else self.templates
            )
            turn = last[user]
            if turn is None or num_turns[user] >= self.turns or rng.random() >= turn.template.continues:
                turn, num_turns[user] = None, 0
                template = templates[num_begun % len(templates)]
                num_begun += 1
            else:
                template = turn.template if turn.template in templates else templates[user % len(templates)]
            last[user] = new = self._next(rng, index, template, turn)
            num_turns[user] += 1
            yield new.request

    def _next(self, rng: random.Random, index: int, template: Template, turn: _Turn | None) -> _Turn:
        size, req_id = self.block_size, f"{template.name}-{index}"
        message, answer = rng.randint(*self.prompt_tokens), rng.randint(*self.answer_tokens)
        if turn is None:
            known = [own_hash(template.name, block) for block in range(_SHARED_BLOCKS * template.is_shared)]
            num_prompt = len(known) * size + message
        elif template.returns:
            known = turn.hashes
            num_prompt = turn.request.num_prompt + turn.request.num_output + message
        else:
            known = turn.request.hashes
            num_prompt = turn.request.num_prompt + turn.request.num_output // 4 + message
        hashes = [*known, *(own_hash(req_id, block) for block in range(len(known), num_prompt // size))]
        num_blocks = (num_prompt + answer) // size
        whole = [*hashes, *(own_hash(req_id, block) for block in range(len(hashes), num_blocks))]
        return _Turn(template, ReplayRequest(req_id, hashes, num_prompt, answer), whole)
