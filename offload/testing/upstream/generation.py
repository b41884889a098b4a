"""One answer, step by step, as vLLM makes it: limits, stop strings and text held back for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offload.testing.upstream.words import EOS, Detokenizer, decode, next_token

__all__ = ["Limits", "RefusalError", "Step", "steps"]


class RefusalError(ValueError):
    """A request that vLLM would answer with 400; or with ``status``."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Step(NamedTuple):
    """What one step of the engine says.

    Attributes:
        tokens: new token ids.
        text: new text, which may lag behind.
        finish_reason, stop_reason: why the answer ends here, if it does.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class Limits(NamedTuple):
    """What ends an answer, read from a request."""

    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool

    @classmethod
    def of(cls, body: Mapping[str, Any], default_max_tokens: int) -> "Limits":
        """Raises RefusalError where vLLM would."""
        given = body.get("max_completion_tokens")
        if given is None:
            given = body.get("max_tokens")
        max_tokens = default_max_tokens if given is None else given
        min_tokens = body.get("min_tokens", 0)
        if not isinstance(max_tokens, int) or not isinstance(min_tokens, int):
            raise RefusalError("max_tokens and min_tokens are integers")
        if max_tokens < 1:
            raise RefusalError(f"max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= min_tokens <= max_tokens:
            raise RefusalError(f"min_tokens must be from 0 to max_tokens={max_tokens}, got {min_tokens}")
        stop = body.get("stop") or ()
        return cls(
            max_tokens,
            min_tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
            tuple(body.get("stop_token_ids") or ()),
            bool(body.get("include_stop_str_in_output")),
            bool(body.get("ignore_eos")),
        )


def steps(prompt: Sequence[int], limits: Limits) -> Iterator[Step]:
    """The answer, a token in each step; the last one has a finish reason. O(1) each, but for stop strings."""
    ids, detokenizer = list(prompt), Detokenizer(prompt)
    text, sent = "", 0
    held = 0 if limits.include_stop or not limits.stop else max(map(len, limits.stop)) - 1
    while True:
        token = _next(ids, limits, len(ids) - len(prompt))
        ids.append(token)
        count = len(ids) - len(prompt)
        if token == EOS and not limits.ignore_eos:
            yield Step([token], text[sent:], "stop", None)
            return
        if token in limits.stop_token_ids and count >= limits.min_tokens:
            if limits.include_stop:
                text += detokenizer.step(token)
            yield Step([token], text[sent:], "stop", token)
            return
        before = len(text)
        text += detokenizer.step(token)
        found = _stop_in(text, before, limits) if count > limits.min_tokens else None
        if found is not None:
            stop, end = found
            end = end if limits.include_stop else end - len(stop)
            yield Step([token], text[sent:end], "stop", stop)
            return
        if count == limits.max_tokens:
            yield Step([token], text[sent:], "length", None)
            return
        upto = max(sent, len(text) - held)
        yield Step([token], text[sent:upto], None, None)
        sent = upto


def logprob(token: int) -> float:
    """Of a token, wherever it is."""
    return -(token % 17) / 8.0


def completion_logprobs(tokens: Sequence[int], offset: int) -> dict[str, Any]:
    """Those of a completion; ``offset``: of its first token's text."""
    texts = [decode([each]) for each in tokens]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob(each) for each in tokens],
        "tokens": texts,
        "top_logprobs": [{text: logprob(each)} for each, text in zip(tokens, texts, strict=True)],
    }


def chat_logprobs(tokens: Sequence[int]) -> dict[str, Any]:
    """Those of a chat."""
    return {
        "content": [
            {
                "token": decode([each]),
                "logprob": logprob(each),
                "bytes": list(decode([each]).encode()),
                "top_logprobs": [],
            }
            for each in tokens
        ]
    }


def _next(ids: Sequence[int], limits: Limits, count: int) -> int:
    token = next_token(ids)
    if token == EOS and count < limits.min_tokens:
        return 256 + len(ids) % 512
    return token


def _stop_in(text: str, before: int, limits: Limits) -> tuple[str, int] | None:
    """The stop string that ends first in what came after ``before``, and where it ends."""
    found = []
    for stop in limits.stop:
        at = text.find(stop, max(0, before + 1 - len(stop)))
        if at >= 0:
            found.append((at + len(stop), stop))
    return (min(found)[1], min(found)[0]) if found else None
