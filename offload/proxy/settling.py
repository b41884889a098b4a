"""Where exactly the text that a client has ends, among the tokens of an answer: an engine can say."""

from collections.abc import Mapping

import msgspec

from offload.proxy.faults import EngineError
from offload.proxy.members import Leg, Member
from offload.proxy.transcript import Transcript
from offload.proxy.turns import Turn
from offload.proxy.upstream import Upstreams

__all__ = ["settle"]

_SECONDS = 10.0
_CONTEXT = 16
"""Tokens of the prompt that are read along: the first token of an answer has another text without them."""
_MOST_UNFINISHED = 3
"""Tokens at the end that can be a part of a character: it has four bytes at most."""


async def settle(
    upstreams: Upstreams, member: Member, transcript: Transcript, turn: Turn, headers: Mapping[str, str]
) -> None:
    """Have ``transcript`` end with a whole character, and know what is held back for stop strings.

    Otherwise the next engine would lose text, or repeat some: behind a prompt that ends inside a character,
    vLLM gives the text of the whole prompt. Where that cannot be had, the transcript is broken.

    Raises:
        EngineError: the engine does not answer.
    """
    if transcript.is_sure or transcript.prompt_ids is None:
        return
    before = transcript.prompt_ids[-_CONTEXT:]
    tokens = transcript.tokens
    for cut in range(_MOST_UNFINISHED + 1):
        kept = len(tokens) - cut
        if kept < 0:
            break
        text = await _text_of(upstreams, member, turn, headers, [*before, *tokens[:kept]])
        if text is None:
            transcript.broken = "an engine that does not detokenize"
            return
        if text.endswith("�"):
            continue
        if cut and transcript.shows_tokens:
            break  # the client knows them
        if not transcript.stop_strings:
            transcript.shorten(kept)
            return
        context = await _text_of(upstreams, member, turn, headers, before)
        if context is None or not text.startswith(context + transcript.text):
            break
        transcript.shorten(kept)
        transcript.hold(text[len(context) + len(transcript.text) :])
        return
    transcript.broken = "text whose end nobody knows"


async def _text_of(
    upstreams: Upstreams, member: Member, turn: Turn, headers: Mapping[str, str], tokens: list[int]
) -> str | None:
    body: dict[str, object] = {"tokens": tokens}
    if turn.request.model:
        body["model"] = turn.request.model
    told = await upstreams.whole(
        f"{member.url}/detokenize", headers, msgspec.json.encode(body), Leg(lambda: False), _SECONDS, False
    )
    if told.status != 200:
        return None
    try:
        answer = msgspec.json.decode(told.body)
    except (ValueError, RecursionError):
        raise EngineError("its text is not JSON") from None
    text = answer.get("prompt") if isinstance(answer, dict) else None
    return text if isinstance(text, str) else None
