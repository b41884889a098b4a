"""A rank takes memory of its pool, and gives it back, when the scheduler's side says so."""

import errno
import mmap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from offload import HostMemoryError
from offload.messages import Fingerprint, Resize, Resized, WorkerFacts, WorkerReport
from offload.testing.copiers.inline import InlineExecutor, RefusingExecutor
from offload.worker.pool import pages
from offload.worker.pool.memory import HostMemory, unit_of
from offload.worker.resizing import PageThread, SizeRange, WorkerResizing, make_resizable

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
SLOT = 64 * PAGE


def resident_bytes() -> int:
    """Of this process, in memory that no file is behind."""
    [line] = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")
    ]
    return int(line.split()[1]) * 1024


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with closing(HostMemory(256, SLOT, most_slots=512, unit_slots=1)) as made:
        yield made


def bytes_of(memory: HostMemory) -> np.ndarray:
    assert memory._bytes is not None
    return memory._bytes.reshape(512, SLOT)


def order(number: int, runs: list[tuple[int, int]], *, takes: bool) -> Resize:
    starts, stops = np.array(runs).T
    return Resize(number, starts, stops, takes)


def test_memory_is_given_back_to_the_system_and_taken_again(memory: HostMemory) -> None:
    view = bytes_of(memory)
    view[:256] = 7
    before = resident_bytes()
    memory.give_back([(64, 256)])
    assert before - resident_bytes() > 180 * SLOT
    assert (view[:64] == 7).all(), "what stays is as it was"
    memory.take([(64, 512)])
    assert resident_bytes() - before > 240 * SLOT
    assert not view[64:].any()


def test_what_shares_a_page_with_others_is_left_alone() -> None:
    with closing(HostMemory(64, 1000, most_slots=64, unit_slots=1)) as memory:
        assert memory._bytes is not None
        memory._bytes[:] = 7
        memory.give_back([(3, 20)])
        rows = memory._bytes.reshape(64, 1000)
        assert (rows[:3] == 7).all() and (rows[20:] == 7).all()
        assert not rows[3:20].any()
        memory.take([(3, 20)])
        assert (rows[:3] == 7).all() and (rows[20:] == 7).all()
        del rows  # it keeps the mapping


