"""What settings are compared in: shapes of blocks, how many at once, and what copies them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.copy_bandwidth.shapes import Shape
from offload.config import Verify
from offload.messages import LOAD, STORE, Route

__all__ = ["MIB", "SHAPES", "Case", "cases_of"]

_KIB = 1 << 10
MIB = 1 << 20
"""Bytes."""
SHAPES = (
    Shape("64 KiB", 1, 64 * _KIB),
    Shape("512 KiB", 1, 512 * _KIB),
    Shape("2 MiB", 1, 2 * MIB),
    Shape("2 MiB in 32", 32, 64 * _KIB),
)
"""From small to large, the largest also in pieces."""
_LOADS = tuple(Verify)
_STORES = (Verify.ALWAYS, Verify.NEVER)


@dataclass(frozen=True, slots=True)
class Case:
    """`copies` is as in the rows."""

    route: Route
    shape: Shape
    num_blocks: int
    copies: str
    of_blocks: bool

    @property
    def settings(self) -> tuple[Verify, ...]:
        """Those that are compared."""
        return _LOADS if self.route == LOAD else _STORES

    @property
    def nbytes(self) -> int:
        """Of one load or store."""
        return self.num_blocks * self.shape.block_bytes


def cases_of(shape: Shape, num_blocks: int, on_gpu: bool, bandwidths: Sequence[float]) -> Iterator[Case]:
    """All kinds of copies that are measured with such blocks: loads, then stores."""
    if on_gpu:
        kinds = [("cuda", False)]
    else:
        kinds = [("cpu", True), ("cpu", False)]
        if shape.num_pieces == 1:  # checksums of slots do not see how many pieces a block has
            kinds += [(f"{bandwidth:g} GB/s", False) for bandwidth in bandwidths]
    for copies, of_blocks in kinds:
        yield Case(LOAD, shape, num_blocks, copies, of_blocks)
    for copies, of_blocks in kinds:
        if copies in ("cpu", "cuda"):
            yield Case(STORE, shape, num_blocks, copies, of_blocks)
