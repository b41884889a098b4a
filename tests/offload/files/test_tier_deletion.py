"""Directories below one path: looked at, and deleted where nobody owns them."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import TierError
from offload.files import tier_path
from offload.files.private import LOCK, PrivateDirectory
from offload.files.superblock import Superblock, write_superblock
from offload.files.tier_path import check_live, delete_named, delete_unused, held, look_around, open_one

NAMES = ("new.1", "old.1", "live.1", "older.1")
MIB = 1 << 20
AGES = {"old.1": 1000.0, "older.1": 500.0}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Four directories of a MiB. One is owned."""
    owners = []
    for name in NAMES:
        directory = PrivateDirectory.open(tmp_path / name)
        write_superblock(directory, Superblock("namespace", {"slot_bytes": 1}, 1))
        directory.replace("slab", bytes(MIB))
        if name in AGES:
            os.utime(tmp_path / name / "superblock", (AGES[name], AGES[name]))
        owners.append(directory)
    PrivateDirectory.open(tmp_path).close()
    for name, directory in zip(NAMES, owners, strict=True):
        if name != "live.1":
            directory.close()
    yield tmp_path
    owners[NAMES.index("live.1")].close()


def names(root: Path) -> list[str]:
    return [each.path.name for each in look_around(root)]


def test_what_is_seen(root: Path) -> None:
    found = look_around(root)
    assert [each.path.name for each in found[:2]] == ["older.1", "old.1"]
    assert {each.path.name for each in found if each.is_owned} == {"live.1"}
    assert all(MIB <= each.num_bytes < 2 * MIB and each.disk_bytes >= MIB for each in found)
    assert [each.used_at for each in found[:2]] == [500.0, 1000.0]


def test_named_ones_are_deleted(root: Path) -> None:
    assert [each.path.name for each in delete_named(root, ["old.1", "new.1", "old.1"])] == ["old.1", "new.1"]
    assert set(names(root)) == {"older.1", "live.1"}


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (["old.1", "live.1"], r"owns live\.1; end it, or name others\. Nothing was deleted"),
        ([], r"owns live\.1"),
        (["old.1", "gone.1"], r"there is no gone\.1; there are: older\.1, old\.1"),
        (["../x"], r"there is no \.\./x"),
        (["."], r"there is no \."),
    ],
    ids=str,
)
def test_nothing_is_deleted_that_may_not_be(wanted: list[str], reason: str, root: Path) -> None:
    with pytest.raises(TierError, match=reason):
        delete_named(root, wanted)
    assert set(names(root)) == set(NAMES)


@pytest.mark.parametrize(
    ("mib", "left"),
    [(100, NAMES), (3.5, {"old.1", "new.1", "live.1"}), (2.5, {"new.1", "live.1"}), (0, {"live.1"})],
)
def test_those_unused_for_longest_go_first(mib: float, left: set[str], root: Path) -> None:
    deleted = delete_unused(root, int(mib * MIB))
    assert set(names(root)) == set(left)
    assert {each.path.name for each in deleted} == set(NAMES) - set(left)


def test_engines_that_run_leave_no_room(root: Path) -> None:
    with pytest.raises(TierError, match=r"those of engines that run are .*live\.1 \(1,"):
        check_live(root, 10 * MIB)
    check_live(root / "nowhere", 10 * MIB)


def test_who_looks_keeps_no_engine_from_its_directory(root: Path) -> None:
    """It waits a moment: whoever asks whether a directory is owned has its lock for that time."""
    opened = []

    def start() -> None:
        opened.append(open_one(root, "old", 1, 10 * MIB, PrivateDirectory.open))

    engine = threading.Thread(target=start)
    with held(root):
        engine.start()
        assert not look_around(root)[1].is_owned
        engine.join(0.1)
        assert not opened
    engine.join(60)
    assert [each.path.name for each in opened] == ["old.1"]
    opened[0].close()


def test_who_looks_makes_nothing(tmp_path: Path) -> None:
    with held(tmp_path):
        assert look_around(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_never_let_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_path, "_WAIT_SECONDS", 0.1)
    owner = PrivateDirectory.open(root)
    try:
        with pytest.raises(TierError, match="another process opens or deletes"), held(root):
            pass
    finally:
        owner.close()
    assert (root / LOCK).exists()
