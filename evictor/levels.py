"""How many slots a position takes, to the nearest power of two."""

import math

_MAX_LEVEL = 20


def level_of(weight: int, num_positions: int) -> int:
    """The power of two nearest to the slots per position."""
    if weight == num_positions:
        return 0
    if not weight:
        return -_MAX_LEVEL
    return max(-_MAX_LEVEL, min(round(math.log2(weight / num_positions)), _MAX_LEVEL))
