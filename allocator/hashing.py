"""Prefix hashes over token ids, for everything that runs without an engine.

An engine computes its own prefix hashes (vLLM: ``request.block_hashes``) and those are used as they are.
Traces, tests and tools use these: xxh3-128 (Y. Collet, https://xxhash.com), chained block by block, so
that equal hashes mean equal tokens from the first token on.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from allocator.errors import ChainError


def hash_chain(
    token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int, *, salt: bytes = b""
) -> list[bytes]:
    """Hash every full block of ``token_ids`` together with all that precedes it.

    Args:
        token_ids: token ids in order, each in [0, 2**32).
        block_size: tokens per block, at least 1. A last partial block has no hash.
        salt: tenants with different salts never share a hash.

    Returns:
        ``len(token_ids) // block_size`` hashes of 16 bytes each, in chain order. O(tokens).

    Raises:
        ChainError: a block size below 1, or token ids that are not integers in range.
    """
    if block_size < 1:
        raise ChainError(f"block_size is {block_size} tokens; it must be at least 1")
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return []
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ChainError(f"token_ids must be one row of integers, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= 2**32:
        raise ChainError(f"token ids must lie in [0, 2**32), got {tokens.min()} to {tokens.max()}")
    data = memoryview(tokens.astype("<u4").tobytes())
    stride = 4 * block_size
    chain: list[bytes] = []
    parent = xxhash.xxh3_128_digest(salt)
    for end in range(stride, len(data) + 1, stride):
        parent = xxhash.xxh3_128_digest(parent + data[end - stride : end])
        chain.append(parent)
    return chain
