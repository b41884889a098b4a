"""A directory of one owner: modes, links, other users, locks."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from offload.errors import TierError
from offload.files import system
from offload.files.private import PrivateDirectory, explained

RW = os.O_RDWR | os.O_CREAT


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = PrivateDirectory.open(tmp_path / "a" / "b")
        os.close(directory.open_file("c", RW))
        directory.replace("d", b"1")
    finally:
        os.umask(before)
    directory.close()
    assert mode_of(tmp_path / "a" / "b") == 0o700
    assert {mode_of(path) for path in (tmp_path / "a" / "b").iterdir()} == {0o600}


def test_what_was_open_to_others_is_not_any_more(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir(mode=0o755)
    (path / "c").touch(0o644)
    directory = PrivateDirectory.open(path)
    os.close(directory.open_file("c", RW))
    directory.close()
    assert (mode_of(path), mode_of(path / "c")) == (0o700, 0o600)


def test_no_program_inherits_a_descriptor(tmp_path: Path) -> None:
    directory = PrivateDirectory.open(tmp_path / "x")
    fd = directory.open_file("c", RW)
    for each in (fd, directory._fd, directory._lock_fd):
        assert not os.get_inheritable(each)
    os.close(fd)
    directory.close()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(TierError, match="link"):
        PrivateDirectory.open(tmp_path / "link")
    (target / "c").symlink_to(tmp_path / "elsewhere")
    directory = PrivateDirectory.open(target)
    with pytest.raises(TierError, match="symbolic link"):
        directory.open_file("c", RW)
    directory.replace("c", b"mine")  # the link goes, what it leads to stays
    directory.close()
    assert not (tmp_path / "elsewhere").exists()
    assert (target / "c").read_bytes() == b"mine"


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    directory = PrivateDirectory.open(tmp_path / "x")
    os.mkfifo(tmp_path / "x" / "c")
    with pytest.raises(TierError, match="regular"):
        directory.open_file("c", os.O_RDWR)
    directory.close()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(TierError, match=r"x: cannot .*choose another path"):
        PrivateDirectory.open(tmp_path / "x")


def test_another_users_is_refused(tmp_path: Path) -> None:
    PrivateDirectory.open(tmp_path / "x").close()
    with (
        mock.patch("os.geteuid", return_value=os.geteuid() + 1),
        pytest.raises(TierError, match="belongs to user"),
    ):
        PrivateDirectory.open(tmp_path / "x")


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    directory = PrivateDirectory.open(tmp_path / "x")
    with pytest.raises(TierError, match="another process owns"):
        PrivateDirectory.open(tmp_path / "x")
    directory.close()
    directory.close()
    PrivateDirectory.open(tmp_path / "x").close()


def test_an_owner_that_is_killed_owns_no_more(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from offload.files.private import PrivateDirectory\n"
        "d = PrivateDirectory.open(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(TierError, match="another process owns"):
            PrivateDirectory.open(tmp_path / "x")
        child.kill()
    PrivateDirectory.open(tmp_path / "x").close()


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    directory = PrivateDirectory.open(tmp_path / "x")
    assert directory.read("c") is None
    directory.replace("c", b"old")
    with (
        mock.patch("os.rename", side_effect=OSError(errno.EIO, "broken")),
        pytest.raises(TierError, match="kernel's log"),
    ):
        directory.replace("c", b"new")
    assert directory.read("c") == b"old"
    directory.replace("c", b"newer")
    assert directory.read("c") == b"newer"
    directory.remove("c")
    directory.remove("c")
    assert directory.read("c") is None
    directory.close()


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "for writing"),
        (errno.EACCES, "user of this process"),
        (errno.ENOTTY, "choose another path"),
    ],
)
def test_errors_name_path_and_remedy_and_keep_their_cause(code: int, remedy: str) -> None:
    cause = OSError(code, os.strerror(code))
    told = pytest.raises(TierError, match=rf"/x/y: cannot do this: .*{remedy}")
    with told as caught, explained(Path("/x/y"), "do this"):
        raise cause
    assert caught.value.__cause__ is cause


def test_a_write_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    pwrite = os.pwrite
    with open(tmp_path / "f", "w+b", buffering=0) as file:
        with mock.patch("os.pwrite", lambda fd, view, at: pwrite(fd, view[:3], at)):
            system.write_all(file.fileno(), b"0123456789", 2)
        assert (tmp_path / "f").read_bytes() == b"\0\x000123456789"
        with mock.patch("os.pwrite", return_value=0), pytest.raises(OSError, match="nothing"):
            system.write_all(file.fileno(), b"0", 0)


def test_room_is_reserved_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w+b", buffering=0) as file:
        file.write(b"abc")
        assert system.reserve(file.fileno(), 1 << 20, keep_size=True)
        assert os.fstat(file.fileno()).st_size == 3
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20
        assert system.reserve(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 1 << 20
        with pytest.raises(OSError, match="fallocate") as caught:
            system.reserve(file.fileno(), 1 << 60)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    with open(tmp_path / "f", "rb") as file, pytest.raises(OSError, match="fallocate"):
        system.reserve(file.fileno(), 1 << 20)
