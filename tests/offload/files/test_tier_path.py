"""A path that several engines keep tiers in: room, owners, damage, links, and real processes."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.errors import TierError, TierFormatError
from offload.files.private import PrivateDirectory
from offload.files.superblock import SUPERBLOCK
from offload.files.tier_path import look_around, open_one

pytestmark = pytest.mark.timeout(120)

KIB = 1 << 10
SIZE = 1 << 20
"""Bytes of each tier here."""


class Tiers:
    """Opens tiers of a size in one path, each a directory with a file of that size."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[PrivateDirectory] = []

    def open(self, name: str, *, most: int = 3 * SIZE, size: int = SIZE, used_at: float = 0.0) -> Path:
        """The directory that it lies in; it is owned until ``leave``."""
        return open_one(self.root, name, size, most, lambda path: self._make(path, size, used_at))

    def leave(self, path: Path) -> None:
        """Its engine has ended."""
        [directory] = [each for each in self._open if each.path == path]
        self._open.remove(directory)
        directory.close()

    def close(self) -> None:
        for directory in self._open:
            directory.close()

    def free(self, name: str, **options: float) -> Path:
        """One that nobody owns."""
        path = self.open(name, **options)  # type: ignore[arg-type]
        self.leave(path)
        return path

    @property
    def names(self) -> set[str]:
        """Of the directories that are there."""
        return {path.name for path in self.root.iterdir() if path.is_dir()}

    def _make(self, path: Path, size: int, used_at: float) -> Path:
        directory = PrivateDirectory.open(path)
        fill(path / "slab", size - 8 * KIB)
        directory.replace(SUPERBLOCK, b"tier")
        if used_at:
            os.utime(path / SUPERBLOCK, (used_at, used_at))
        self._open.append(directory)
        return path


def fill(path: Path, size: int) -> None:
    """A file that takes so many bytes."""
    with path.open("wb") as file:
        file.write(b"x" * size)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path / "cache" / "kv-offload")
    yield tiers
    tiers.close()


# Names


def test_the_first_of_a_name(tiers: Tiers) -> None:
    path = tiers.open("a")
    assert path == tiers.root / "a.1"
    assert (path.stat().st_mode & 0o777, tiers.root.stat().st_mode & 0o777) == (0o700, 0o700)


def test_it_is_found_again(tiers: Tiers) -> None:
    path = tiers.free("a")
    fill(path / "mine", 5)
    assert tiers.open("a") == path
    assert (path / "mine").exists()


def test_a_second_engine_has_the_second(tiers: Tiers) -> None:
    paths = [tiers.open("a") for _ in range(3)]
    assert [path.name for path in paths] == ["a.1", "a.2", "a.3"]
    tiers.leave(paths[1])
    assert tiers.open("a") == paths[1], "the first that is free"


# Room


def test_those_unused_for_longest_make_room(tiers: Tiers) -> None:
    tiers.free("old", used_at=1_000)
    tiers.free("oldest", used_at=500)
    tiers.free("new", used_at=2_000)
    tiers.open("mine")
    assert tiers.names == {"old.1", "new.1", "mine.1"}
    tiers.open("larger", size=2 * SIZE)
    assert tiers.names == {"mine.1", "larger.1"}


def test_only_as_many_go_as_must(tiers: Tiers) -> None:
    tiers.free("old", used_at=1_000)
    tiers.free("new", used_at=2_000)
    tiers.open("mine")
    assert tiers.names == {"old.1", "new.1", "mine.1"}


def test_live_ones_stay_however_old(tiers: Tiers) -> None:
    tiers.open("old", used_at=500)
    tiers.free("new", used_at=2_000)
    tiers.open("newer", used_at=3_000)
    tiers.open("mine")
    assert tiers.names == {"old.1", "newer.1", "mine.1"}


