"""The command ``kv-offload pool`` on real regions, those of engines that run included."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.cli import main
from offload.messages import Fingerprint, Kept, WorkerFacts
from offload.worker.pool.region import RegionPlan
from offload.worker.replicas import ONE, Sharing, share_pool

FACTS = WorkerFacts(100, 3000, Fingerprint("", "", 1, 16, "", ""))
TOLD = json.dumps({"vllm": "0.32.0", "model": {"_name_or_path": "meta-llama/Llama-3.1-8B"}})


def engine(path: Path, namespace: str = TOLD, rank: int = 1) -> Sharing:
    plan = RegionPlan(path / "kv-offload-pool", namespace, rank, 2, 1 << 30)
    held = share_pool(ONE, FACTS, plan=plan)
    assert held.lasting is not None and held.tables is not None
    slots = np.arange(7)
    held.tables.fills[slots] = generations = np.full(7, held.lasting.facts.epoch << 40)
    names = np.arange(7 * 32, dtype=np.uint8).reshape(7, 32)
    held.lasting._table.keep(Kept(slots, generations, names, names, slots))
    return held


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a pool: one region is owned, two are not."""
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    for rank in (0, 1):
        held = engine(folder, rank=rank)
        assert held.lasting is not None
        held.lasting.close()
    live = engine(folder, "of another release")
    assert live.lasting is not None
    yield folder
    live.lasting.close()
    shutil.rmtree(folder)


Capture = pytest.CaptureFixture[str]


def regions(path: Path, capsys: Capture) -> list[dict[str, Any]]:
    assert main(["pool", "ls", str(path), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["regions"]
    return found


def names(path: Path, capsys: Capture, *, is_owned: bool | None = None) -> set[str]:
    return {row["name"] for row in regions(path, capsys) if is_owned in (None, row["is_owned"])}


def test_ls(path: Path, capsys: Capture) -> None:
    assert main(["pool", "ls", str(path)]) == 0
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{path}/kv-offload-pool: 3 regions, 0\.00 GiB", first)
    cells = sorted(re.split("  +", row.strip())[3:] for row in rows)
    assert cells == [
        ["no", "7", "100", "0 of 2", "meta-llama/Llama-3.1-8B"],
        ["no", "7", "100", "1 of 2", "meta-llama/Llama-3.1-8B"],
        ["yes", "7", "100", "1 of 2", "-"],
    ]


def test_ls_as_json(path: Path, capsys: Capture) -> None:
    rows = regions(path, capsys)
    assert {row["epoch"] for row in rows} == {1} and {row["num_blocks"] for row in rows} == {7}
    assert all(row["namespace"].endswith("of 2, shared by 1") and row["error"] is None for row in rows)


def test_rm_takes_what_nobody_owns(path: Path, capsys: Capture) -> None:
    [live] = names(path, capsys, is_owned=True)
    assert main(["pool", "rm", str(path)]) == 0
    assert capsys.readouterr().out.count("deleted") == 2
    assert names(path, capsys) == {live}
    assert main(["pool", "rm", str(path)]) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_rm_by_name(path: Path, capsys: Capture) -> None:
    [live] = names(path, capsys, is_owned=True)
    free, other = names(path, capsys, is_owned=False)
    assert main(["pool", "rm", str(path), free, live]) == 1
    assert "an engine that runs owns" in capsys.readouterr().err
    assert main(["pool", "rm", str(path), "none"]) == 1
    assert "there is no none" in capsys.readouterr().err
    assert main(["pool", "rm", str(path), free, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["deleted"]] == [free]
    assert names(path, capsys) == {live, other}


def test_what_is_damaged_is_listed(path: Path, capsys: Capture) -> None:
    free = min(names(path, capsys, is_owned=False))
    (path / "kv-offload-pool" / free / "superblock").write_bytes(b"?")
    assert main(["pool", "ls", str(path)]) == 0
    assert f"{free}: " in capsys.readouterr().out
    (path / "kv-offload-pool" / free / "superblock").unlink()
    assert main(["pool", "ls", str(path)]) == 0


def test_a_path_without_pools(tmp_path: Path, capsys: Capture) -> None:
    assert main(["pool", "ls", str(tmp_path)]) == 1
    assert "no engine has kept anything there" in capsys.readouterr().err
