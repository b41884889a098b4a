"""Regions: whose they are, who adopts them, how much memory they take."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import TierError
from offload.files.superblock import SUPERBLOCK
from offload.messages import Fingerprint, WorkerFacts
from offload.worker.pool import region as module
from offload.worker.pool.region import Region, RegionPlan, RegionShape, look_into
from offload.worker.replicas import ONE, Replicas, Sharing, share_pool

SHAPE = RegionShape(100, 3000)
FACTS = WorkerFacts(100, 3000, Fingerprint("", "", 1, 16, "", ""))


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    yield folder / "kv-offload-pool"
    shutil.rmtree(folder)


def plan(root: Path, namespace: str = "me", most_bytes: int | None = None, rank: int = 0) -> RegionPlan:
    return RegionPlan(root, namespace, rank, 1, most_bytes)


def opened(root: Path, namespace: str = "me", shape: RegionShape = SHAPE, most: int | None = None) -> Region:
    region = plan(root, namespace, most).open(shape, 1)
    region.begin(region.epoch + 1, plan(root, namespace).identity(1), shape)
    return region


def regions(root: Path) -> set[str]:
    return {each.name for each in root.iterdir() if each.is_dir()}


def pool(root: Path) -> Sharing:
    return share_pool(ONE, FACTS, plan=plan(root))


def test_its_files_are_private(root: Path) -> None:
    region = opened(root)
    assert stat.S_IMODE(region.path.stat().st_mode) == 0o700
    for path in region.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (region.path / "pool").stat().st_size == SHAPE.num_bytes
    region.close()
    region.close()


def test_it_is_adopted_once_nobody_owns_it(root: Path) -> None:
    first = opened(root)
    second = opened(root)
    assert first.path != second.path
    first.close()
    third = opened(root)
    assert (third.path, third.epoch) == (first.path, 2)
    second.close()
    third.close()
    assert len(regions(root)) == 2


@pytest.mark.parametrize("how", ["namespace", "rank", "sharing", "slots", "slot bytes"])
def test_another_one_is_not_adopted(root: Path, how: str) -> None:
    opened(root).close()
    namespace, rank, sharing, shape = "me", 0, 1, SHAPE
    if how == "namespace":
        namespace = "you"
    elif how == "rank":
        rank = 1
    elif how == "sharing":
        sharing = 2
    else:
        shape = RegionShape(99, 3000) if how == "slots" else RegionShape(100, 2999)
    other = plan(root, namespace, rank=rank).open(shape, sharing)
    assert other.epoch == 0
    assert regions(root) == {other.path.name}, "it has taken the place of the one that nobody owns"
    other.close()


def test_what_is_owned_stays(root: Path) -> None:
    live = opened(root)
    opened(root, "you").close()
    other = opened(root, "others")
    assert regions(root) == {live.path.name, other.path.name}
    live.close()
    other.close()


def test_a_bound_on_all(root: Path) -> None:
    bound = 2 * SHAPE.num_bytes + 3 * 8192
    first = opened(root, "a", most=bound)
    opened(root, "b", most=bound).close()
    third = opened(root, "c", most=bound)
    assert regions(root) == {first.path.name, third.path.name}, "the free one has left"
    with pytest.raises(TierError, match=rf"{first.path.name}.*{third.path.name}.*raise gib"):
        opened(root, "d", most=bound)
    first.close()
    third.close()


@pytest.mark.parametrize("damage", ["format", "superblock", "gone", "short", "other table"])
def test_what_cannot_be_read_is_made_anew(root: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = opened(root).path
    for each in [plan(root).open(SHAPE, 1)]:
        each.close()
    if damage == "format":
        content = (path / SUPERBLOCK).read_bytes()
        (path / SUPERBLOCK).write_bytes(content.replace(b"tier 1\n", b"tier 99\n"))
    elif damage == "superblock":
        (path / SUPERBLOCK).write_bytes(b"?")
    elif damage == "gone":
        (path / "pool").unlink()
    elif damage == "short":
        os.truncate(path / "pool", 4096)
    else:
        monkeypatch.setattr(module, "TABLE_FORMAT", 2)
    region = opened(root)
    assert region.epoch == 1
    assert (region.path / "pool").stat().st_size == SHAPE.num_bytes
    region.close()


def test_one_whose_start_was_killed_is_made_anew(root: Path) -> None:
    plan(root).open(SHAPE, 1).close()
    region = plan(root).open(SHAPE, 1)
    assert region.epoch == 0
    region.close()


def test_a_file_system_that_is_too_small(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = pool(root)
    assert live.lasting is not None
    [path] = root.glob("*.1")
    values = list(os.statvfs("/dev/shm"))
    values[4] = 10  # f_bavail
    monkeypatch.setattr(module.os, "fstatvfs", lambda fd: os.statvfs_result(values))
    with pytest.raises(TierError, match=rf"no room beside.*{path.name}.*lower cpu_gib.*--shm-size"):
        opened(root)
    live.lasting.close()
    adopted = opened(root)
    assert adopted.path == path, "its pages are there"
    adopted.close()


def test_a_pool_holds_what_it_held(root: Path) -> None:
    first = pool(root)
    assert first.slots is not None and first.tables is not None and first.lasting is not None
    assert first.lasting.facts.epoch == 1 and not len(first.lasting.facts.kept.slots)
    first.slots[7 * 3000] = 42
    first.lasting.close()
    second = pool(root)
    assert second.slots is not None and second.lasting is not None
    assert second.slots[7 * 3000] == 42
    assert second.lasting.facts.epoch == 2
    second.lasting.close()


def test_an_epoch_is_higher_than_that_of_any_generation(root: Path) -> None:
    """The scheduler takes the highest of all ranks, so slots here may have one that this rank never had."""
    first = pool(root)
    assert first.tables is not None and first.lasting is not None
    first.tables.fills[3] = (9 << 40) + 1
    first.lasting.close()
    second = pool(root)
    assert second.lasting is not None and second.lasting.facts.epoch == 10
    second.lasting.close()


def test_all_pages_are_there_before_the_first_store(root: Path) -> None:
    held = pool(root)
    assert held.lasting is not None
    [path] = root.glob("*/pool")
    assert 512 * path.stat().st_blocks >= SHAPE.num_bytes
    held.lasting.close()


_CHILD = """
import sys, os, signal
from pathlib import Path
from offload.messages import Fingerprint, WorkerFacts
from offload.worker.pool.region import RegionPlan
from offload.worker.replicas import ONE, share_pool
facts = WorkerFacts(100, 3000, Fingerprint("", "", 1, 16, "", ""))
held = share_pool(ONE, facts, plan=RegionPlan(Path(sys.argv[1]), sys.argv[2], 0, 1))
print(held.lasting.facts.epoch, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_loop_never_takes_more_memory(root: Path) -> None:
    """Also where each start wants another region than the one before."""
    for number in range(6):
        namespace = "me" if number < 3 else f"me {number}"
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(root), namespace], capture_output=True, text=True, check=False
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert int(child.stdout) == (number + 1 if number < 3 else 1)
        taken = sum(512 * path.stat().st_blocks for path in root.glob("*/*"))
        assert taken <= SHAPE.num_bytes + 3 * 4096
        assert len(regions(root)) == 1