def test_live_ones_that_leave_no_room_are_named(tiers: Tiers) -> None:
    live = [tiers.open("a"), tiers.open("a")]
    gone = tiers.free("b")
    with pytest.raises(TierError) as refusal:
        tiers.open("mine", size=2 * SIZE)
    message = str(refusal.value)
    for path in live:
        assert f"{path} (1,0" in message
    assert str(gone) not in message
    for part in (str(tiers.root), f"{3 * SIZE:,}", f"{2 * SIZE:,}", "raise gib", "name another path"):
        assert part in message
    assert "mine.1" not in tiers.names


def test_one_larger_than_all_may_be_is_refused(tiers: Tiers) -> None:
    tiers.free("a")
    with pytest.raises(TierError, match=r"tier of 4,194,304 bytes, and all may take 3,145,728; raise gib"):
        tiers.open("mine", size=4 * SIZE)
    assert tiers.names == {"a.1"}, "nothing was deleted for it"


def test_its_own_files_do_not_count_twice(tiers: Tiers) -> None:
    tiers.free("a", most=SIZE)
    assert tiers.open("a", most=SIZE).name == "a.1"


def test_the_path_shrinks_with_its_bound(tiers: Tiers) -> None:
    for name in "abc":
        tiers.free(name, used_at=1_000 + ord(name))
    tiers.open("c", most=2 * SIZE)
    assert tiers.names == {"b.1", "c.1"}


def test_what_was_never_finished_goes_first(tiers: Tiers) -> None:
    tiers.free("old", used_at=500)
    half = tiers.root / "half.1"
    half.mkdir()
    fill(half / "slab", SIZE)
    tiers.free("new", used_at=900)
    tiers.open("mine")
    assert tiers.names == {"old.1", "new.1", "mine.1"}


def test_room_that_is_reserved_counts(tiers: Tiers) -> None:
    """Blocks behind the end of a file, as logs have them."""
    path = tiers.free("a")
    with (path / "log").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        os.ftruncate(file.fileno(), SIZE)
    [found] = look_around(tiers.root)
    assert 2 * SIZE - 8 * KIB <= found.num_bytes <= 2 * SIZE + 64 * KIB


def test_what_is_found(tiers: Tiers) -> None:
    assert look_around(tiers.root) == []
    tiers.free("b", used_at=900)
    tiers.open("a", used_at=1_000)
    found = look_around(tiers.root)
    assert [(each.path.name, each.used_at, each.is_owned) for each in found] == [
        ("b.1", 900.0, False),
        ("a.1", 1_000.0, True),
    ]


# Damage


def test_a_damaged_one_is_made_anew(tiers: Tiers) -> None:
    path = tiers.free("a")
    fill(path / "mine", 5)
    calls = []

    def make(found: Path) -> Path:
        calls.append(found)
        if (found / "mine").exists():
            raise TierFormatError("damaged")
        return found

    assert open_one(tiers.root, "a", SIZE, 3 * SIZE, make) == path
    assert calls == [path, path]
    assert not path.exists()


def test_one_that_stays_damaged_is_told(tiers: Tiers) -> None:
    def make(path: Path) -> Path:
        path.mkdir(exist_ok=True)
        raise TierFormatError("still damaged")

    with pytest.raises(TierFormatError, match="still damaged"):
        open_one(tiers.root, "a", SIZE, 3 * SIZE, make)


def test_other_failures_delete_nothing(tiers: Tiers) -> None:
    path = tiers.free("a")

    def make(found: Path) -> Path:
        raise TierError("another namespace's")

    with pytest.raises(TierError, match="another namespace's"):
        open_one(tiers.root, "a", SIZE, 3 * SIZE, make)
    assert path.exists()
    assert tiers.open("a") == path, "and the path is nobody's"


# Links, and what others have put there


