"""A request as the proxy sees it: parsed once, checked, and made into what each engine is sent.

Nothing of a client's bytes is sent on as it came: what an engine reads is what was looked at here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from offload.proxy.continuing import why_not_continued
from offload.proxy.faults import ClientError
from offload.proxy.policies import Request
from offload.transfer_params import REPORT, KVTransferParams

__all__ = ["CHAT", "COMPLETIONS", "Turn", "parse", "strip"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHARACTERS_PER_TOKEN = 4
"""Where nobody has counted."""
TEXT_PIECE = 1024
"""Bytes of a text that are one piece of what is remembered of prompts."""

_NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "stream_interval",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "best_of",
    "echo",
    "return_token_ids",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "repetition_detection",
    "thinking_token_budget",
    "use_beam_search",
)
"""Of a request, what a prefill leg has no use for, or vLLM refuses beside ``max_tokens`` 1."""
_OF_ENGINES = ("ec_transfer_params",)
"""What only engines and proxies have to say."""


@dataclass(frozen=True)
class Turn:
    """A request for an answer.

    Attributes:
        request: what policies see.
        body: without what clients may not say.
        is_chat, is_stream: of it.
        num_prompts: in it.
        keeps: why it is answered by one engine from its first byte on; None: it can be continued.
        alone: why it has no prefill leg, whatever the policy says; None: it may have one.
        num_stripped: keys that were taken out.
    """

    request: Request
    body: dict[str, Any]
    is_chat: bool
    is_stream: bool
    num_prompts: int
    keeps: str | None
    alone: str | None
    num_stripped: int

    @property
    def wants_ids(self) -> bool:
        """Whether the client itself asks for token ids."""
        return bool(self.body.get("return_token_ids"))

    @property
    def num_choices(self) -> int | None:
        """Answers that are asked for; None: only an engine knows."""
        if self.body.get("prompt_embeds") is not None or self.body.get("use_beam_search"):
            return None
        return self.num_prompts * (self.body.get("n") or 1)

    def prefill_body(self) -> bytes:
        """The request of the prefill leg: one token, no stream, and an offer to hand over."""
        body = {key: value for key, value in self.body.items() if key not in _NOT_FOR_PREFILL}
        body |= {"max_tokens": 1, "n": 1, "stream": False}
        if body.get("max_completion_tokens") is not None:
            body["max_completion_tokens"] = 1
        offer = KVTransferParams(do_remote_decode=True).to_dict()
        params = KVTransferParams.merge(body.get("kv_transfer_params"), offer)
        body["kv_transfer_params"] = {key: value for key, value in params.items() if key != REPORT}
        return msgspec.json.encode(body)

    def decode_body(self, reference: Mapping[str, Any] | None) -> bytes:
        """The request of a decode leg. ``reference``: where KV is, as an engine has told."""
        return msgspec.json.encode(self.decode_fields(reference))

    def decode_fields(self, reference: Mapping[str, Any] | None) -> dict[str, Any]:
        """The same before it is JSON."""
        body = dict(self.body)
        params = KVTransferParams.merge(body.get("kv_transfer_params"), reference)
        if params:
            body["kv_transfer_params"] = params
        if self.keeps is None:
            body["return_token_ids"] = True
        return body


def parse(path: str, raw: bytes, authorization: str | None, min_prefill_tokens: int) -> Turn:
    """Read a request. Raises ClientError where no engine could read it. O(bytes)."""
    body = decode_object(raw)
    num_stripped = strip(body)
    is_chat = path == CHAT
    _check_shape(body)
    ids, text, num_tokens, num_prompts = _prompt_of(body, is_chat)
    request = Request(
        path,
        model if isinstance(model := body.get("model"), str) else "",
        num_tokens,
        ids,
        text,
        body,
        authorization,
    )
    is_stream = body.get("stream") is True
    return Turn(
        request,
        body,
        is_chat,
        is_stream,
        num_prompts,
        why_not_continued(body, is_chat, num_prompts) if is_stream else "it is no stream",
        _why_alone(body, num_tokens, min_prefill_tokens),
        num_stripped,
    )


def _check_shape(body: Mapping[str, Any]) -> None:
    """What an answer is to look like must be clear: engines take ``"yes"`` for true, and ``"2"`` for 2."""
    stream, n = body.get("stream"), body.get("n")
    if stream is not None and not isinstance(stream, bool):
        raise ClientError(400, "stream must be true or false")
    if n is not None and (type(n) is not int or not 1 <= n < 1 << 31):
        raise ClientError(400, "n must be a whole number, at least 1")


def decode_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ClientError."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise ClientError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise ClientError(400, "the body is not a JSON object")
    return body


def strip(body: dict[str, Any]) -> int:
    """Take out of a request what only engines and proxies say. Returns how many keys that were. O(keys)."""
    stripped = 0
    for key in _OF_ENGINES:
        stripped += body.pop(key, None) is not None
    given = body.pop("kv_transfer_params", None)
    kept = KVTransferParams.strip(given)
    if given is not None:
        stripped += len(given) - len(kept) if isinstance(given, dict) else 1
    if kept:
        body["kv_transfer_params"] = kept
    arguments = body.get("vllm_xargs")
    if isinstance(arguments, dict):
        # vLLM puts both into one dict.
        foreign = [each for each in arguments if _is_foreign(each)]
        if foreign:
            body["vllm_xargs"] = {key: value for key, value in arguments.items() if key not in foreign}
            stripped += len(foreign)
    return stripped


def _is_foreign(key: str) -> bool:
    if key in ("kv_transfer_params", *_OF_ENGINES) or key.startswith(("remote_", "do_remote_")):
        return True
    return key.startswith("cpu_offload_") and not KVTransferParams.strip({key: 0})


def _prompt_of(body: Mapping[str, Any], is_chat: bool) -> tuple[list[int] | None, list[bytes], int, int]:
    """Token ids, pieces of text, tokens, prompts; what is no prompt is for an engine to refuse."""
    head = msgspec.json.encode([body.get("model"), body.get("cache_salt"), is_chat])
    params = body.get("kv_transfer_params") or {}
    if is_chat:
        ids = _ids(params.get("prompt_token_ids"))
        if ids is not None:
            return ids, [], len(ids), 1
        shaping = ("tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
        head += msgspec.json.encode([body.get(key) for key in shaping])
        messages = body.get("messages")
        parts = [msgspec.json.encode(each) for each in messages] if isinstance(messages, list) else []
        return None, [head, *parts], sum(map(len, parts)) // CHARACTERS_PER_TOKEN, 1
    prompt = body.get("prompt")
    ids = _ids(prompt)
    if ids is not None:
        return ids, [], len(ids), 1
    if isinstance(prompt, str):
        return None, [head, prompt.encode(errors="replace")], len(prompt) // CHARACTERS_PER_TOKEN, 1
    prompts = prompt if isinstance(prompt, list) else []
    num_tokens = sum(
        len(each) // (CHARACTERS_PER_TOKEN if isinstance(each, str) else 1)
        for each in prompts
        if isinstance(each, str | list)
    )
    return None, [], num_tokens, len(prompts)


def _ids(value: object) -> list[int] | None:
    """Token ids, if a list looks like it: the first and the last are looked at here, engines look at all."""
    is_list = isinstance(value, list) and value and type(value[0]) is int and type(value[-1]) is int
    return value if is_list else None  # type: ignore[return-value]


def _why_alone(body: Mapping[str, Any], num_tokens: int, min_prefill_tokens: int) -> str | None:
    if num_tokens < min_prefill_tokens:
        return "short"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # with these an engine does not read its prefix cache
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    if body.get("use_beam_search"):
        return "beam_search"
    return None
