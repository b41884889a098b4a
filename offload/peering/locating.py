"""How an engine is asked how much of a prompt its pool has, and what it says. It makes the hashes itself.

Whoever asks has the fleet's key, and needs nothing else in common with the engine: no weights, no layout.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from offload.peering.frames import HANDSHAKE_BYTES, Message, ProtocolError, Refused, Small, decoder
from offload.peering.talk import Talk, hear, prove_as_caller, say, unless_refused

MOST_TOKENS = 1 << 17
"""In one question. Of a longer prompt the beginning is asked about."""
MOST_ANSWER_BYTES = 256
"""Of an answer to ``Locate``."""
_TOKEN_BYTES = 4

Label = Annotated[str, Meta(max_length=1024)]


class Asks(Message, tag=13, array_like=True, frozen=True):
    """Whoever says it, in the place of ``About``, asks where prompts are, and nothing else."""


class Heard(Message, tag=14, array_like=True, frozen=True):
    """Questions may be asked.

    Attributes:
        position_tokens: answers are multiples of that.
    """

    position_tokens: Small


class Locate(Message, tag=15, array_like=True, frozen=True):
    """How many leading tokens of that does your pool have?

    Attributes:
        tokens: ids, ``uint32[n]``, lowest byte first.
        cache_salt: of the request; empty: it has none.
        adapter: name and path of its LoRA adapter, as the engine was given them; nothing: it has none.
    """

    tokens: Annotated[bytes, Meta(max_length=_TOKEN_BYTES * MOST_TOKENS)]
    cache_salt: Label = ""
    adapter: Annotated[tuple[Label, ...], Meta(max_length=2)] = ()


class Located(Message, tag=16, array_like=True, frozen=True):
    """The answer to a ``Locate``.

    Attributes:
        num_tokens: leading ones that the pool has, so that a request could go on behind them.
        is_busy: so many others ask that nothing was looked up.
    """

    num_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    is_busy: bool = False


_HEARD, _LOCATED = decoder(Heard, Refused), decoder(Located)


def ask_in(key: bytes) -> Talk[Heard]:
    """Be let in, as one who only asks.

    Raises:
        RefusedError: it has a reason, or another key.
        ProtocolError: that is no engine of a fleet.
    """
    yield from prove_as_caller(key)
    yield from say(Asks())
    heard: Heard = unless_refused((yield from hear(_HEARD, HANDSHAKE_BYTES)))
    return heard


def ask(question: Locate) -> Talk[Located]:
    """Ask that. Raises ProtocolError: the answer is none."""
    yield from say(question)
    located: Located = yield from hear(_LOCATED, MOST_ANSWER_BYTES)
    if located.num_tokens > len(question.tokens) // _TOKEN_BYTES:
        raise ProtocolError(f"{located.num_tokens} tokens of {len(question.tokens) // _TOKEN_BYTES}")
    return located


def question_of(
    token_ids: Sequence[int], cache_salt: str = "", adapter: tuple[str, str] | None = None
) -> Locate:
    """A question about a prompt, or the beginning of it. O(tokens).

    Raises:
        ValueError: no engine has such ids, salt or adapter.
    """
    labels = (cache_salt, *(adapter or ()))
    if any(len(each) > 1024 for each in labels) or not all(labels[1:]):
        raise ValueError("a name that is too long, or empty")
    try:
        tokens = array("I", token_ids[:MOST_TOKENS])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no token ids: {error}") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return Locate(tokens.tobytes(), cache_salt, adapter or ())


def tokens_in(question: Locate) -> list[int]:
    """The ids. Raises ProtocolError: they are not whole, or the adapter is not."""
    if len(question.tokens) % _TOKEN_BYTES:
        raise ProtocolError(f"{len(question.tokens)} bytes of token ids")
    if len(question.adapter) == 1:
        raise ProtocolError("an adapter without a path")
    ids: list[int] = np.frombuffer(question.tokens, dtype="<u4").tolist()
    return ids
