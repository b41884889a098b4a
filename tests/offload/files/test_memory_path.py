"""Whether a path can have regions of pools: asked before an engine starts."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from offload.errors import TierError
from offload.files import memory_path as module
from offload.files.memory_path import look_for_room
from offload.files.private import PrivateDirectory
from offload.files.tier_path import open_one

MIB = 1 << 20


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    yield folder / "new" / "kv-offload-pool"
    shutil.rmtree(folder)


def region(root: Path, name: str, num_bytes: int) -> PrivateDirectory:
    directory = open_one(root, name, num_bytes, None, PrivateDirectory.open)
    (directory.path / "pool").write_bytes(b"x" * num_bytes)
    return directory


def test_room_in_memory(root: Path) -> None:
    room = look_for_room(root, MIB, None)
    assert room.free_bytes >= MIB and room.kept_bytes == room.live_bytes == 0
    assert not root.parent.exists(), "nothing stays"
    region(root, "old", 2 * MIB).close()
    live = region(root, "old", MIB)
    assert live.path.name == "old.1"
    other = region(root, "live", MIB)
    room = look_for_room(root, MIB, None)
    assert room.live_bytes >= MIB
    live.close()
    room = look_for_room(root, MIB, None)
    assert MIB <= room.kept_bytes < 2 * MIB <= room.kept_bytes + room.live_bytes
    other.close()


def test_a_disk_is_refused(tmp_path: Path) -> None:
    if module._kind_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here")
    with pytest.raises(TierError, match=r"a pool must be in memory; name a directory on a tmpfs"):
        look_for_room(tmp_path / "kv-offload-pool", MIB, None)


def test_too_little_room(root: Path) -> None:
    with pytest.raises(TierError, match=r"takes 1048576\.00 GiB, and there are .* free.*--shm-size.*Memory"):
        look_for_room(root, 1 << 50, None)


def test_engines_that_run_leave_no_room(root: Path) -> None:
    live = region(root, "live", 3 * MIB)
    with pytest.raises(TierError, match=rf"all may take 0\.00.*{live.path}.*raise gib of pool"):
        look_for_room(root, 2 * MIB, 4 * MIB)
    look_for_room(root, MIB, 5 * MIB)
    live.close()
    look_for_room(root, 2 * MIB, 4 * MIB)


def test_another_users_is_refused(root: Path) -> None:
    root.mkdir(parents=True)
    with (
        mock.patch("os.geteuid", return_value=os.geteuid() + 1),
        pytest.raises(TierError, match="belongs to user"),
    ):
        look_for_room(root, MIB, None)


def test_a_path_below_a_file(root: Path) -> None:
    root.parent.parent.joinpath("new").touch()
    with pytest.raises(TierError, match="choose another path"):
        look_for_room(root, MIB, None)
