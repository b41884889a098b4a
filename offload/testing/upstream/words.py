"""A tokenizer and a model that are pure functions: the next token follows from all token ids before it.

So an answer that is interrupted and continued elsewhere can be compared with the one that was not. Tokens 1
to 255 are bytes, as in byte-level tokenizers: a character may take several. Those from 256 on are words.
"""

import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EOS", "Detokenizer", "answer", "decode", "encode", "next_token", "render"]

EOS = 0
"""Ends an answer; it has no text."""
FIRST_WORD = 256
NUM_WORDS = 512
_WORD = re.compile(r" w(\d{1,3})(?!\d)")
_WORDS = tuple(f" w{number}".encode() for number in range(NUM_WORDS))
_UNFINISHED = "�"


def encode(text: str) -> list[int]:
    """Token ids of a text. O(n)."""
    ids: list[int] = []
    at = 0
    for word in _WORD.finditer(text):
        if int(word[1]) >= NUM_WORDS or str(int(word[1])) != word[1]:
            continue
        ids += text[at : word.start()].encode()
        ids.append(FIRST_WORD + int(word[1]))
        at = word.end()
    return [*ids, *text[at:].encode()]


def decode(ids: Sequence[int]) -> str:
    """The text of token ids; U+FFFD for what is no character, or none yet. O(n)."""
    return b"".join(_bytes_of(each) for each in ids).decode(errors="replace")


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation, as a chat template makes them."""
    text = "".join(f"<{each.get('role')}>{_text_of(each.get('content'))}\n" for each in messages)
    return encode(f"{text}<assistant>")


def next_token(ids: Sequence[int]) -> int:
    """What the model says after these token ids. O(1). One in 101 is EOS, one in 11 begins a character."""
    if ids and ids[-1] == 0xE5:
        return 0xAD
    if len(ids) > 1 and ids[-1] == 0xAD and ids[-2] == 0xE5:
        return 0x97
    drawn = zlib.crc32(array("q", [len(ids), *ids[-8:]]).tobytes())
    if drawn % 101 == 0:
        return EOS
    return 0xE5 if drawn % 11 == 0 else FIRST_WORD + drawn // 11 % NUM_WORDS


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The model's answer: up to ``num_tokens`` tokens, or to EOS and with it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(next_token(ids))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


class Detokenizer:
    """Text token by token, as vLLM does it: nothing while a character is unfinished.

    That has a trap: behind a prompt that ends inside a character, the first text is the whole prompt's.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._pending = list(prompt) if decode(prompt[-4:]).endswith(_UNFINISHED) else []

    def step(self, token: int) -> str:
        """The text that is complete with this token."""
        self._pending.append(token)
        text = decode(self._pending)
        if text.endswith(_UNFINISHED):
            return ""
        self._pending = []
        return text


def _bytes_of(token: int) -> bytes:
    if token < FIRST_WORD:
        return bytes([token]) if token else b""
    return _WORDS[(token - FIRST_WORD) % NUM_WORDS]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
