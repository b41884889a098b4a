"""A pool gives memory back where its control group is short of it."""

from pathlib import Path

import pytest

from offload.worker.pool import pressure
from offload.worker.pool.pressure import SHARE, Pressure, PressureWatch, read_pressure

GIB = 1 << 30


def group(root: Path, *, high: int = 0, used: int = GIB, stalled: float = 0.0) -> None:
    """A machine with one control group of 4 GiB."""
    directory = root / "sys/fs/cgroup/box"
    directory.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (directory / "memory.max").write_text(f"{4 * GIB}\n")
    (directory / "memory.high").write_text("max\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    (directory / "memory.events").write_text(f"low 9\nhigh {high}\nmax 2\noom 0\noom_kill 5\n")
    some = f"some avg10={stalled:.2f} avg60=0.00 avg300=0.00 total=0\n"
    (directory / "memory.pressure").write_text(some + "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")


def test_what_the_kernel_says_is_read(tmp_path: Path) -> None:
    group(tmp_path, high=3, used=3 * GIB, stalled=12.5)
    assert read_pressure(tmp_path) == Pressure(5, 0.25, 12.5)


def test_waits_of_other_groups_do_not_count(tmp_path: Path) -> None:
    group(tmp_path, stalled=1.5)
    above = tmp_path / "sys/fs/cgroup/memory.pressure"
    above.write_text("some avg10=80.00 avg60=0.00 avg300=0.00 total=0\n")
    assert read_pressure(tmp_path).stalled == 1.5
    (tmp_path / "sys/fs/cgroup/box/memory.pressure").unlink()
    assert read_pressure(tmp_path).stalled == 80.0, "in a container the mount is the group itself"


def test_a_machine_without_groups_is_never_short(tmp_path: Path) -> None:
    calm = read_pressure(tmp_path)
    assert calm == Pressure(0, 1.0, 0.0)
    assert not calm.is_short(calm)


def test_memory_is_short_when_a_limit_was_met_or_is_near_or_somebody_waits() -> None:
    calm = Pressure(5, 0.5, 0.0)
    assert not calm.is_short(calm)
    assert not Pressure(6, 0.5, 0.0).is_short(calm), "files that were read, perhaps"
    assert Pressure(6, 0.1, 0.0).is_short(calm)
    assert not Pressure(5, 0.1, 0.0).is_short(calm)
    assert Pressure(5, 0.03, 0.0).is_short(calm)
    assert Pressure(5, 0.5, 11.0).is_short(calm)


def test_the_pool_gets_smaller_by_an_eighth_at_a_time(tmp_path: Path) -> None:
    group(tmp_path)
    asked: list[float] = []

    def yield_memory(share: float) -> bool:
        asked.append(share)
        return len(asked) < 3

    watch = PressureWatch(yield_memory, lambda: read_pressure(tmp_path))
    assert not watch.look()
    group(tmp_path, high=1, used=4 * GIB - GIB // 3)
    assert watch.look()
    assert not watch.look(), "it was met before the last look"
    group(tmp_path, high=1, stalled=50.0)
    assert watch.look()
    assert not watch.look(), "it is as small as it may be"
    assert asked == [SHARE] * 3
    watch.close()


def test_a_fault_of_the_watch_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pressure, "_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "_REST_SECONDS", 0.0)
    num_looks, asked = 0, list[float]()

    def read() -> Pressure:
        nonlocal num_looks
        num_looks += 1
        if num_looks < 4:
            raise MemoryError
        if num_looks == 5:
            watch.close()
        return Pressure(0, 0.01, 0.0)

    def yield_memory(share: float) -> bool:
        asked.append(share)
        return True

    watch = PressureWatch(yield_memory, read)
    watch._watch()
    assert asked == [SHARE] * 2, "it looks again"
    faults = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in faults] == [
        "the CPU pool cannot tell whether memory is short; it looks again"
    ]
