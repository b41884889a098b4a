"""Taking the pages of a mapping: all of them, in parallel, within limits, of the kind and node asked for."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offload import HostMemoryError
from offload.worker.pool import pages
from offload.worker.pool.pages import take_pages
from offload.worker.pool.syscalls import prefer_node
from tests.offload.mappings import mapping_at, placement_at

PAGE = mmap.PAGESIZE
MIB = 1 << 20
POPULATE = 23


@pytest.fixture
def fresh() -> Iterator[Callable[[int], int]]:
    """Maps memory and returns its address."""
    mappings: list[mmap.mmap] = []

    def make(nbytes: int) -> int:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # keeps the kernel from joining it with its neighbour
        mappings.append(mapping)
        return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)

    yield make
    for mapping in mappings:
        mapping.close()


def refuse_populate(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As a kernel would."""
    madvise = pages.madvise

    def refusing(address: int, nbytes: int, advice: int) -> None:
        if advice == POPULATE:
            raise OSError(code, "madvise: " + os.strerror(code))
        madvise(address, nbytes, advice)

    monkeypatch.setattr(pages, "madvise", refusing)


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 5, 2 * MIB + 1])
@pytest.mark.parametrize("piece", [PAGE, 3 * PAGE, 64 * MIB])
def test_all_pages_are_there(
    nbytes: int, piece: int, fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PIECE_BYTES", piece)
    address = fresh(nbytes)
    take_pages(address, nbytes)
    mapping = mapping_at(address)
    assert mapping is not None
    assert mapping.resident == -(-nbytes // PAGE) * PAGE


@pytest.mark.parametrize("piece", [PAGE, 64 * MIB])
def test_all_pages_are_there_on_older_kernels(
    piece: int, fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PIECE_BYTES", piece)
    refuse_populate(monkeypatch, errno.EINVAL)
    address = fresh(5 * PAGE + 1)
    take_pages(address, 5 * PAGE + 1)
    mapping = mapping_at(address)
    assert mapping is not None
    assert mapping.resident == 6 * PAGE
    assert ctypes.string_at(address, 5 * PAGE + 1) == bytes(5 * PAGE + 1)


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (3, 3), (200, 8)])
def test_as_many_threads_as_there_are_cpus_but_not_too_many(
    cpus: int, threads: int, fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the others: it ends only if so many run at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cpus)))
    monkeypatch.setattr(pages, "_PIECE_BYTES", PAGE)
    together = threading.Barrier(threads, timeout=30)
    seen: set[int] = set()

    def touch(address: int, nbytes: int, instead: str) -> None:
        together.wait()
        seen.add(threading.get_ident())

    monkeypatch.setattr(pages, "_touch", touch)
    num_pages = threads * 4
    take_pages(fresh(num_pages * PAGE), num_pages * PAGE)
    assert len(seen) == threads
    assert not seen & {thread.ident for thread in threading.enumerate()}, "threads stay behind"


