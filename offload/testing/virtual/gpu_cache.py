"""Whether GPU blocks hold what their prefix hashes say, also where nobody has asked for it again."""

from collections import defaultdict
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.request import Request

from offload.testing.virtual.groups import STATE
from offload.testing.virtual.history import WrongBytesError
from offload.testing.virtual.inputs import Inputs
from offload.testing.virtual.tags import Words

if TYPE_CHECKING:
    from offload.testing.virtual.engine import VirtualEngine


class GpuCache:
    """The prefix cache of the GPU, as vLLM's block pool has it."""

    def __init__(self, engine: "VirtualEngine") -> None:
        self._engine = engine
        self._requests: list[Request] = []

    def follow(self, request: Request) -> None:
        """Remember the request, whose prefix hashes name what blocks should hold."""
        self._requests.append(request)

    def check(self) -> None:
        """All blocks that have a hash; nothing may be under way. O(tokens of requests whose blocks are left).

        Left out are adapters, which may be loaded again under the same name: their old KV is vLLM's to keep.

        Raises:
            WrongBytesError: the next request to find such a block would attend to wrong bytes.
        """
        blocks = defaultdict(list)
        for block in self._engine.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                blocks[get_block_hash(block.block_hash)].append(block)
        for request in reversed(self._requests):
            found = [blocks.pop(each) for each in request.block_hashes if each in blocks]
            inputs = Inputs.of(request)
            if found and inputs.adapter is None:
                chain = inputs.chain()
                chain.extend(request.all_token_ids[: found[-1][0].block_hash_num_tokens])
                for block in (block for same in found for block in same):
                    self._check_block(block, chain.tags)

    def _check_block(self, block: KVCacheBlock, tags: Words) -> None:
        stop = block.block_hash_num_tokens
        for number, rank in enumerate(self._engine.ranks):
            cells = rank.groups[get_group_id(block.block_hash)]
            start = stop - 1 if cells.group.kind == STATE else (stop - 1) // cells.span * cells.span
            due = cells.expected(tags[start:stop][cells.own], self._engine.generation)
            held = cells.cells[:, block.block_id, : due.shape[1], 0]
            if (held != due).any():
                raise WrongBytesError(
                    f"rank {number}: GPU block {block.block_id} has the hash of tokens {start} to {stop} of "
                    f"group {cells.index} ({cells.group.kind}), and does not hold them\n"
                    f"{self._engine.history.of_block(block.block_id)}"
                )
