"""What to move, as pure functions of what the engine says. Tokens and blocks in, block counts out."""

from collections.abc import Iterable
from itertools import pairwise

_FIRST_PART_BYTES = 16 << 20  # less than a millisecond of PCIe
_LEAST_PART_BLOCKS = 16
_ANSWER_RUN_TOKENS = 512  # computed again in some ten milliseconds


def storable_blocks(num_computed: int, num_tokens: int, num_hashes: int, block_size: int) -> int:
    """Leading blocks of a running request that are full once this step has run.

    The engine's own counter is optimistic (drafts, tokens not sampled yet), so known tokens and hashes
    bound it.

    Args:
        num_computed: tokens computed when this step has run, without those that draft layers write again.
        num_tokens: tokens whose ids are known, without those neither.
        num_hashes: prefix hashes that exist.
        block_size: tokens per block.
    """
    return min(max(min(num_computed, num_tokens), 0) // block_size, num_hashes)


def is_worth_storing(num_full: int, num_seen: int, num_prompt_blocks: int, run: int) -> bool:
    """Whether to look for uncached blocks when ``num_full`` are full and ``num_seen`` were at the last look.

    A prompt's blocks are stored as soon as they are full. Those of an answer fill one at a time, and a store
    of one block costs as much scheduler time as one of hundreds. So they are stored ``run`` at a time, and
    the rest when the request ends. If it is preempted before, no more than that is computed again.
    """
    return num_full < num_seen or num_seen < min(num_full, num_prompt_blocks) or num_full >= num_seen + run


def tokens_to_next_look(
    num_tokens: int, num_seen: int, num_prompt_blocks: int, run: int, block_size: int
) -> int:
    """Tokens until ``is_worth_storing`` may turn true, for a request with ``num_tokens`` computed at most."""
    target = num_tokens // block_size + 1 if num_seen < num_prompt_blocks else num_seen + run
    return target * block_size - num_tokens


def answer_run_blocks(block_size: int) -> int:
    """How many blocks of an answer are stored at a time."""
    return max(1, _ANSWER_RUN_TOKENS // block_size)


def storable_blocks_at_finish(
    num_computed: int,
    num_unconfirmed: int,
    num_prompt: int,
    num_tokens: int,
    num_hashes: int,
    block_size: int,
    num_unsettled: int = 0,
) -> int:
    """Leading blocks of a finishing request that are full and confirmed.

    The last sampled token was never computed, though hashes may cover it; ``num_unconfirmed`` tokens
    were counted as computed before they were sampled. The KV of ``num_unsettled`` tokens is not final.
    """
    computed = min(num_computed - num_unconfirmed, max(num_prompt, num_tokens - 1))
    return min(max(computed - num_unsettled, 0) // block_size, num_hashes)


def loadable_tokens(
    resident_blocks: int, num_local: int, num_tokens: int, block_size: int, most: int | None = None
) -> int:
    """Tokens the pool can add to ``num_local`` tokens the GPU has; a multiple of the block size.

    A full hit may be offered whole: for loads between steps the scheduler itself steps back one token. Not of
    a single token: with none computed it would ask again, for ever. ``most``: that the request allows,
    rounded down to blocks; None: it does not say.
    """
    if num_tokens < 2:
        return 0
    stop = min(resident_blocks, num_tokens // block_size)
    if most is not None:
        stop = min(stop, (num_local + most) // block_size)
    return max(stop * block_size - num_local, 0)


def restorable_blocks(num_resident: int, num_gpu_blocks: int, num_volatile: int, num_step_blocks: int) -> int:
    """Leading blocks that may be restored of ``num_resident`` ones in the pool.

    The engine computes the last ``num_volatile`` ones again. It admits a restore only while
    ``num_step_blocks`` are free beside it, so one that leaves fewer of all GPU blocks would wait for ever.
    One GPU block is never given out.
    """
    return max(0, min(num_resident - num_volatile, num_gpu_blocks - 1 - num_step_blocks))


def load_range(num_local: int, num_external: int, block_size: int) -> range:
    """Chain positions that a load of ``num_external`` tokens behind ``num_local`` ones fills.

    Both are what the scheduler settled on, which may be less than was offered.
    """
    return range(num_local // block_size, (num_local + num_external) // block_size)


def load_parts(num_blocks: int, first_part: int) -> list[tuple[int, int]]:
    """Split a load into parts ``(start, stop)``, each as large as all before it together.

    Whoever shares the beginning of a load waits for at most twice what is shared, and a load of any
    size has few parts.
    """
    stops = [0]
    while stops[-1] < num_blocks:
        stops.append(min(max(2 * stops[-1], first_part), num_blocks))
    return list(pairwise(stops))


def following_parts(num_blocks: int, first_part: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """Split a load into parts ``(start, stop)`` that begin where jobs do which fill what it reads.

    Before the first of these ``cuts`` all is there, and it is split as any load.
    """
    inner = sorted({cut for cut in cuts if 0 <= cut < num_blocks})
    before = inner[0] if inner else num_blocks
    return load_parts(before, first_part) + list(pairwise([*inner, num_blocks]))


def first_part_blocks(block_bytes: int) -> int:
    """Blocks in the first part of a load, when one rank's part of a block has that many bytes."""
    return max(_LEAST_PART_BLOCKS, _FIRST_PART_BYTES // block_bytes)


def holdable_blocks(num_gpu_blocks: int, num_held: int, *, is_patient: bool) -> int:
    """How many more GPU blocks stores may hold, when those in flight hold ``num_held``.

    A held block whose request has gone is one the scheduler cannot give out until its copy has ended. So
    stores in flight leave half of the GPU. They leave all but a sixteenth of it while requests have had to
    wait for them for too long. What does not fit is planned again a step later. When its request has ended it
    waits in the queue, from where it can be taken back.
    """
    return max(0, max(1, num_gpu_blocks // (2 if is_patient else 16)) - num_held)


def blocks_to_run(num_running: int, num_prefill: int, block_size: int, num_drafts: int = 0) -> int:
    """GPU blocks that running requests can take in a step that computes ``num_prefill`` tokens of prompts.

    Each computes a token and ``num_drafts`` drafts.
    """
    return num_running * -(-(1 + num_drafts) // block_size) + -(-num_prefill // block_size)


def may_load(num_gpu_blocks: int, num_stuck: int, num_blocks: int) -> bool:
    """Whether a load into ``num_blocks`` GPU blocks may begin while stuck ones hold ``num_stuck``.

    Those are lost to the engine until the stuck loads end. Loads that are tried while some are stuck may be
    stuck as well; together they leave half of the GPU's blocks.
    """
    return not num_stuck or num_stuck + num_blocks <= num_gpu_blocks // 2
