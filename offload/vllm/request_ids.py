"""Ids of requests: what a client knows of them, and what vLLM calls them inside."""

import re

_RANDOM = re.compile("-[0-9a-f]{8}")
_CHOICE = re.compile("[0-9]{1,9}_")
_PLACE = re.compile("[-_][0-9]{1,9}")
_KIND = re.compile("(chatcmpl|cmpl|resp|embd|pool|classify|score|rerank|generate-tokens)[-_]")
MOST_CHARACTERS = 256
"""Of an id that is asked for."""


def names(request: str, asked: str) -> bool:
    """Whether a client that knows ``asked`` means the request that vLLM calls ``request``.

    A client has the id in its response, as ``cmpl-X`` or ``chatcmpl-X``, or the ``X-Request-Id`` that it
    sent, ``X``. vLLM puts the number of the prompt behind that, then 8 random digits, and in front the number
    of a choice where there are several: ``1_cmpl-X-0-89abcdef``. An id that has such parts itself is found
    both with and without them. O(characters),
    and little for requests that are not meant.
    """
    if asked not in request:
        return False
    found = {request}
    for pattern, is_front in ((_CHOICE, True), (_RANDOM, False), (_PLACE, False), (_KIND, True)):
        found |= {each for name in found if (each := _without(name, pattern, is_front=is_front))}
    return asked in found


def _without(name: str, pattern: re.Pattern[str], *, is_front: bool) -> str:
    """Without that part; "" if there is none."""
    if is_front:
        part = pattern.match(name)
        return "" if part is None else name[part.end() :]
    at = max(name.rfind("-"), name.rfind("_"))
    return name[:at] if at > 0 and pattern.fullmatch(name, at) else ""
