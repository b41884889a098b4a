"""``kv_transfer_params`` of hand-offs: what a proxy, a prefill engine and a decode engine tell each other.

A request that is to be handed off says ``do_remote_decode``. The prefill engine answers with a *reference*:
where KV of the prompt is, and how far it goes. The proxy gives that to the decode engine, which takes it for
a hint where to look and how long to wait. It never says what to read: that follows from the prompt alone.

Neither torch nor vLLM is imported here, so a proxy can have this without them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.scheduler.client_values import quoted, warn_once

VERSION = 1
MAX_TOKENS = 10**9
"""A reference names no more."""
NAME_BYTES = 8
"""Of a peer and of an epoch; written as twice as many hex digits."""
TIP_BYTES = 16
"""Of the last prefix hash that a reference names, from its beginning; written as hex digits."""

_PARAMS = "kv_transfer_params"
_FROM = "cpu_offload_from_"
_V, _PEER, _EPOCH, _TOKENS, _TIP = (f"{_FROM}{name}" for name in ("v", "peer", "epoch", "tokens", "tip"))
_REFUSED = "cpu_offload_refused"
_DECODE, _PREFILL = "do_remote_decode", "do_remote_prefill"
HAND_OFF_KEYS = (_V, _PEER, _EPOCH, _TOKENS, _TIP, _REFUSED)
"""Ours, beside the hints of requests."""

REPORT = "cpu_offload_report"
"""A hint in a request; in a response, what it asks for."""
_HINTS = "cpu_offload_"
_OF_CLIENTS = ("prompt_token_ids", "max_load_tokens", "max_offload_tokens")
"""Keys of vLLM's own that clients may set."""
MAX_REFUSED_CHARACTERS = 120
_MAX_KEYS = 256
"""Keys of a client's object that are looked at."""
_NAME = re.compile(f"[0-9a-f]{{{2 * NAME_BYTES}}}")
_TIP_DIGITS = re.compile(f"[0-9a-f]{{{2 * TIP_BYTES}}}")
_ABSENT = object()