def test_links_are_not_followed(tiers: Tiers, tmp_path: Path) -> None:
    """What they lead to is neither counted nor deleted."""
    tiers.free("a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fill(elsewhere / "precious", 4 * SIZE)
    (tiers.root / "linked.1").symlink_to(elsewhere)
    (tiers.root / "a.1" / "more").symlink_to(elsewhere / "precious")
    tiers.open("b", size=2 * SIZE)
    tiers.open("c")
    assert (elsewhere / "precious").stat().st_size == 4 * SIZE
    assert (tiers.root / "linked.1").is_symlink()


def test_a_link_in_the_place_of_the_path_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiers.root.parent.mkdir()
    tiers.root.symlink_to(elsewhere)
    with pytest.raises(TierError, match="link"):
        tiers.open("a")
    assert not list(elsewhere.iterdir())


def test_a_link_in_the_place_of_its_own_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    tiers.free("b")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tiers.root / "a.1").symlink_to(elsewhere)
    with pytest.raises(TierError, match="link"):
        tiers.open("a")
    assert not list(elsewhere.iterdir())


def test_files_of_others_beside_them_stay(tiers: Tiers) -> None:
    tiers.free("a")
    fill(tiers.root / "README", 10)
    tiers.open("b", size=3 * SIZE)
    assert (tiers.root / "README").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_what_cannot_be_deleted_is_told(tiers: Tiers) -> None:
    path = tiers.free("a")
    path.chmod(0o500)
    with pytest.raises(TierError, match="cannot delete this directory"):
        tiers.open("b", size=3 * SIZE)
    path.chmod(0o700)


# Real processes

_ENGINE = """
    import sys, time
    from pathlib import Path
    from offload.errors import TierError
    from offload.files.private import PrivateDirectory
    from offload.files.superblock import SUPERBLOCK
    from offload.files.tier_path import open_one

    def make(path):
        directory = PrivateDirectory.open(path)
        time.sleep(0.05)  # another would find it half done
        (path / "slab").write_bytes(b"x" * size)
        directory.replace(SUPERBLOCK, b"tier")
        return directory

    root, size, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        kept = open_one(root, "a", size, most, make)
    except TierError as error:
        print("refused:", error, flush=True)
    else:
        print(kept.path.name, flush=True)
    sys.stdin.read()
"""


Start = Callable[[int, int], "subprocess.Popen[str]"]


@pytest.fixture
def start(tiers: Tiers) -> Iterator[Start]:
    """Starts a process that opens a tier of ``a`` and keeps it until it is told to end."""
    made: list[subprocess.Popen[str]] = []

    def begin(size: int, most: int) -> "subprocess.Popen[str]":
        code = textwrap.dedent(_ENGINE)
        arguments = [sys.executable, "-c", code, str(tiers.root), str(size), str(most)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(process)
        return process

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_files_that_vanish_while_it_looks_leave_nothing_open(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiers.free("old")
    scan, opened = os.scandir, []

    def scan_and_delete(directory: Path) -> Any:
        opened.append(scan(directory))
        next(opened[0])  # all names are read at once
        for name in os.listdir(path):
            (path / name).unlink()
        return opened[-1]

    monkeypatch.setattr(os, "scandir", scan_and_delete)
    [found] = look_around(tiers.root)
    monkeypatch.undo()
    assert found.path == path
    assert list(opened[0]) == []  # one that is open goes on


def test_processes_at_once_have_one_each(start: Start) -> None:
    processes = [start(SIZE, 8 * SIZE) for _ in range(4)]
    assert sorted(map(said, processes)) == ["a.1", "a.2", "a.3", "a.4"]


def test_processes_at_once_take_no_more_than_they_may(start: Start, tiers: Tiers) -> None:
    tiers.free("old")
    processes = [start(SIZE, 2 * SIZE + SIZE // 2) for _ in range(4)]
    found = sorted(map(said, processes))
    assert found[:2] == ["a.1", "a.2"]
    assert all("raise gib" in each and "a.1" in each for each in found[2:])
    assert tiers.names == {"a.1", "a.2"}


def test_what_a_killed_process_had_is_free(start: Start, tiers: Tiers) -> None:
    process = start(SIZE, 3 * SIZE)
    assert said(process) == "a.1"
    process.kill()
    process.wait()
    assert said(start(SIZE, 3 * SIZE)) == "a.1"
    assert [each.is_owned for each in look_around(tiers.root)] == [True]
