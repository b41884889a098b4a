"""What only a slab does: it outlives its process, and moves bytes in the way that its disk allows."""

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from offload.errors import TierError, TierFormatError
from offload.files import system
from offload.messages import EPOCH_SHIFT
from offload.worker.media import seal_log, slab_file
from offload.worker.media.slab_file import ALIGNMENT, SlabShape
from tests.offload.worker.media.bench import (
    EXTENT,
    ODD_SLOT,
    PLACES,
    SLOT,
    SLOTS,
    Pool,
    get,
    ids,
    run,
    slab,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[SLOT, ODD_SLOT], ids=["aligned", "odd"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def filled(path: Path, pool: Pool, **options: Any) -> bytes:
    """A closed slab with an extent in each place, by the job of the place's number; returns their bytes."""
    medium = slab(path, pool, **options)
    extents = [(place, place + 1, slots_of(place)) for place in range(PLACES)]
    assert run(medium, pool.put(99, extents)).error is None
    assert medium.close(30)
    return pool.read(range(PLACES * 3))


def slots_of(place: int) -> list[int]:
    return [3 * place, 3 * place + 1, 3 * place + 2]


def survivors(path: Path, pool: Pool, before: bytes, **options: Any) -> list[int]:
    """Places that are served after it was opened again, each with the right bytes."""
    medium = slab(path, pool, **options)
    good = []
    for place in range(PLACES):
        pool.bytes[60:63] = 0xEE
        if run(medium, get(1, [(place, place + 1, [60, 61, 62])])).num_good:
            size = 3 * pool.slots.slot_bytes
            assert pool.read([60, 61, 62]) == before[place * size : (place + 1) * size], "wrong bytes"
            good.append(place)
    assert medium.close(30)
    return good


ALL = list(range(PLACES))


# Opening again


@pytest.mark.parametrize("direct", [True, False])
def test_all_is_there_after_a_restart(tmp_path: Path, pool: Pool, direct: bool) -> None:
    before = filled(tmp_path / "x", pool, direct=direct)
    assert survivors(tmp_path / "x", pool, before, direct=not direct) == ALL


def test_recovery_reads_no_byte_of_the_slab(tmp_path: Path, pool: Pool) -> None:
    filled(tmp_path / "x", pool)
    preadv, read = os.preadv, []

    def watched(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("slab"):
            read.append(at)
        return preadv(fd, buffers, at)

    with mock.patch("os.preadv", watched):
        medium = slab(tmp_path / "x", pool)
    kept = medium.recover()
    assert kept.places.tolist() == ALL
    assert kept.generations.tolist() == [1 << EPOCH_SHIFT | place + 1 for place in ALL]
    assert kept.num_slots.tolist() == [3] * PLACES
    spare = PLACES * SlabShape(pool.slots.slot_bytes, EXTENT, PLACES).place_bytes
    assert min(read) >= spare, "only the spare place was read"
    assert medium.close(30)


def test_the_epoch_is_raised_at_every_open(tmp_path: Path, pool: Pool) -> None:
    epochs = []
    for _ in range(3):
        medium = slab(tmp_path / "x", pool)
        epochs.append(medium.epoch)
        assert medium.close(30)
    assert epochs == [1, 2, 3]


def test_the_epoch_is_above_that_of_any_record(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool)
    run(medium, pool.put(1, [(0, 1, [0])], epoch=41))
    assert medium.close(30)
    medium = slab(tmp_path / "x", pool)
    assert medium.epoch == 42
    assert medium.close(30)


def test_files_are_private(tmp_path: Path, pool: Pool) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path / "x", pool)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "x").iterdir()}
    assert modes == dict.fromkeys(("lock", "superblock", "slab", "seals"), 0o600)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o700


def test_one_owner_at_a_time(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool)
    with pytest.raises(TierError, match="another process owns"):
        slab(tmp_path / "x", pool)
    assert medium.close(30)


