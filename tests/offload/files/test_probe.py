"""A path is tried before an engine starts: room, owner, and what is written comes back."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import TierError
from offload.files import probe as probing
from offload.files.private import PrivateDirectory
from offload.files.probe import probe

GIB = 1 << 30
MIB = 1 << 20


def all_in(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A path where an engine has been."""
    root = tmp_path / "kv-offload"
    for name in ("a.1", "b.1"):
        directory = PrivateDirectory.open(root / name)
        directory.replace("slab", b"x" * MIB)
        directory.close()
    PrivateDirectory.open(root).close()
    return root


@pytest.mark.parametrize("path", ["kv-offload", "not/there/yet/kv-offload"])
def test_a_path_that_is_not_there_stays_so(path: str, tmp_path: Path) -> None:
    found = probe(tmp_path / path, MIB)
    assert found.free_bytes > MIB
    assert found.kept_bytes == 0
    assert all_in(tmp_path) == []


def test_what_is_there_stays_and_counts_as_room(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_in(made)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    found = probe(made, 2 * MIB)
    assert (found.free_bytes, found.kept_bytes >= 2 * MIB) == (4096, True)
    assert all_in(made) == before
    with pytest.raises(TierError, match=r"1\.00 GiB, and there are 0\.00 free and 0\.00 .*lower gib"):
        probe(made, GIB)
    assert all_in(made) == before


def test_an_engine_that_runs_does_not_matter(made: Path) -> None:
    owner = PrivateDirectory.open(made / "a.1")
    try:
        assert probe(made, MIB).kept_bytes >= 2 * MIB
    finally:
        owner.close()


def refuse_direct_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)


def refuse_direct_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = probing.write_all, iter([True])

    def write_all(*args: Any) -> None:
        if next(calls, False):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(*args)

    monkeypatch.setattr(probing, "write_all", write_all)


@pytest.mark.parametrize("refuse", [refuse_direct_opening, refuse_direct_writing])
def test_without_o_direct_it_goes_through_the_page_cache(
    refuse: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    assert not probe(tmp_path / "kv-offload", MIB).is_direct
    assert all_in(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free space there"), (errno.EIO, "the device fails")]
)
def test_a_disk_that_does_not_take_it(
    code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_all(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(probing, "write_all", write_all)
    with pytest.raises(TierError, match=rf"{tmp_path}: cannot .*{os.strerror(code)}; {remedy}"):
        probe(tmp_path / "kv-offload", MIB)
    assert all_in(tmp_path) == []


def test_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "write_all", lambda fd, content, offset: os.ftruncate(fd, len(content)))
    with pytest.raises(TierError, match="what was read is not what was written"):
        probe(tmp_path / "kv-offload", MIB)


def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(probing, "write_all", lambda *_: goes_on.wait(60))
    try:
        with pytest.raises(TierError, match=rf"{tmp_path}: it has not answered for 0\.05 s"):
            probe(tmp_path / "kv-offload", MIB, wait_seconds=0.05)
    finally:
        goes_on.set()


def test_directories_of_others(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TierError, match=rf"belongs to user {owner}, .* of user {owner + 1}; .*engine's user"):
        probe(made, MIB)


def test_links_and_files_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv-offload").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="kv-offload"):
        probe(tmp_path / "kv-offload", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="file"):
        probe(tmp_path / "file" / "kv-offload", MIB)
