"""Where a running request leaves checkpoints: depths of its chain at which others may go on.

    [ document ....... | ....... | ....... | question ]
                       chunk end           |          end of the prompt, without its last token
                                           branch: here it left what the pool, or the GPU, knew

Windows can be had at any depth that a step passes, states at the ends of steps only, or where the engine
hands them over. Ends of prompts and branches are where others go on. Ends of chunks are for those that
nobody has seen: a document that is asked for a second time, with another question.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple


class Candidate(NamedTuple):
    """A depth at which a checkpoint can be stored in this step.

    Attributes:
        depth: in positions.
        is_inner: only as far as there is room for it.
        is_standing: the step begins or ends there.
    """

    depth: int
    is_inner: bool
    is_standing: bool


def candidates(
    tokens: range,
    num_prompt: int,
    branch: int,
    position_tokens: int,
    *,
    handed_over: Collection[int] | None = None,
    is_chunk_end: bool,
) -> Iterator[Candidate]:
    """Depths at which a step that computes these ``tokens`` of a request passes a checkpoint, in order.

    Args:
        tokens: those of the step; what it starts from counts as passed, too.
        num_prompt: tokens of the prompt, of which one at least is always computed.
        branch: tokens after which the request leaves what others know; 0: none.
        position_tokens: tokens of a position.
        handed_over: numbers of tokens after which the engine hands over states; None: there are no states,
            so that any depth will do.
        is_chunk_end: whether the end of the step is worth an inner one.
    """
    wanted = {branch // position_tokens, (num_prompt - 1) // position_tokens}
    depths = set(wanted)
    if is_chunk_end:
        depths.add(tokens.stop // position_tokens)
    if handed_over is not None:
        depths.update(num // position_tokens for num in (tokens.start, *handed_over))
    for depth in sorted(depths):
        num_tokens = depth * position_tokens
        is_standing = num_tokens in (tokens.start, tokens.stop)
        is_there = handed_over is None or is_standing or num_tokens in handed_over
        if is_there and num_tokens > 0 and tokens.start <= num_tokens <= tokens.stop:
            yield Candidate(depth, depth not in wanted, is_standing)
