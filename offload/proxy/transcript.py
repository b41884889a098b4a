"""What a client has of a streamed answer, and what the next engine must be asked for to go on with it."""

from typing import Any

import msgspec

from offload.proxy.events import DONE, event
from offload.proxy.faults import EngineError
from offload.proxy.stops import Stops, stops_of
from offload.proxy.turns import Turn

__all__ = ["Transcript"]

MAX_HELD = 64
"""Chunks with tokens and without text that are held back; a character has four tokens at most."""
DEFAULT_MAX_TOKENS = 16
"""vLLM's, of a completion."""


class Transcript:
    """The answer of one stream, over as many engines as it takes.

    Events go in as an engine sends them, and come out as the client is to see them. A chunk whose tokens have
    no text is held until text follows. So what the client has ends with a whole character, and the answer can
    go on behind it. Pure: it waits for nothing.

    Attributes:
        prompt_ids: of the prompt, as the first engine has told; None: nobody has.
        tokens: token ids of the answer that the client has, or has had the text of.
        broken: why the answer cannot go on elsewhere; None: it can.
        has_begun: the client has something of the answer.
        is_finished: the client has been told why the answer ends.
        is_done: nothing comes any more.
        is_cut: the answer ended, by a stop string, before the engine knew; ``tail`` ends it.
        is_sure: what was sent ends with the last of ``tokens``. Else that must be looked into.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._body = turn.body
        self._is_raw = turn.keeps is not None
        options = self._body.get("stream_options")
        self._wants_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._stop_strings = stops_of(self._body.get("stop"))
        self._includes_stop = bool(self._body.get("include_stop_str_in_output"))
        self._stops: Stops | None = None
        self.prompt_ids: list[int] | None = None
        self.tokens: list[int] = []
        self._texts: list[str] = []
        self.broken = turn.keeps
        self.has_begun = self.is_finished = self.is_done = self.is_cut = False
        self.is_sure = True
        self._is_elsewhere = self._is_refused = self._has_usage = False
        self._ended: set[int] = set()
        self._offset = 0
        self.begin_leg()

    @property
    def text(self) -> str:
        """What the client has of it."""
        return "".join(self._texts)

    @property
    def shows_tokens(self) -> bool:
        """Whether the client sees single tokens, not only their text."""
        return self._turn.wants_ids or self._body.get("logprobs") not in (None, False)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self._stop_strings

    @property
    def can_go_on(self) -> bool:
        """Whether another engine may be asked for the rest."""
        if not self.has_begun:
            return True
        return self.broken is None and not self._is_elsewhere and self.prompt_ids is not None

    @property
    def is_known(self) -> bool:
        """Whether its end can be told without an engine: what there is to tell of it is known here."""
        return not self._wants_usage if self._is_raw else self.prompt_ids is not None

    def begin_leg(self) -> None:
        """An engine begins with the answer, or with the rest of it."""
        self._base = len(self.tokens)
        self._leg_offset = self._offset
        self._is_verified = self._base == 0
        self._is_rest = self.has_begun
        if not self.has_begun:
            self._identity: dict[str, Any] = {}
        self._head: list[bytes] = []
        self._held: list[tuple[dict[str, Any], list[int], str]] = []

    def shorten(self, num_tokens: int) -> None:
        """The client has no text of what comes after that many tokens: forget them."""
        del self.tokens[num_tokens:]
        self.is_sure = True

    def hold(self, text: str) -> None:
        """The tokens have this text, which the client does not have yet: it may begin a stop string."""
        self._stops = Stops(self._stop_strings, self._includes_stop, self.text, text)
        self.is_sure = True

    def continuation(self) -> bytes | None:
        """What the next engine is asked for. None: there is nothing left to ask for."""
        assert self.can_go_on and self.is_sure and self.prompt_ids is not None
        body = self._turn.decode_fields(None)
        prompt = [*self.prompt_ids, *self.tokens]
        if self._turn.is_chat:
            body["kv_transfer_params"] = {**body.get("kv_transfer_params", {}), "prompt_token_ids": prompt}
        else:
            body["prompt"] = prompt
            if body.get("max_tokens") is None:
                body["max_tokens"] = DEFAULT_MAX_TOKENS
        for key in ("max_tokens", "max_completion_tokens"):
            if body.get(key) is not None:
                body[key] -= len(self.tokens)
                if body[key] < 1:
                    return None
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - len(self.tokens))
        body.pop("truncate_prompt_tokens", None)  # the prompt is what was left of it
        if self._stop_strings:
            body["include_stop_str_in_output"] = True  # what an engine leaves out nobody knows here
        return msgspec.json.encode(body)

    def tail(self) -> list[bytes]:
        """The end of an answer that no engine ends: why, how much, and that it is the end."""
        out = []
        if not self.is_finished:
            out.append(event(self._made({"finish_reason": "length", "stop_reason": None})))
            self.is_finished = True
        if self._wants_usage and not self._has_usage:
            counts = {"prompt_tokens": len(self.prompt_ids or ()), "completion_tokens": len(self.tokens)}
            usage = {**counts, "total_tokens": sum(counts.values())}
            out.append(event({**self._identity, "choices": [], "usage": usage}))
        self.is_done = True
        return [*out, DONE]

    def feed(self, whole: bytes, data: bytes) -> list[bytes]:
        """An event has come. Returns what to send for it.

        Raises:
            EngineError: the engine cannot go on, or this is not how an engine answers.
        """
        if data.strip() == b"[DONE]":
            return self._end()
        chunk = self._read(data)
        if self._is_refusal(chunk):
            self.has_begun = self.is_finished = self._is_refused = True
            return [whole]
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise EngineError("an event is no part of an answer")
        if not choices:
            return self._feed_usage(whole, chunk)
        if self.is_finished:
            raise EngineError("the answer goes on behind its end")
        if self._is_raw:
            return self._feed_raw(whole, choices)
        if len(choices) > 1 or choices[0].get("index") not in (0, None):
            raise EngineError("an event is of an answer that nobody asked for")
        return self._feed_choice(chunk, choices[0])

    def _end(self) -> list[bytes]:
        """The engine says that the stream is over."""
        is_open = self._is_raw and self._turn.num_choices is None and bool(self._ended)
        if not self.is_finished and not is_open:
            raise EngineError("the stream ended before the answer")
        if self._wants_usage and not self._has_usage and not self._is_refused:
            if not self.is_known:
                raise EngineError("the stream ended before it told its usage")
            return self.tail()
        self.is_done = True
        return [DONE]

    def _feed_usage(self, whole: bytes, chunk: dict[str, Any]) -> list[bytes]:
        """A chunk without choices says how much there was, or nothing."""
        if not isinstance(chunk.get("usage"), dict) or not self._wants_usage or self._has_usage:
            return []
        self._has_usage = True
        if self._is_raw:
            return [whole]
        self._identify(chunk)
        self._add_up(chunk)
        return [event(chunk)]

    def _feed_raw(self, whole: bytes, choices: list[dict[str, Any]]) -> list[bytes]:
        """Until there is more than the role, nothing is sent: until then any engine may begin."""
        most = self._turn.num_choices
        for choice in choices:
            index = choice.get("index")
            if type(index) is not int or index in self._ended or not 0 <= index < (most or index + 1):
                raise EngineError("an event is of an answer that nobody asked for")
            self._text_of(choice)
            finish = choice.get("finish_reason")
            if finish in ("abort", "error"):
                raise EngineError(f"the engine gave the answer up: {finish}")
            if finish is not None:
                self._ended.add(index)
        self._head.append(whole)
        if self._turn.is_chat and all(_is_head(each) for each in choices):
            return []
        self.has_begun = True
        self.is_finished = len(self._ended) == most
        told, self._head = self._head, []
        return told

    def _feed_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> list[bytes]:
        holder = chunk if self._turn.is_chat else choice
        self._learn(holder.get("prompt_token_ids"))
        if "prompt_token_ids" in holder and (self._base or not self._turn.wants_ids):
            holder["prompt_token_ids"] = None
        if self._turn.is_chat and _is_head(choice):
            if not self.has_begun:
                self._identify(chunk)
                self._head = [event(chunk)]
            return []
        tokens, text = choice.get("token_ids"), self._text_of(choice)
        finish = choice.get("finish_reason")
        if finish in ("abort", "error"):
            raise EngineError(f"the engine gave the answer up: {finish}")
        if not isinstance(tokens, list):
            if text or finish is None:
                self.broken = self.broken or "an engine that tells no token ids"
            tokens = []
        if not self._is_verified and (tokens or text):
            self.broken = "an engine that does not take the answer so far"
            raise EngineError(self.broken, counts=False)
        if not self._turn.wants_ids:
            choice["token_ids"] = None
        engine_text = text
        if self._stops is not None:
            text = self._apply_stops(choice, text)
            finish = choice.get("finish_reason")
        shows = text or _shows_more(choice)
        if tokens and not shows and finish is None and len(self._held) < MAX_HELD:
            self._held.append((chunk, tokens, ""))
            return []
        out: list[bytes] = [] if self.has_begun else self._head
        for each in (*self._held, (chunk, tokens, text)):
            out += self._sent(*each)
        self._held, self._head = [], []
        self.has_begun = True
        self.is_finished = self.is_finished or finish is not None
        self.is_sure = len(tokens) == 1 and bool(engine_text) and not self._stop_strings
        return out

    def _sent(self, chunk: dict[str, Any], tokens: list[int], text: str) -> list[bytes]:
        """A chunk goes to the client."""
        self.tokens += tokens
        self._texts.append(text)
        choice = chunk["choices"][0]
        self._identify(chunk)
        self._shift(choice.get("logprobs"))
        self._add_up(chunk)
        is_empty = self._turn.is_chat and not choice.get("delta") and choice.get("finish_reason") is None
        if is_empty and not self.shows_tokens:
            return []  # it came only because token ids were asked for
        return [event(chunk)]

    def _apply_stops(self, choice: dict[str, Any], text: str) -> str:
        assert self._stops is not None
        num_before = len(self.tokens) + sum(len(tokens) for _, tokens, _ in self._held)
        is_last = choice.get("finish_reason") is not None
        may_stop = num_before >= (self._body.get("min_tokens") or 0)
        found = self._stops.push(text, is_last, choice.get("stop_reason"), may_stop)
        if found.stop is not None:
            self.is_cut = not is_last
            choice["finish_reason"], choice["stop_reason"] = "stop", found.stop
        if self._turn.is_chat:
            choice["delta"] = {**choice.get("delta", {}), "content": found.text}
        else:
            choice["text"] = found.text
        return found.text

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self._turn.is_chat:
            text = choice.get("text", 0)
        else:
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                raise EngineError("an event of a chat without a delta")
            text = delta.get("content")
            if delta.get("tool_calls"):
                self.broken = "tool calls"
            if _shows_more(choice) or (choice.get("token_ids") and "content" not in delta):
                self._is_elsewhere = True  # a parser is at work, and only it knows where it is
            elif text:
                self._is_elsewhere = False
        if text is not None and not isinstance(text, str):
            raise EngineError("an event whose text is no text")
        return text or ""

    def _learn(self, ids: object) -> None:
        if not isinstance(ids, list):
            return
        if not self._base:
            self.prompt_ids = ids
        elif len(ids) == len(self.prompt_ids or ()) + self._base:
            self._is_verified = ids == [*(self.prompt_ids or ()), *self.tokens[: self._base]]

    def _identify(self, chunk: dict[str, Any]) -> None:
        """All chunks of an answer have the same name, whoever makes them."""
        if not self._identity:
            names = ("id", "object", "created", "model")
            self._identity = {key: chunk[key] for key in names if key in chunk}
        elif self._is_rest:
            chunk |= self._identity

    def _add_up(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if not self._base or not isinstance(usage, dict):
            return
        num_prompt = len(self.prompt_ids or ())
        told = usage.get("completion_tokens")
        count = self._base + (told if isinstance(told, int) else 0)
        usage |= {
            "prompt_tokens": num_prompt,
            "completion_tokens": count,
            "total_tokens": num_prompt + count,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], num_prompt)

    def _shift(self, logprobs: object) -> None:
        """Places of tokens in a completion's text count from its beginning."""
        if not isinstance(logprobs, dict) or not isinstance(logprobs.get("text_offset"), list):
            return
        places, names = logprobs["text_offset"], logprobs.get("tokens")
        if not places or not isinstance(names, list) or len(names) != len(places):
            return
        if self._base:
            logprobs["text_offset"] = places = [each + self._leg_offset for each in places]
        self._offset = places[-1] + len(names[-1])

    def _made(self, ending: dict[str, Any]) -> dict[str, Any]:
        """A chunk of our own, without text."""
        content: dict[str, Any] = {"delta": {"content": ""}} if self._turn.is_chat else {"text": ""}
        return {**self._identity, "choices": [{"index": 0, **content, "logprobs": None, **ending}]}

    def check_invariants(self) -> None:
        """What holds between any two calls. O(1)."""
        assert self._base <= len(self.tokens), (self._base, len(self.tokens))
        assert not (self.is_finished or self.is_cut) or self.has_begun, vars(self)
        assert not self.is_done or self.is_finished, vars(self)
        assert len(self._held) <= MAX_HELD, len(self._held)

    @staticmethod
    def _read(data: bytes) -> dict[str, Any]:
        try:
            chunk = msgspec.json.decode(data)
        except (ValueError, RecursionError):
            raise EngineError("an event is not JSON") from None
        if not isinstance(chunk, dict):
            raise EngineError("an event is not a JSON object")
        return chunk

    @staticmethod
    def _is_refusal(chunk: dict[str, Any]) -> bool:
        """Whether the engine finds fault with the request. Raises EngineError if it does so with itself."""
        error = chunk.get("error")
        if error is None:
            return False
        code = error.get("code") if isinstance(error, dict) else None
        if not isinstance(code, int) or code >= 500 or code < 400:
            raise EngineError(f"the stream has an error of status {code}")
        return True


def _shows_more(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a chat says something beside text, such as thoughts."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(
        value for key, value in delta.items() if key not in ("role", "content")
    )


def _is_head(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a chat says the role and nothing else."""
    delta = choice.get("delta")
    return (
        isinstance(delta, dict)
        and "role" in delta
        and not any(value for key, value in delta.items() if key != "role")
        and not choice.get("token_ids")
        and choice.get("finish_reason") is None
    )
