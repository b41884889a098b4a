"""Requests of chance, and the answer that each must have."""

import random
from dataclasses import dataclass, field
from typing import Any

from offload.testing.upstream import decode, encode, render
from offload.testing.upstream.generation import Limits, steps

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_WORDS = ("w1", "w77", "w511", "字", "and", "é", "\n", "x", "w20字", '"', "\\u", "data: ", "[DONE]")
_INVALID: tuple[dict[str, Any], ...] = (
    {"model": "nobody"},
    {"max_tokens": 0, "max_completion_tokens": None},
    {"min_tokens": 99, "max_tokens": 3, "max_completion_tokens": None},
    {"max_tokens": "many", "max_completion_tokens": None},
    {"stream": False, "stream_options": {"include_usage": True}},
)


@dataclass(frozen=True)
class Whole:
    """What one choice of an answer must be, from begin to end.

    Attributes:
        text, tokens, finish_reason, stop_reason: as vLLM tells them.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        number: of it.
        path, body: of it.
        prompts: token ids of each of its prompts.
        choices: the answer that each choice must have.
        keeps: it cannot go on at another engine after its first byte.
        is_invalid: engines refuse it.
        leaves_after: the client goes away after so many events; None: it stays.
        is_slow: the client reads a little at a time.
    """

    number: int
    path: str
    body: dict[str, Any]
    prompts: list[list[int]] = field(default_factory=list)
    choices: list[Whole] = field(default_factory=list)
    keeps: bool = False
    is_invalid: bool = False
    leaves_after: int | None = None
    is_slow: bool = False

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True


def draw_ask(rng: random.Random, number: int) -> Ask:
    """A request. Its prompt is its own, so that no answer of another one can be taken for its answer."""
    path = CHAT if rng.random() < 0.4 else COMPLETIONS
    text = f"request {number}: " + " ".join(rng.choices(_WORDS, k=rng.choice((2, 10, 60, 200))))
    body: dict[str, Any] = {"model": "model"}
    keeps = False
    if path == CHAT:
        asked = [{"role": "user", "content": text}]
        if rng.random() < 0.3:
            asked = [{"role": "system", "content": "w3 w4" * rng.randrange(20)}, *asked]
        body["messages"] = asked
        prompts = [render(asked)]
    else:
        ids = encode(text)
        prompts = [ids]
        body["prompt"] = ids if rng.random() < 0.5 else text
        if rng.random() < 0.04:
            keeps = True
            prompts = [ids, encode(f"other {number}")]
            body["prompt"] = prompts if rng.random() < 0.5 else [text, f"other {number}"]
    max_tokens = rng.choice((1, 2, 7, 20, 60))
    body["max_completion_tokens" if path == CHAT and rng.random() < 0.5 else "max_tokens"] = max_tokens
    if rng.random() < 0.7:
        body["ignore_eos"] = True
    if rng.random() < 0.15:
        body["min_tokens"] = rng.randrange(max_tokens + 1)
    if rng.random() < 0.2:
        body["stop"] = rng.choice((" w12", [" w1", "字"], ["字字", " w9", " w50 w"], "w"))
        body["include_stop_str_in_output"] = rng.random() < 0.4
    if rng.random() < 0.1:
        body["stop_token_ids"] = rng.sample(range(256, 768), 40)
    if rng.random() < 0.75:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}
    if rng.random() < 0.3:
        body["return_token_ids"] = True
    if rng.random() < 0.2:
        body["logprobs"] = True if path == CHAT else 1
    if rng.random() < 0.12:
        body |= rng.choice(
            ({"n": 2}, {"seed": 7}, {"response_format": {"type": "json_object"}}, {"top_k": 5})
        )
        keeps = keeps or "top_k" not in body
    if rng.random() < 0.1:
        body["kv_transfer_params"] = rng.choice(
            (
                {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1},
                {
                    "cpu_offload_from_v": 1,
                    "cpu_offload_from_peer": "f" * 16,
                    "cpu_offload_from_tokens": 10**9,
                },
                {"cpu_offload_priority": "high"},
                [1, 2],
                "text",
            )
        )
    if body.get("stop") and body.get("stop_token_ids") and not body["include_stop_str_in_output"]:
        keeps = True
    if rng.random() < 0.03:
        return Ask(number, path, body | rng.choice(_INVALID), is_invalid=True)
    limits = Limits.of(body, max_tokens)
    choices = [_whole(prompt, limits) for prompt in prompts for _ in range(body.get("n", 1))]
    leaves = rng.randrange(8) if rng.random() < 0.05 else None
    return Ask(number, path, body, prompts, choices, keeps, False, leaves, rng.random() < 0.05)


def _whole(prompt: list[int], limits: Limits) -> Whole:
    made = list(steps(prompt, limits))
    tokens = [token for each in made for token in each.tokens]
    text = "".join(each.text for each in made)
    return Whole(text, tokens, made[-1].finish_reason, made[-1].stop_reason)


def logprob_tokens(tokens: list[int]) -> list[str]:
    """What logprobs call these tokens."""
    return [decode([each]) for each in tokens]