def test_no_memory_left_is_told(fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_populate(monkeypatch, errno.ENOMEM)
    with pytest.raises(HostMemoryError, match=r"cannot get 4,096 bytes more.*lower cpu_gib") as refused:
        take_pages(fresh(PAGE), PAGE)
    assert os.strerror(errno.ENOMEM) in str(refused.value)


def test_limits_are_asked_for_the_whole_before_a_page_is_taken(
    fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(nbytes: int) -> None:
        raise HostMemoryError(f"{nbytes} do not fit")

    monkeypatch.setattr(pages, "check_room", check)
    address = fresh(4 * PAGE)
    with pytest.raises(HostMemoryError, match=f"{4 * PAGE} do not fit"):
        take_pages(address, 4 * PAGE)
    mapping = mapping_at(address)
    assert mapping is not None
    assert mapping.resident == 0


def test_room_that_others_take_meanwhile_is_noticed(
    fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks start together: each finds room for its own share, and they share the room."""
    monkeypatch.setattr(pages, "_PIECE_BYTES", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    asked: list[int] = []

    def check(nbytes: int) -> None:
        asked.append(nbytes)
        if len(asked) == 4:
            raise HostMemoryError("somebody else took it")

    monkeypatch.setattr(pages, "check_room", check)
    address = fresh(100 * PAGE)
    with pytest.raises(HostMemoryError, match="somebody else"):
        take_pages(address, 100 * PAGE)
    assert asked[:4] == [100 * PAGE, PAGE, PAGE, PAGE]
    mapping = mapping_at(address)
    assert mapping is not None
    assert mapping.resident < 100 * PAGE


class TestHugePages:
    def test_are_asked_for_only_if_wanted(self, fresh: Callable[[int], int]) -> None:
        for wanted in (False, True):
            address = fresh(4 * MIB + PAGE)
            take_pages(address, 4 * MIB + PAGE, huge_pages=wanted)
            mapping = mapping_at(address)
            assert mapping is not None
            assert ("hg" in mapping.flags) == wanted
            assert mapping.resident == mapping.end - mapping.start == 4 * MIB + PAGE

    def test_a_kernel_without_them_is_warned_of(
        self,
        fresh: Callable[[int], int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def refuse(address: int, nbytes: int, advice: int) -> None:
            raise OSError(errno.EINVAL, "madvise: not built in")

        monkeypatch.setattr(pages, "madvise", refuse)
        take_pages(fresh(PAGE), PAGE, huge_pages=True)
        assert "not given huge pages" in caplog.text
        assert "not built in" in caplog.text

    @pytest.mark.parametrize(
        ("switch", "warned"),
        [
            ("always madvise [never]\n", True),
            ("always [madvise] never\n", False),
            ("[always] madvise never\n", False),
        ],
    )
    def test_a_machine_where_they_are_off_is_warned_of(
        self,
        switch: str,
        warned: bool,
        tmp_path: Path,
        fresh: Callable[[int], int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "enabled").write_text(switch)
        monkeypatch.setattr(pages, "THP_SWITCH", tmp_path / "enabled")
        take_pages(fresh(PAGE), PAGE, huge_pages=True)
        assert ("echo madvise" in caplog.text) == warned


class TestNodes:
    @pytest.fixture(autouse=True)
    def _warnings(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)

    def test_pages_lie_where_they_should(
        self, fresh: Callable[[int], int], caplog: pytest.LogCaptureFixture
    ) -> None:
        try:
            prefer_node(fresh(PAGE), PAGE, 0)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            pytest.skip(f"refused here: {error}")
        address = fresh(64 * PAGE)
        take_pages(address, 64 * PAGE, node=0)
        if (placement := placement_at(address)) is None:
            pytest.skip("this kernel has no numa_maps")
        policy, on_nodes = placement
        assert policy in ("prefer:0", "prefer=static:0")
        assert on_nodes == {0: 64}
        assert not caplog.records

    def test_without_a_node_nothing_is_asked_for(
        self, fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*arguments: object) -> None:
            raise AssertionError("asked")

        for name in ("prefer_node", "share_elsewhere", "cpus_of_node"):
            monkeypatch.setattr(pages, name, forbidden)
        take_pages(fresh(PAGE), PAGE)

    @pytest.mark.parametrize(("share", "warned"), [(0.0, False), (0.009, False), (0.4, True), (1.0, True)])
    def test_a_full_node_is_warned_of(
        self,
        share: float,
        warned: bool,
        fresh: Callable[[int], int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(pages, "prefer_node", lambda *_: None)
        monkeypatch.setattr(pages, "share_elsewhere", lambda *_: share)
        take_pages(fresh(PAGE), PAGE, node=1)
        assert len(caplog.records) == warned
        if warned:
            assert f"{share:.0%} of the CPU pool lies on other NUMA nodes than 1" in caplog.text
            assert "no more memory; lower cpu_gib" in caplog.text
            assert "SYS_NICE" not in caplog.text

    @pytest.mark.parametrize("share", [0.0, 0.5, None], ids=["all there", "half there", "not told"])
    def test_a_refusal_is_warned_of_unless_all_is_well(
        self,
        share: float | None,
        fresh: Callable[[int], int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def refuse(*_: int) -> None:
            raise OSError(errno.EPERM, "mbind: Operation not permitted")

        monkeypatch.setattr(pages, "prefer_node", refuse)
        monkeypatch.setattr(pages, "share_elsewhere", lambda *_: share)
        take_pages(fresh(PAGE), PAGE, node=1)
        assert len(caplog.records) == (share != 0)
        if share != 0:
            assert "mbind: Operation not permitted" in caplog.text
            assert "--cap-add SYS_NICE" in caplog.text
            assert "NUMA node" in caplog.text

    @pytest.mark.parametrize("outside", [False, True], ids=["some of ours", "none of ours"])
    def test_pages_are_touched_by_the_nodes_own_cpus(
        self, outside: bool, fresh: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = os.sched_getaffinity(0)
        theirs = {max(own) + 1} if outside else {min(own), max(own) + 1}
        monkeypatch.setattr(pages, "cpus_of_node", lambda node: theirs)
        monkeypatch.setattr(pages, "prefer_node", lambda *_: None)
        monkeypatch.setattr(pages, "share_elsewhere", lambda *_: 0.0)
        seen: list[set[int]] = []
        monkeypatch.setattr(pages, "_touch", lambda *_: seen.append(os.sched_getaffinity(0)))
        take_pages(fresh(PAGE), PAGE, node=1)
        assert seen == [own if outside else {min(own)}]
        assert os.sched_getaffinity(0) == own
