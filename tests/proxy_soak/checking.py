"""What the client got, against what it must get."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from tests.proxy_soak.asking import Ask, Whole, logprob_tokens


class Outcome(StrEnum):
    """How a request ended."""

    WHOLE = "whole"
    ERROR_EVENT = "error event"
    REFUSED = "refused"
    PASSED_ON = "an engine's 4xx"
    LEFT = "client left"


class WrongAnswerError(AssertionError):
    """A client got what it must not get."""


def check_whole(ask: Ask, raw: bytes) -> None:
    """An answer that is no stream. Raises WrongAnswerError."""
    told = json.loads(raw)
    choices = sorted(told["choices"], key=lambda each: each["index"])
    _equal(len(choices), len(ask.choices), "choices")
    for choice, whole in zip(choices, ask.choices, strict=True):
        text = choice["message"]["content"] if ask.is_chat else choice["text"]
        _choice(ask, whole, text, choice.get("token_ids"), choice["finish_reason"], choice["stop_reason"])
        _logprobs(ask, whole, [choice.get("logprobs")])
    _usage(ask, told["usage"])
    _equal(told.get("kv_transfer_params"), None, "kv_transfer_params of the client's answer")


def check_stream(ask: Ask, raw: bytes) -> Outcome:
    """The bytes of a stream that has ended. Raises WrongAnswerError."""
    events = _events(raw)
    _equal(events[-1:], ["[DONE]"], "end of the stream")
    _equal(events.count("[DONE]"), 1, "[DONE]")
    chunks = [json.loads(each) for each in events[:-1]]
    is_error = bool(chunks) and "error" in chunks[-1]
    if is_error:
        chunks.pop()
    if any("error" in each for each in chunks):
        raise WrongAnswerError("an error event before the end")
    usages = [each["usage"] for each in chunks if each.get("usage") and not each["choices"]]
    _equal(len({each["id"] for each in chunks}) <= 1, True, "one id")
    seen = _Choices(ask)
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen.add(choice)
    if is_error:
        seen.check_begin()
        return Outcome.ERROR_EVENT
    seen.check()
    options = ask.body.get("stream_options") or {}
    _equal(len(usages), int(bool(options.get("include_usage"))), "chunks of usage")
    for usage in usages:
        _usage(ask, usage)
    return Outcome.WHOLE


class _Choices:
    """Parts of choices put together."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._text = [""] * len(ask.choices)
        self._ids: list[list[int]] = [[] for _ in ask.choices]
        self._logprobs: list[list[Any]] = [[] for _ in ask.choices]
        self._ends: list[list[Any]] = [[] for _ in ask.choices]
        self._roles = [0] * len(ask.choices)

    def add(self, choice: dict[str, Any]) -> None:
        at = choice["index"]
        if self._ends[at]:
            raise WrongAnswerError("a choice goes on after its end")
        if self._ask.is_chat:
            self._roles[at] += "role" in choice["delta"]
            self._text[at] += choice["delta"].get("content") or ""
        else:
            self._text[at] += choice["text"]
        self._ids[at] += choice.get("token_ids") or []
        self._logprobs[at].append(choice.get("logprobs"))
        if choice.get("finish_reason") is not None:
            self._ends[at].append((choice["finish_reason"], choice.get("stop_reason")))

    def check(self) -> None:
        for at, whole in enumerate(self._ask.choices):
            _equal(len(self._ends[at]), 1, "ends of a choice")
            ids = self._ids[at] or None
            _choice(self._ask, whole, self._text[at], ids, *self._ends[at][0])
            _logprobs(self._ask, whole, self._logprobs[at])
            _equal(self._roles[at], int(self._ask.is_chat), "roles")

    def check_begin(self) -> None:
        """What came before an error is the beginning of the answer."""
        for text, whole in zip(self._text, self._ask.choices, strict=True):
            if not whole.text.startswith(text):
                raise WrongAnswerError(f"{text!r} does not begin {whole.text!r}")


def _choice(ask: Ask, whole: Whole, text: str, ids: list[int] | None, finish: object, stop: object) -> None:
    _equal(text, whole.text, "text")
    _equal(ids, whole.tokens if ask.body.get("return_token_ids") else None, "token ids")
    _equal((finish, stop), (whole.finish_reason, whole.stop_reason), "reasons")


def _logprobs(ask: Ask, whole: Whole, parts: Sequence[Any]) -> None:
    told = [each for each in parts if each]
    if not ask.body.get("logprobs"):
        _equal(told, [], "logprobs")
        return
    if ask.is_chat:
        names = [each["token"] for part in told for each in part["content"]]
    else:
        names = [each for part in told for each in part["tokens"]]
        offsets = [each for part in told for each in part["text_offset"]]
        ends = [0]
        for name in names:
            ends.append(ends[-1] + len(name))
        _equal(offsets, ends[:-1], "text offsets")
    _equal(names, logprob_tokens(whole.tokens), "tokens of logprobs")


def _usage(ask: Ask, usage: dict[str, Any]) -> None:
    _equal(usage["prompt_tokens"], sum(map(len, ask.prompts)), "prompt tokens of usage")
    _equal(usage["completion_tokens"], sum(len(each.tokens) for each in ask.choices), "tokens of usage")


def _events(raw: bytes) -> list[str]:
    """Data of events, read anew here, so that what the proxy's own reader gets wrong shows."""
    text = raw.decode()  # strictly: no character may be cut
    if not text.endswith("\n\n"):
        raise WrongAnswerError(f"the stream ends inside an event: {text[-80:]!r}")
    found = []
    for block in text.split("\n\n"):
        lines = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        if not lines and block.strip() and not block.strip("\n").startswith(":"):
            raise WrongAnswerError(f"neither an event nor a comment: {block[:80]!r}")
        if lines:
            found.append("\n".join(lines))
    return found


def _equal(got: object, wanted: object, what: str) -> None:
    if got != wanted:
        raise WrongAnswerError(f"{what}: {str(got)[:300]!r} instead of {str(wanted)[:300]!r}")