def test_what_can_be_seen_from_outside(root: Path) -> None:
    held = pool(root)
    assert held.lasting is not None
    [path] = (each for each in root.iterdir() if each.is_dir())
    contents = look_into(path)
    assert contents is not None
    assert (contents.num_slots, contents.num_kept, contents.superblock.epoch) == (100, 0, 1)
    assert np.array_equal(held.lasting.unproven(100), np.zeros(100, dtype=bool))
    held.lasting.close()
    os.truncate(path / "pool", 100)
    with pytest.raises(TierError, match="too short"):
        look_into(path)


def test_what_another_rank_still_maps_is_not_adopted(root: Path) -> None:
    """Its owner was killed; a rank that shares the pool is yet to notice, and may still write to it."""
    said: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=30)

    def exchange(place: int, mine: Any) -> list[Any]:
        said[place] = mine
        barrier.wait()
        heard = list(said)
        barrier.wait()
        return heard

    def member(place: int) -> Sharing:
        replicas = Replicas((0, 1), place, partial(exchange, place))
        return share_pool(replicas, FACTS, plan=plan(root))

    with ThreadPoolExecutor(2) as threads:
        owner, other = threads.map(member, (0, 1))
    assert owner.lasting is not None and other.lasting is not None
    [path] = root.glob("*.1")
    owner.lasting.close()
    second = plan(root).open(SHAPE, 2)
    assert second.path != path
    other.lasting.close()
    third = plan(root).open(SHAPE, 2)
    assert third.path == path
    second.close()
    third.close()