def tip_of(prefix_hash: bytes) -> str:
    """How a reference names the last position that it is about."""
    return prefix_hash[:TIP_BYTES].ljust(TIP_BYTES, b"\0").hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferParams:
    """What ``kv_transfer_params`` say of a hand-off. All defaults: nothing.

    Attributes:
        do_remote_decode: the request is to be handed off; asked of a prefill engine.
        do_remote_prefill: vLLM's word for KV that comes from elsewhere. vLLM adds to it what the prefill
            engine had found, so that the decode engine's usage is right.
        peer: which engine has KV of the prompt, as 16 hex digits; None: there is no reference.
        epoch: which of that engine's lives, as 16 hex digits; None: whichever.
        tokens: leading tokens that it has, or will have soon; None: up to the last full block of the prompt.
        tip: ``tip_of`` the prefix hash at their end, as 32 hex digits; None: not known.
        refused: why there is no reference although one was asked for.

    Raises:
        ValueError: a value that its key cannot have.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    peer: str | None = None
    epoch: str | None = None
    tokens: int | None = None
    tip: str | None = None
    refused: str | None = None

    def __post_init__(self) -> None:
        for name in ("do_remote_decode", "do_remote_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {quoted(getattr(self, name))}; use true or false")
        for name, value in (("peer", self.peer), ("epoch", self.epoch)):
            if value is not None and not _is_text(value, _NAME):
                raise ValueError(f"{name} is {quoted(value)}; give {2 * NAME_BYTES} hex digits")
        if self.tokens is not None and not _is_count(self.tokens):
            raise ValueError(f"tokens is {quoted(self.tokens)}; give a whole number from 1 to {MAX_TOKENS}")
        if self.tip is not None and not _is_text(self.tip, _TIP_DIGITS):
            raise ValueError(f"tip is {quoted(self.tip)}; give {2 * TIP_BYTES} hex digits")
        if self.refused is not None and not _is_reason(self.refused):
            raise ValueError(
                f"refused is {quoted(self.refused)}; give {MAX_REFUSED_CHARACTERS} characters of text at most"
            )
        if self.peer is None and (self.epoch, self.tokens, self.tip) != (None, None, None):
            raise ValueError("a reference lacks its peer; give one, or leave epoch, tokens and tip out")
        if self.tip is not None and self.tokens is None:
            raise ValueError("tip says where the tokens end; give tokens too, or leave tip out")

    @classmethod
    def read(cls, params: object) -> "KVTransferParams":
        """What a client or a proxy sent, whatever it is. Never raises.

        What is wrong is ignored: a reference as a whole. The log has one warning per kind for the life of the
        process. O(1), however much was sent; keys of others are left alone.
        """
        if not isinstance(params, Mapping):
            if params is not None:
                warn_once(
                    _PARAMS, "no object", f"ignored: {quoted(params)} is not an object of keys and values"
                )
            return _NOTHING
        read = cls(
            do_remote_decode=params.get(_DECODE) is True,
            do_remote_prefill=params.get(_PREFILL) is True,
            refused=_taken(params, _REFUSED, _is_reason, "a text"),
        )
        version = params.get(_V, _ABSENT)
        if version is _ABSENT or version is None:
            return read
        if type(version) is not int or version != VERSION:
            warn_once(_PARAMS, _V, f"ignored: {_V!r} is {quoted(version)}; known is {VERSION}")
            return read
        try:
            return replace(
                read,
                peer=_required(params.get(_PEER)),
                epoch=params.get(_EPOCH),
                tokens=params.get(_TOKENS),
                tip=params.get(_TIP),
            )
        except ValueError as error:
            warn_once(_PARAMS, _FROM, f"ignored: a reference whose {error}")
            return read

    def to_dict(self) -> dict[str, Any]:
        """For a request or a response: flat, with JSON's types, 300 bytes of JSON at most."""
        told: dict[str, Any] = {}
        if self.do_remote_decode:
            told[_DECODE] = True
        if self.do_remote_prefill:
            told[_PREFILL] = True
        if self.peer is not None:
            told[_V] = VERSION
        pairs = ((_PEER, self.peer), (_EPOCH, self.epoch), (_TOKENS, self.tokens), (_TIP, self.tip))
        told |= {key: value for key, value in (*pairs, (_REFUSED, self.refused)) if value is not None}
        return told

    @staticmethod
    def strip(params: object) -> dict[str, Any]:
        """What a client may say: hints of ours, and ``prompt_token_ids`` and limits of vLLM's own.

        References, and keys of connectors that name addresses or blocks of other engines, are left out. Never
        raises. Of the first 256 keys only.
        """
        if not isinstance(params, Mapping):
            return {}
        kept: dict[str, Any] = {key: params[key] for key in _OF_CLIENTS if key in params}
        for key, _ in zip(params, range(_MAX_KEYS), strict=False):
            if isinstance(key, str) and key.startswith(_HINTS) and not _is_of_hand_offs(key):
                kept[key] = params[key]
        return kept

    @staticmethod
    def merge(client: object, engine: object) -> dict[str, Any]:
        """What to send with a request: what its client may say, and what an engine, or the proxy, has said.

        Never raises. What the engine said comes first, key by key, and is taken as it is: it may be of
        another connector.
        """
        said = dict(engine.items()) if isinstance(engine, Mapping) else {}
        said.pop(REPORT, None)  # of another leg, and told to nobody
        return KVTransferParams.strip(client) | said


def _is_of_hand_offs(key: str) -> bool:
    return key.startswith(_FROM) or key == _REFUSED


def _is_text(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_REFUSED_CHARACTERS and value.isascii()


def _required(peer: object) -> Any:
    if peer is None:
        raise ValueError("peer is missing")
    return peer


def _taken(params: Mapping[Any, Any], key: str, is_valid: Any, values: str) -> Any:
    value = params.get(key)
    if value is None or is_valid(value):
        return value
    warn_once(_PARAMS, key, f"ignored: {key!r} is {quoted(value)}; use {values}")
    return None


_NOTHING = KVTransferParams()
