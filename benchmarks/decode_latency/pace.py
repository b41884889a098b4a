"""Lets a batch decode while side prompts come and go, and tells the time of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from benchmarks.long_document_qa.workload import Prompt

__all__ = ["Span", "Stepper", "Timeline", "Token", "keep_pace"]


class Token(NamedTuple):
    """A request got a token: when it was made and when the request was first scheduled, in seconds."""

    request: str
    at: float
    scheduled_at: float
    is_last: bool


class Stepper(Protocol):
    """An engine that is driven step by step."""

    def add(self, request: str, prompt: Prompt, output_tokens: int) -> None:
        """Hand a request over."""

    def step(self) -> list[Token]:
        """Let the engine make a step, or wait for one; returns the tokens it gave."""

    def abort(self, requests: Sequence[str]) -> None:
        """Forget these requests; returns when the engine runs none of them."""


class Span(NamedTuple):
    """From one moment to another, in seconds on the engine's clock."""

    start: float
    end: float


class Timeline(NamedTuple):
    """What happened in a round.

    tokens: for each steady request the times of its tokens, from the last one before the first side
        prompt on.
    prefills: for each side prompt the time from when it was scheduled to its first token. While it waits
        for a restore it is not scheduled.
    """

    tokens: list[list[float]]
    prefills: list[Span]


def keep_pace(
    stepper: Stepper,
    steady_prompts: Sequence[Prompt],
    steady_tokens: int,
    side_prompts: Sequence[Prompt],
    gap_steps: int,
    on_done: Callable[[], None],
) -> Timeline:
    """Run a round: `gap_steps` steps of the steady batch alone before and after each side prompt.

    The pace is told by steps, not by a clock: whatever a step takes, as many of them are measured.

    Args:
        stepper: the engine, which has nothing else to do.
        steady_prompts: of the steady batch, one per request.
        steady_tokens: tokens each of these requests may give.
        side_prompts: asked one at a time, for one token each.
        gap_steps: steps between them.
        on_done: called after each side prompt.

    Raises RuntimeError if a steady request ends before the last side prompt.
    """
    steady = [f"steady-{number}" for number in range(len(steady_prompts))]
    tokens: dict[str, list[float]] = {name: [] for name in steady}
    spans: list[Span] = []

    def step(side: str | None = None) -> bool:
        """Make a step; whether the side prompt was answered."""
        answered = False
        for token in stepper.step():
            if token.request in tokens:
                tokens[token.request].append(token.at)
                if token.is_last:
                    raise RuntimeError("a steady request has ended before the last side prompt was answered")
            elif token.request == side:
                spans.append(Span(token.scheduled_at, token.at))
                answered = True
        return answered

    def decode_alone() -> None:
        """Let every steady request have `gap_steps` more tokens."""
        wanted = {name: len(times) + gap_steps for name, times in tokens.items()}
        while any(len(times) < wanted[name] for name, times in tokens.items()):
            step()

    for name, prompt in zip(steady, steady_prompts, strict=True):
        stepper.add(name, prompt, steady_tokens)
    decode_alone()
    for times in tokens.values():
        del times[:-1]
    for number, prompt in enumerate(side_prompts):
        side = f"side-{number}"
        stepper.add(side, prompt, 1)
        while not step(side):
            pass
        on_done()
        decode_alone()
    stepper.abort(steady)
    return Timeline(list(tokens.values()), spans)
