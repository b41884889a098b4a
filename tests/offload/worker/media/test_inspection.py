"""A slab's directory, looked at from outside: what it has, and which extents are whole."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import TierError, TierFormatError
from offload.files.superblock import FORMAT
from offload.worker.media import inspection
from offload.worker.media.inspection import look_into, verify
from offload.worker.media.slab import SlabMedium
from tests.offload.worker.media.bench import EXTENT, NAMESPACE, ODD_SLOT, PLACES, SLOT, Pool, run, slab

pytestmark = pytest.mark.timeout(120)
FILLED = 7


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_WRITE_SECONDS", 0.0)


@pytest.fixture(params=[SLOT, ODD_SLOT], ids=["aligned", "odd"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


@pytest.fixture
def medium(tmp_path: Path, pool: Pool) -> Iterator[SlabMedium]:
    """One that runs, with extents of 3 and 2 slots in seven places."""
    made = slab(tmp_path / "x", pool)
    extents = [(place, 1, list(range(3 * place, 3 * place + 3 - place % 2))) for place in range(FILLED)]
    assert run(made, pool.put(1, extents)).error is None
    yield made
    assert made.close(30)


@pytest.fixture
def path(medium: SlabMedium, tmp_path: Path) -> Path:
    """Its directory, when it runs no more."""
    assert medium.close(30)
    return tmp_path / "x"


def change(path: Path, offset: int, content: bytes = b"?") -> None:
    with (path / "slab").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def place_bytes(path: Path) -> int:
    contents = look_into(path)
    assert contents is not None
    return contents.shape.place_bytes


def test_what_it_has(path: Path, pool: Pool) -> None:
    contents = look_into(path)
    assert contents is not None
    assert contents.superblock.namespace == NAMESPACE
    assert contents.superblock.sizes == {"slot_bytes": pool.slots.slot_bytes, "extent_slots": EXTENT}
    assert contents.shape.num_places == PLACES
    assert contents.records["place"].tolist() == list(range(FILLED))
    assert contents.records["num_slots"].tolist() == [3, 2, 3, 2, 3, 2, 3]


def test_all_are_whole_and_nothing_is_changed(path: Path, pool: Pool) -> None:
    before = {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.iterdir()}
    verdict = verify(path)
    assert (verdict.num_extents, verdict.num_whole, verdict.broken) == (FILLED, FILLED, [])
    assert verdict.num_bytes == 18 * pool.slots.slot_bytes
    assert {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.iterdir()} == before


def test_the_engine_that_owns_it_is_not_disturbed(medium: SlabMedium, tmp_path: Path, pool: Pool) -> None:
    assert verify(tmp_path / "x").num_whole == FILLED
    assert run(medium, pool.put(2, [(0, 2, [40])])).error is None
    assert verify(tmp_path / "x").num_whole == FILLED


def test_changed_bytes_are_found(path: Path, pool: Pool) -> None:
    change(path, place_bytes(path) * 3 + pool.slots.slot_bytes)
    change(path, 0, b"???")
    verdict = verify(path)
    assert (verdict.num_whole, verdict.num_rewritten, verdict.broken) == (FILLED - 2, 0, [0, 3])


def test_what_no_extent_has_does_not_count(path: Path, pool: Pool) -> None:
    change(path, place_bytes(path) + 2 * pool.slots.slot_bytes, b"behind the slots of a short one")
    change(path, place_bytes(path) * FILLED, b"in a free place")
    assert verify(path).broken == []


def test_private_ones_are_not_there(medium: SlabMedium, tmp_path: Path, pool: Pool) -> None:
    job = pool.put(2, [(0, 2, [40, 41]), (9, 2, [42])])
    object.__setattr__(job, "suffix", b"p")
    assert run(medium, job).error is None
    contents = look_into(tmp_path / "x")
    assert contents is not None
    assert contents.records["place"].tolist() == list(range(1, FILLED))
    assert verify(tmp_path / "x").broken == []


def test_what_is_written_meanwhile_is_not_broken(
    medium: SlabMedium, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes changed after the log was read; the log knows of it later."""
    real, once = inspection._broken, iter([True])

    def broken(*args: Any) -> Any:
        if next(once, False):
            assert run(medium, pool.put(2, [(4, 2, [50, 51, 52])])).error is None
        return real(*args)

    monkeypatch.setattr(inspection, "_broken", broken)
    verdict = verify(tmp_path / "x")
    assert (verdict.num_rewritten, verdict.num_whole, verdict.broken) == (1, FILLED - 1, [])


def test_a_directory_that_is_deleted_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(path, 0)
    real, once = inspection._broken, iter([True])

    def broken(*args: Any) -> Any:
        found = real(*args)
        if next(once, False):
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(inspection, "_broken", broken)
    assert verify(path).broken == []


def test_a_slab_that_was_cut_off_has_fewer(path: Path) -> None:
    os.truncate(path / "slab", 4 * place_bytes(path))
    assert verify(path).num_extents == 3
    os.truncate(path / "slab", 0)
    assert verify(path).num_extents == 0


def test_what_cannot_be_read_is_broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, real = place_bytes(path), os.preadv

    def preadv(fd: int, views: Any, offset: int) -> int:
        if offset == 2 * size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert verify(path).broken == [2]


def test_without_o_direct(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_file(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)
    assert verify(path).num_whole == FILLED


def test_damaged_records_are_none(path: Path) -> None:
    content = bytearray((path / "seals").read_bytes())
    content[len(content) // FILLED // 2] ^= 1
    (path / "seals").write_bytes(content + b"torn")
    contents = look_into(path)
    assert contents is not None
    assert len(contents.records) == FILLED - 1
    assert verify(path).broken == []


def test_directories_that_no_engine_has_finished(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert look_into(tmp_path / "x") is None
    with pytest.raises(TierError, match="it holds nothing"):
        verify(tmp_path / "x")
    with pytest.raises(TierError, match="cannot open this directory"):
        look_into(tmp_path / "y")


@pytest.mark.parametrize("name", ["slab", "seals"])
def test_files_that_are_not_there(name: str, path: Path) -> None:
    (path / name).unlink()
    with pytest.raises(TierError, match="delete it, it holds nothing"):
        look_into(path)


def test_damaged_superblocks(path: Path) -> None:
    (path / "superblock").write_bytes(b"kv-offload tier %d\n{}\nx\n" % FORMAT)
    with pytest.raises(TierFormatError, match="it is damaged"):
        look_into(path)
    (path / "superblock").unlink()
    os.mkfifo(path / "superblock")
    with pytest.raises(TierError, match="no regular file"):
        look_into(path)


def test_the_records_are_those_of_a_restart(medium: SlabMedium, tmp_path: Path, pool: Pool) -> None:
    """What is seen from outside is what the next engine finds."""
    for job_id in range(2, 30):
        assert run(medium, pool.put(job_id, [(job_id % 5, job_id, [job_id])])).error is None
    contents, kept = look_into(tmp_path / "x"), medium.recover()
    assert contents is not None
    for field, column in (("place", kept.places), ("generation", kept.generations)):
        assert np.array_equal(contents.records[field], column)