@pytest.mark.parametrize("wishes", [{}, {"huge_pages": True}, {"node": 0}])
def test_memory_is_taken_on_the_own_thread(wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits at its end for the threads of a pool of threads, however long they hang."""
    with closing(HostMemory(64, SLOT, most_slots=128, unit_slots=64, **wishes)) as memory:
        threads = list[int]()
        monkeypatch.setattr(pages, "_touch", lambda *_: threads.append(threading.get_ident()))
        memory.take([(64, 128)])
    assert set(threads) == {threading.get_ident()}


def test_pieces_are_unpinned_before_their_memory_goes_and_pinned_again() -> None:
    pinned: dict[int, int] = {}
    memory = HostMemory(
        8, SLOT, register=pinned.__setitem__, unregister=pinned.__delitem__, most_slots=16, unit_slots=2
    )
    at = [memory.address + slot * SLOT for slot in range(0, 16, 2)]
    assert memory.slots_per_registration == 2
    assert pinned == dict.fromkeys(at[:4], 2 * SLOT)
    memory.give_back([(2, 6)])
    assert sorted(pinned) == [at[0], at[3]]
    memory.take([(4, 12)])
    assert sorted(pinned) == [at[0], *at[2:6]]
    memory.close()
    assert not pinned


def test_copies_of_memory_that_is_not_pinned_are_not_cut_at_units(memory: HostMemory) -> None:
    assert memory.slots_per_registration == 512


def test_what_cannot_be_unpinned_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int) -> None:
        raise OSError("the device is gone")

    memory = HostMemory(4, SLOT, register=lambda *_: None, unregister=refuse, most_slots=4, unit_slots=1)
    assert memory._bytes is not None
    memory._bytes[:] = 7
    memory.give_back([(0, 4)])
    assert (memory._bytes == 7).all()
    assert "stays pinned" in caplog.text
    memory.close()


def test_a_rank_that_cannot_have_all_of_it_keeps_none(memory: HostMemory) -> None:
    resizing = WorkerResizing(memory, InlineExecutor, CPU)
    before = resident_bytes()
    real, calls = pages._touch, []

    def touch(address: int, nbytes: int, instead: str) -> None:
        calls.append(address)
        if len(calls) == 2:
            raise HostMemoryError("there is no more; ask for less")
        real(address, nbytes, instead)

    with mock.patch.object(pages, "_touch", touch):
        resizing.begin([order(3, [(256, 350), (400, 512)], takes=True)])
    assert resizing.take_ended() == {3: Resized(1, "there is no more; ask for less")}
    assert resident_bytes() - before < 20 * SLOT
    assert resizing.take_ended() == {}
    resizing.check_invariants()


def test_they_are_carried_out_in_order_on_a_thread(memory: HostMemory) -> None:
    resizing = WorkerResizing(memory, PageThread, CPU)
    bytes_of(memory)[:] = 7
    resizing.begin([order(0, [(0, 512)], takes=False), order(1, [(0, 512)], takes=True)])
    resizing.begin([order(2, [(0, 8)], takes=False)])
    for work in list(resizing._under_way.values()):
        work.result(60)
    assert resizing.take_ended() == dict.fromkeys(range(3), Resized(1))
    assert not bytes_of(memory).any()
    assert resizing.close(60)


def test_the_thread_asks_cuda_for_the_gpu_of_its_rank() -> None:
    """A new thread has the first GPU, whichever the others of its process have."""
    said: list[tuple[str, object]] = []

    def note(what: object) -> None:
        said.append((threading.current_thread().name, what))

    memory = HostMemory(4, SLOT, register=lambda *_: note("pinned"), most_slots=8, unit_slots=1)
    said.clear()
    resizing = WorkerResizing(memory, PageThread, torch.device("cuda", 3))
    with mock.patch.object(torch.cuda, "set_device", note):
        resizing.begin([order(0, [(4, 5)], takes=True)])
        resizing._under_way[0].result(60)
    [(name, device), (its_name, what)] = said
    assert (device, what) == (torch.device("cuda", 3), "pinned")
    assert name == its_name != threading.current_thread().name
    assert resizing.close(60)
    memory.close()


def test_a_thread_that_hangs_is_left_to_itself(memory: HostMemory, caplog: pytest.LogCaptureFixture) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def give_back(runs: object) -> None:
        has_begun.set()
        assert may_end.wait(60)

    resizing = WorkerResizing(memory, PageThread, CPU)
    with mock.patch.object(memory, "give_back", give_back):
        resizing.begin([order(0, [(0, 8)], takes=False), order(1, [(256, 512)], takes=True)])
        assert has_begun.wait(60)
        [thread] = [each for each in threading.enumerate() if each.name == "kv-offload-resize"]
        assert thread.daemon, "the process could not end"
        assert not resizing.close(0.01)
        assert "the system still takes or gives back pages of the CPU pool after 0.01 s" in caplog.text
        first, second = resizing._under_way.values()
        assert second.cancelled(), "what has not begun never begins"
        may_end.set()
        assert first.result(60) == ""
    thread.join(60)
    assert not thread.is_alive()
    assert resizing.close(0.01)


def test_a_rank_that_may_not_carry_them_out_says_so(memory: HostMemory) -> None:
    resizing = WorkerResizing(memory, InlineExecutor, CPU)
    before = resident_bytes()
    resizing.refuse([order(7, [(256, 512)], takes=True)], "the scheduler is another one")
    assert resizing.take_ended() == {7: Resized(1, "the scheduler is another one")}
    assert resident_bytes() - before < 20 * SLOT
    assert resizing.take_ended() == {}


def test_a_rank_without_a_thread_for_it_says_so(memory: HostMemory) -> None:
    """The engine goes on, and the pool stays as it is."""
    resizing = WorkerResizing(memory, RefusingExecutor, CPU)
    resizing.begin([order(3, [(256, 512)], takes=True)])
    assert resizing.take_ended() == {3: Resized(1, "can't start new thread")}
    resizing.check_invariants()
    assert resizing.close(60)


def test_the_machine_is_asked_before_each_piece(memory: HostMemory) -> None:
    asked: list[int] = []

    def check_room(nbytes: int, instead: str) -> None:
        asked.append(nbytes)

    with mock.patch.object(pages, "check_room", check_room):
        memory.take([(256, 257), (300, 512)])
    assert asked == [213 * SLOT], "both runs are one piece"
    memory.give_back([(256, 512)])
    with mock.patch.object(pages, "check_room", check_room), mock.patch.object(pages, "_PIECE_BYTES", SLOT):
        memory.take([(256, 258)])
    assert asked[1:] == [SLOT, SLOT]


def test_what_the_machine_has_no_room_for_is_given_back_at_once(memory: HostMemory) -> None:
    before, asked = resident_bytes(), []

    def check_room(nbytes: int, instead: str) -> None:
        asked.append(nbytes)
        if len(asked) > 200:
            raise HostMemoryError("there is no more; ask for less")

    with (
        mock.patch.object(pages, "check_room", check_room),
        mock.patch.object(pages, "_PIECE_BYTES", SLOT),
        pytest.raises(HostMemoryError, match="no more"),
    ):
        memory.take([(256, 512)])
    assert resident_bytes() - before < 20 * SLOT


@pytest.mark.parametrize("huge_pages", [False, True])
def test_who_asks_for_another_size_is_told_to_ask_for_less(huge_pages: bool) -> None:
    """Not to lower a setting: the engine runs."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "no more")

    memory = HostMemory(4, SLOT, most_slots=8, unit_slots=1, huge_pages=huge_pages)
    with (
        mock.patch.object(pages, "madvise", refuse),
        pytest.raises(HostMemoryError, match="; ask for less, or"),
    ):
        memory.take([(4, 8)])
    with (
        mock.patch.object(memory, "_register_one", refuse),
        pytest.raises(HostMemoryError, match="; ask for less, or allow"),
    ):
        memory.take([(4, 8)])
    memory.close()


def test_a_worker_gives_memory_back(memory: HostMemory) -> None:
    resizing = WorkerResizing(memory, InlineExecutor, CPU)
    bytes_of(memory)[:256] = 7
    before = resident_bytes()
    resizing.begin([order(0, [(0, 100), (120, 256)], takes=False)])
    assert resizing.take_ended() == {0: Resized(1)}
    assert before - resident_bytes() > 200 * SLOT
    assert (bytes_of(memory)[100:120] == 7).all()


def facts(num_slots: int = 1000, slot_bytes: int = SLOT) -> WorkerFacts:
    return WorkerFacts(num_slots, slot_bytes, Fingerprint("", "", 1, 16, "", ""))


@pytest.mark.parametrize(
    ("on_gpu", "huge", "is_meant", "unit"),
    [(False, False, False, 1), (False, True, False, 128), (True, False, True, 1024), (True, False, False, 0)],
)
def test_which_slots_go_together(on_gpu: bool, huge: bool, is_meant: bool, unit: int) -> None:
    told = facts(5000)
    make_resizable(told, SizeRange(9000 * SLOT, is_meant), on_gpu=on_gpu, huge_pages=huge, unit_slots=0)
    assert told.unit_slots == unit
    assert told.most_slots == (9000 if unit else 0)
    assert told.num_slots == (5000 // unit * unit if unit else 5000)


def test_a_unit_is_of_whole_pages() -> None:
    assert unit_of(SLOT, 0) == 1
    assert unit_of(1000, 0) == 512
    assert unit_of(PAGE, 10 * PAGE) == 16


def test_reports_of_ranks_are_put_together() -> None:
    one = WorkerReport(resized={0: Resized(1), 1: Resized(1, "no room")})
    other = WorkerReport(resized={0: Resized(1), 2: Resized(1)})
    assert one.merged(other).resized == {0: Resized(2), 1: Resized(1, "no room"), 2: Resized(1)}
    assert one.merged(other).resized == other.merged(one).resized
