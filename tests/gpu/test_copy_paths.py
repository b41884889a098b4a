"""Every path that this GPU offers brings the right bytes, and a trial at start ends with one of them."""

import numpy as np
import pytest
import torch

from offload.copiers import CudaCopier, Direction
from offload.inline import InlineExecutor
from offload.transfer import TransferEngine
from offload.vllm.copy_paths import pick_paths, possible_paths
from tests.gpu.cache import ONE_PIECE, PER_HEAD, PER_LAYER, Cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("layout", [ONE_PIECE, PER_LAYER, PER_HEAD], ids=lambda layout: layout.name)
def test_every_path_brings_the_right_bytes(layout: object) -> None:
    with Cache(torch.bfloat16, 16, layout) as cache:  # type: ignore[arg-type]
        sizes = cache.layout.piece_sizes
        before = cache.blocks()
        block_ids, slots = np.array([5, 2, 9, 17]), np.array([1, 0, 7, 20])
        for number, copy in enumerate(possible_paths(cache.device, sizes).values()):
            engine = TransferEngine(
                cache.layout, CudaCopier(cache.device, copy), cache.seals, make_executor=InlineExecutor
            )
            cache.pool[slots] = 0
            engine.store(10 * number + 1, block_ids, slots)
            engine.close(seconds=30)
            assert (cache.pool[slots] == before[block_ids]).all()

            cache.pool[slots] = 7 + number
            engine = TransferEngine(
                cache.layout, CudaCopier(cache.device, copy), cache.seals, make_executor=InlineExecutor
            )
            cache.seals.seal(10 * number + 2, block_ids, slots)
            engine.load(10 * number + 3, slots, np.full_like(slots, 10 * number + 2), block_ids)
            engine.close(seconds=30)
            assert (cache.blocks()[block_ids] == 7 + number).all()
            for row, block_id in zip(before[block_ids], block_ids.tolist(), strict=True):
                cache.pool[0] = row
                engine = TransferEngine(
                    cache.layout, CudaCopier(cache.device, copy), cache.seals, make_executor=InlineExecutor
                )
                cache.seals.seal(99, np.array([block_id]), np.array([0]))
                engine.load(98, np.array([0]), np.array([99]), np.array([block_id]))
                engine.close(seconds=30)
            assert (cache.blocks() == before).all(), "and no other"


def test_a_trial_ends_with_possible_paths() -> None:
    with Cache(torch.bfloat16, 16, PER_HEAD) as cache:
        possible = possible_paths(cache.device, cache.layout.piece_sizes).values()
        picked = pick_paths(cache.device, cache.layout, cache.num_blocks, cache.num_blocks)
        assert picked.keys() == set(Direction)
        assert all(any(copy is each or callable(copy) for each in possible) for copy in picked.values())
