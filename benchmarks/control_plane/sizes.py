"""Sizes that the benchmark's processes agree on."""

from __future__ import annotations

BLOCK_TOKENS = 16
TAIL_TOKENS = 3
"""At the end of each prompt, behind its full blocks: what a warm request computes. Without it vLLM has the
last block computed again, and not every connector would be asked for it."""
DECODE_REQUESTS = 256
DECODE_PROMPT_TOKENS = 512
"""Of the shortest; the others' are up to 15 tokens longer."""
MOST_TOKENS = 4_000_000
"""Of a prompt: the replay engine's model takes a little more."""
