"""What must hold of all restores in flight. For tests."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from offload.scheduler.restores import Restores


def check_restores(restores: "Restores") -> None:
    """Index, parts and filling blocks are those of the restores in flight."""
    parts = Counter(job.task.restore.restore_id for job in restores._ledger.of(restores))
    in_flight = parts.keys()
    assert in_flight == restores._restores.keys(), (
        f"{in_flight} load, {list(restores._restores)} have not ended"
    )
    for restore in restores:
        num_parts = parts[restore.restore_id]
        assert num_parts == restore.parts_left, f"{num_parts} parts in flight, {restore} says otherwise"
    holding = [job for job in restores._ledger.of(restores) if job.blocks]
    assert all(job.given_up for job in holding), f"{holding} hold blocks"
    awaited = [restore for restore in restores if not (restore.is_void or restore.is_cancelled)]
    restores._index.check_invariants(awaited)
    filling = {each for restore in restores if not restore.was_stuck for each in restore.block_ids.tolist()}
    assert set(np.flatnonzero(restores._is_filling).tolist()) == filling, f"{filling} are being filled"
    num_filling = sum(len(restore.block_ids) for restore in restores if not restore.was_stuck)
    restores._pressure.check_invariants(num_filling)
    for request_id, (restore, depth) in restores._followed.items():
        assert restore.followers[request_id] == depth, f"{request_id} does not follow {restore} to {depth}"
    restores.carryover.check_invariants()
    restoring = {
        each.request.request_id for each in restores if not (each.was_stuck or each.request.is_finished())
    }
    unknown = (restoring | restores._landed.keys()) - restores._waiting.names
    assert not unknown, f"{unknown} are restored, and are not known to wait"
    restores._waiting.check_invariants()
    restores._arrivals.check_invariants(list(restores))
    for request_id, restore in restores._landed.items():
        assert restore.request.request_id == request_id, f"{restore} is filed under {request_id}"
        assert not restore.parts_left and not restore.is_cancelled, f"{restore} has not landed"
        assert not (restore.is_void or restore.request.is_finished()), f"nobody may wait for {restore}"
    void = {each.request.request_id for each in restores if each.is_void and not each.request.is_finished()}
    assert void <= restores._failed, f"restores of {void} are void, and these may have another"
    for restore in restores:
        assert restore.depths == sorted(set(restore.followers.values())), f"{restore} has other depths"
    restores.choices.check_invariants()
    parts_left = [job for job in restores._ledger.of(restores) if not job.given_up]
    num_blocks = sum(job.num_blocks for job in parts_left if not job.task.restore.follows)
    restores.choices.queue.check_invariants(num_blocks * restores._common.block_bytes)
