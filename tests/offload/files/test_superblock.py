"""A directory says whose bytes it holds, and is believed only when nothing contradicts it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import TierError, TierFormatError
from offload.files.private import PrivateDirectory
from offload.files.superblock import (
    FORMAT,
    SUPERBLOCK,
    Superblock,
    age_of,
    check_same,
    read_superblock,
    write_superblock,
)

WRITTEN = Superblock('weights "w", rank 0\nof 1', {"slot_bytes": 4096}, 3)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[PrivateDirectory]:
    made = PrivateDirectory.open(tmp_path / "x")
    yield made
    made.close()


def test_what_was_written_is_read(directory: PrivateDirectory) -> None:
    assert read_superblock(directory) is None
    write_superblock(directory, WRITTEN)
    assert read_superblock(directory) == WRITTEN
    assert b"weights" in (directory.path / SUPERBLOCK).read_bytes(), "the namespace is in clear"


def test_every_damage_is_seen(directory: PrivateDirectory) -> None:
    write_superblock(directory, WRITTEN)
    path = directory.path / SUPERBLOCK
    content = path.read_bytes()
    for at in range(len(content) - 1):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(TierFormatError, match="delete"):
                read_superblock(directory)


def test_another_format_is_told_apart_from_damage(directory: PrivateDirectory) -> None:
    write_superblock(directory, WRITTEN)
    path = directory.path / SUPERBLOCK
    head = f"kv-offload tier {FORMAT}\n".encode()
    other = path.read_bytes().replace(head, f"kv-offload tier {FORMAT + 1}\n".encode())
    path.write_bytes(other)
    with pytest.raises(TierFormatError, match=f"its format is {FORMAT + 1}, and this release reads {FORMAT}"):
        read_superblock(directory)


def test_only_the_same_is_let_pass(directory: PrivateDirectory) -> None:
    check_same(directory, WRITTEN, WRITTEN.namespace, {"slot_bytes": 4096})
    with pytest.raises(TierError, match="namespace"):
        check_same(directory, WRITTEN, WRITTEN.namespace + " ", WRITTEN.sizes)
    with pytest.raises(TierError, match="slot_bytes"):
        check_same(directory, WRITTEN, WRITTEN.namespace, {"slot_bytes": 4097})


def test_how_long_ago_it_was_written(tmp_path: Path) -> None:
    directory = PrivateDirectory.open(tmp_path / "x")
    write_superblock(directory, Superblock("model", {}, 1))
    path = tmp_path / "x" / SUPERBLOCK
    now = path.stat().st_mtime
    os.utime(path, (now, now - 3600))
    assert 3600 <= age_of(directory) < 7200
    os.utime(path, (now, now + 3600))
    assert age_of(directory) == 0, "the clock was set back"
    directory.close()
