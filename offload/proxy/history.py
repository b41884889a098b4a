"""Which engine has had which prompts, as far as the proxy has routed them: bounded, and only likely.

Engines forget without telling. So this is a hint where to look, never a reason to fail.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import xxhash

from offload.proxy.policies import Request

__all__ = ["History"]

TOKENS_PER_PIECE = 256
BYTES_PER_PIECE = 1024
_BYTES_PER_TOKEN = 4


class History:
    """Prefixes by engine. Each is a digest of a request's first pieces: 256 tokens, or 1 KiB of text.

    Args:
        max_tokens: that are remembered, over all engines; what was met longest ago is forgotten first. An
            entry takes about 300 bytes, for 256 tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_pieces = max_tokens // TOKENS_PER_PIECE
        self._engines: OrderedDict[int, dict[str, None]] = OrderedDict()
        self._num_pieces = 0

    def __len__(self) -> int:
        """Pieces that are remembered."""
        return self._num_pieces

    def depths(self, request: Request) -> dict[str, int]:
        """Leading tokens of a prompt that engines have had; estimated for text. O(bytes)."""
        depths: dict[str, int] = {}
        for digest, tokens in _pieces(request):
            engines = self._engines.get(digest)
            if engines is None:
                break
            self._engines.move_to_end(digest)
            for url in engines:
                depths[url] = tokens
        return depths

    def add(self, request: Request, url: str) -> None:
        """An engine has a prompt now. O(bytes)."""
        for digest, _ in _pieces(request):
            engines = self._engines.setdefault(digest, {})
            self._engines.move_to_end(digest)
            self._num_pieces += url not in engines
            engines[url] = None
        while self._num_pieces > self._max_pieces:
            _, engines = self._engines.popitem(last=False)
            self._num_pieces -= len(engines)

    def forget(self, url: str) -> None:
        """An engine has nothing any more. O(pieces)."""
        for digest in [digest for digest, engines in self._engines.items() if url in engines]:
            engines = self._engines[digest]
            del engines[url]
            self._num_pieces -= 1
            if not engines:
                del self._engines[digest]

    def check_invariants(self) -> None:
        """What holds between any two calls. O(pieces)."""
        assert self._num_pieces == sum(map(len, self._engines.values()))
        assert self._num_pieces <= self._max_pieces
        assert all(self._engines.values())


def _pieces(request: Request) -> Iterator[tuple[int, int]]:
    """Digests of all whole pieces and what is before them, and the tokens there."""
    digest = xxhash.xxh3_64()
    if request.token_ids is not None:
        digest.update(request.model.encode(errors="replace"))
        digest.update(repr(request.body.get("cache_salt")).encode(errors="replace"))
        ids = _as_bytes(request.token_ids)
        size = TOKENS_PER_PIECE * 8
        for end in range(size, len(ids) + 1, size):
            digest.update(ids[end - size : end])
            yield digest.intdigest(), end // 8
        return
    if not request.text:
        return
    digest.update(request.text[0])
    text = b"".join(request.text[1:])
    for end in range(BYTES_PER_PIECE, len(text) + 1, BYTES_PER_PIECE):
        digest.update(text[end - BYTES_PER_PIECE : end])
        yield digest.intdigest(), end // _BYTES_PER_TOKEN


def _as_bytes(ids: Sequence[int]) -> bytes:
    try:
        return array("q", ids).tobytes()
    except (TypeError, OverflowError):  # an engine refuses these
        return b""