def test_another_namespace_is_refused_and_nothing_changes(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    with pytest.raises(TierError, match="namespace"):
        slab(tmp_path / "x", pool, namespace="other weights")
    assert survivors(tmp_path / "x", pool, before) == ALL


def test_other_sizes_are_refused(tmp_path: Path, pool: Pool) -> None:
    filled(tmp_path / "x", pool)
    with pytest.raises(TierError, match="slot_bytes"):
        slab(tmp_path / "x", Pool(2 * pool.slots.slot_bytes))


@pytest.mark.parametrize("places", [5, PLACES, 40])
def test_it_grows_and_shrinks(tmp_path: Path, pool: Pool, places: int) -> None:
    before = filled(tmp_path / "x", pool)
    medium = slab(tmp_path / "x", pool, places=places)
    size = SlabShape(pool.slots.slot_bytes, EXTENT, places).place_bytes * (places + 1)
    assert (tmp_path / "x" / "slab").stat().st_size == size
    assert medium.recover().places.tolist() == list(range(min(places, PLACES)))
    assert medium.close(30)
    assert survivors(tmp_path / "x", pool, before) == list(range(min(places, PLACES)))


def test_the_log_is_written_anew_before_it_grows_beyond_bounds(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool, spare_records=10)
    for by in range(1, 200):
        assert run(medium, pool.put(by, [(by % 5, by, [by % SLOTS])])).num_good == 1
        medium.check_invariants()
    assert medium._seals is not None
    assert medium._seals._log.num_records < 10 + 2 * PLACES
    assert medium.close(30)
    medium = slab(tmp_path / "x", pool)
    assert medium.recover().places.tolist() == [0, 1, 2, 3, 4]
    for by in range(195, 200):
        assert run(medium, get(by, [(by % 5, by, [0])])).num_good == 1
        assert pool.read([0]) == pool.read([by % SLOTS]) or by % SLOTS == 0
    assert medium.close(30)


# Files that were damaged: a miss or a refusal


def test_a_slab_that_lost_its_end(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    size = SlabShape(pool.slots.slot_bytes, EXTENT, PLACES).place_bytes
    os.truncate(tmp_path / "x" / "slab", 4 * size + 10)
    assert survivors(tmp_path / "x", pool, before) == [0, 1, 2, 3]


def test_bits_that_flipped_in_the_slab(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    size = SlabShape(pool.slots.slot_bytes, EXTENT, PLACES).place_bytes
    with open(tmp_path / "x" / "slab", "r+b") as file:
        for place, at in ((2, 0), (5, 3 * pool.slots.slot_bytes - 1), (7, pool.slots.slot_bytes)):
            file.seek(place * size + at)
            byte = file.read(1)[0]
            file.seek(place * size + at)
            file.write(bytes([byte ^ 4]))
    assert survivors(tmp_path / "x", pool, before) == [place for place in ALL if place not in (2, 5, 7)]


def test_places_that_changed_places(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    size = SlabShape(pool.slots.slot_bytes, EXTENT, PLACES).place_bytes
    path = tmp_path / "x" / "slab"
    content = bytearray(path.read_bytes())
    first, second = content[size : 2 * size], content[4 * size : 5 * size]
    content[size : 2 * size], content[4 * size : 5 * size] = second, first
    path.write_bytes(content)
    assert survivors(tmp_path / "x", pool, before) == [place for place in ALL if place not in (1, 4)]


def test_no_slab_at_all(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    (tmp_path / "x" / "slab").unlink()
    assert survivors(tmp_path / "x", pool, before) == []


def test_seals_that_lost_their_end(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    path = tmp_path / "x" / "seals"
    os.truncate(path, path.stat().st_size * 5 // PLACES - 8)
    assert len(survivors(tmp_path / "x", pool, before)) == 4


def test_bits_that_flipped_in_the_seals(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    path = tmp_path / "x" / "seals"
    content = bytearray(path.read_bytes())
    size = len(content) // PLACES
    for record in (0, 3, 4, 11):
        content[record * size + 17 * record % size] ^= 16
    path.write_bytes(content)
    assert len(survivors(tmp_path / "x", pool, before)) == PLACES - 4


def test_seals_out_of_order_and_twice(tmp_path: Path, pool: Pool) -> None:
    """The newest generation of a place counts, wherever it stands."""
    filled(tmp_path / "x", pool)
    path = tmp_path / "x" / "seals"
    medium = slab(tmp_path / "x", pool)
    pool.fill(range(SLOTS))
    again = [(place, place + 1, slots_of(place)) for place in ALL]
    assert run(medium, pool.put(99, again, epoch=2)).error is None
    before = pool.read(range(PLACES * 3))
    assert medium.close(30)
    records = np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(2 * PLACES, -1)
    path.write_bytes(records[::-1].tobytes() + records[:7].tobytes())
    medium = slab(tmp_path / "x", pool)
    assert (medium.recover().generations >> EPOCH_SHIFT).tolist() == [2] * PLACES
    assert run(medium, get(1, again, epoch=1)).num_good == 0
    assert run(medium, get(1, again, epoch=2)).num_good == PLACES
    assert pool.read(range(PLACES * 3)) == before
    assert medium.close(30)


def test_seals_of_another_namespace_are_not_seen(tmp_path: Path, pool: Pool) -> None:
    filled(tmp_path / "x", pool)
    pool.fill(range(SLOTS))
    before = filled(tmp_path / "y", pool, namespace="other weights")
    (tmp_path / "x" / "seals").rename(tmp_path / "z")
    (tmp_path / "y" / "seals").rename(tmp_path / "x" / "seals")
    assert survivors(tmp_path / "x", pool, before) == []


def test_extents_of_a_codec_that_is_not_read_are_not_there(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a later release has compressed is a miss, never bytes as they lie there."""
    with monkeypatch.context() as patch:
        patch.setattr(seal_log, "_PLAIN", 1)
        before = filled(tmp_path / "x", pool)
        assert survivors(tmp_path / "x", pool, before) == ALL
    assert survivors(tmp_path / "x", pool, before) == []


def test_files_of_two_slabs_that_were_mixed_up(tmp_path: Path, pool: Pool) -> None:
    filled(tmp_path / "x", pool)
    pool.fill(range(SLOTS))
    before = filled(tmp_path / "y", pool)
    (tmp_path / "y" / "slab").rename(tmp_path / "x" / "slab")
    assert survivors(tmp_path / "x", pool, before) == []


def test_a_directory_without_superblock_is_empty(tmp_path: Path, pool: Pool) -> None:
    before = filled(tmp_path / "x", pool)
    (tmp_path / "x" / "superblock").unlink()
    assert survivors(tmp_path / "x", pool, before) == []


def test_a_damaged_superblock_is_refused(tmp_path: Path, pool: Pool) -> None:
    filled(tmp_path / "x", pool)
    (tmp_path / "x" / "superblock").write_bytes(b"")
    for _ in range(2):  # a refusal leaves no lock behind
        with pytest.raises(TierFormatError, match="delete"):
            slab(tmp_path / "x", pool)


# How bytes are moved


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_writes_are_continued(tmp_path: Path, pool: Pool, direct: bool) -> None:
    def short(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, buffers, at: call(fd, [buffers[0][:ALIGNMENT]], at)

    with mock.patch("os.pwritev", short(os.pwritev)), mock.patch("os.preadv", short(os.preadv)):
        before = filled(tmp_path / "x", pool, direct=direct)
        assert survivors(tmp_path / "x", pool, before, direct=direct) == ALL


def test_calls_are_cut_to_what_one_takes(tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_file, "_MAX_PIECES", 2)
    monkeypatch.setattr(slab_file, "_MAX_CALL_BYTES", ALIGNMENT)
    before = filled(tmp_path / "x", pool)
    assert survivors(tmp_path / "x", pool, before) == ALL


def test_neighbouring_slots_are_one_piece(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool)
    assert medium._slab is not None
    size = pool.slots.slot_bytes
    pieces = medium._slab.views(ids(3, 4, 5, 9, 8, 0))
    assert [len(piece) // size for piece in pieces] == [3, 1, 1, 1]
    assert b"".join(pieces) == pool.read([3, 4, 5, 9, 8, 0])
    assert medium.close(30)


def test_odd_slots_go_through_a_bounce_buffer_and_the_rest_of_it_is_zeros(tmp_path: Path) -> None:
    pool = Pool(ODD_SLOT)
    medium = slab(tmp_path / "x", pool)
    assert medium.is_direct
    for by in (1, 2):
        run(medium, pool.put(by, [(by, by, [1, 2, 3, 4] if by == 1 else [5])]))
    assert medium.close(30)
    size = SlabShape(ODD_SLOT, EXTENT, PLACES).place_bytes
    content = (tmp_path / "x" / "slab").read_bytes()[2 * size : 3 * size]
    assert content == pool.read([5]) + bytes(size - ODD_SLOT)


@pytest.mark.parametrize("where", ["open", "pwritev", "preadv"])
def test_without_o_direct_bytes_go_through_the_page_cache(tmp_path: Path, pool: Pool, where: str) -> None:
    """Some file systems refuse it when a file is opened, others when it is written or read."""
    real = getattr(os, where)

    def refusing(*arguments: Any, **more: Any) -> Any:
        flags = arguments[1] if where == "open" else fcntl_flags(arguments[0])
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*arguments, **more)

    with mock.patch(f"os.{where}", refusing):
        before = filled(tmp_path / "x", pool)
        medium = slab(tmp_path / "x", pool)
        assert not medium.is_direct
        assert medium.close(30)
        assert survivors(tmp_path / "x", pool, before) == ALL


def fcntl_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_a_disk_that_reads_back_other_bytes_is_not_used(tmp_path: Path, pool: Pool) -> None:
    preadv = os.preadv

    def lying(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        num_read = preadv(fd, buffers, at)
        buffers[0][0] ^= 1
        return num_read

    bytes_before = pool.bytes.copy()
    with mock.patch("os.preadv", lying), pytest.raises(TierError, match="not what was written"):
        slab(tmp_path / "x", pool)
    assert np.array_equal(pool.bytes, bytes_before)


def test_trying_out_changes_no_slot(tmp_path: Path, pool: Pool) -> None:
    before = pool.bytes.copy()
    assert slab(tmp_path / "x", pool).close(30)
    assert np.array_equal(pool.bytes, before)


# Room


def without_fallocate(code: int) -> Any:
    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    return mock.patch.object(system._libc, "fallocate", refuse, create=True)


def test_a_file_system_that_reserves_nothing(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with without_fallocate(errno.EOPNOTSUPP):
        before = filled(tmp_path / "x", pool)
    assert "reserves no room" in caplog.text
    assert survivors(tmp_path / "x", pool, before) == ALL


def test_a_full_file_system_that_reserves_nothing_is_refused(tmp_path: Path, pool: Pool) -> None:
    with without_fallocate(errno.EOPNOTSUPP), pytest.raises(TierError, match="free space"):
        slab(tmp_path / "x", pool, places=1 << 23)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_refused_and_gets_its_room_back(tmp_path: Path, pool: Pool, code: int) -> None:
    def take_some_and_fail(fd: int, nbytes: int, keep_size: bool = False) -> bool:
        system.reserve(fd, nbytes // 2)
        raise OSError(code, os.strerror(code))

    with (
        mock.patch("offload.worker.media.slab_file.reserve", take_some_and_fail),
        pytest.raises(TierError, match=r"slab: cannot have [\d,]+ bytes .* fewer gib"),
    ):
        slab(tmp_path / "x", pool)
    assert (tmp_path / "x" / "slab").stat().st_size == 0
    assert not [thread for thread in threading.enumerate() if "slab" in thread.name]
