"""The command ``kv-offload tier`` on real directories, those of engines that run included."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.files.tier_path import open_one
from offload.tier_config import short_name
from offload.worker.media import inspection
from offload.worker.media.slab import SlabMedium
from tests.offload.worker.media.bench import Pool, run, slab

pytestmark = pytest.mark.timeout(120)
TOLD = json.dumps({"vllm": "0.32.0", "model": {"_name_or_path": "meta-llama/Llama-3.1-8B"}})
NAMESPACE = f"{TOLD}\nrank 1 of 2, share Share(part=0, num_parts=1)"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_WRITE_SECONDS", 0.0)


def engine(path: Path, pool: Pool, name: str, namespace: str = NAMESPACE) -> SlabMedium:
    """One that runs, with extents in five places."""
    medium = open_one(
        path / "kv-offload", name, 1 << 20, 1 << 30, lambda each: slab(each, pool, namespace=namespace)
    )
    extents = [(place, 1, [4 * place, 4 * place + 1]) for place in range(5)]
    assert run(medium, pool.put(1, extents, medium.epoch)).error is None
    return medium


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def path(tmp_path: Path, pool: Pool) -> Iterator[Path]:
    """Of a tier: one directory is owned, two are not."""
    for name, namespace in (("aaaa", NAMESPACE), ("bbbb", "of another release")):
        assert engine(tmp_path, pool, name, namespace).close(30)
    live = engine(tmp_path, pool, "cccc")
    yield tmp_path
    assert live.close(30)


def damage(path: Path, name: str) -> None:
    with (path / "kv-offload" / name / "slab").open("r+b") as file:
        file.write(b"???")


def names(path: Path) -> set[str]:
    return {each.name for each in (path / "kv-offload").iterdir() if each.is_dir()}


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_ls(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "ls", str(path)]) == 0
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{path}/kv-offload: 3 directories, 0\.\d\d GiB", first)
    cells = [re.split("  +", row) for row in rows]
    assert [row[0] for row in cells] == ["aaaa.1", "bbbb.1", "cccc.1"]
    assert [row[3] for row in cells] == ["no", "no", "yes"]
    assert all(row[4:6] == ["5", "12"] for row in cells)
    assert cells[0][6:] == [short_name(TOLD), "1 of 2", "meta-llama/Llama-3.1-8B"]


def test_ls_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "ls", "--json", str(path)]) == 0
    printed = printed_json(capsys)
    assert printed["root"] == str(path / "kv-offload")
    first, second, third = printed["directories"]
    assert (first["name"], first["is_owned"], third["is_owned"]) == ("aaaa.1", False, True)
    assert (first["num_extents"], first["num_places"], first["epoch"]) == (5, 12, 1)
    assert first["namespace_name"] == short_name(TOLD)
    assert (first["namespace"], first["vllm"], first["rank"]) == (NAMESPACE, "0.32.0", "1 of 2")
    assert (second["namespace"], second["model"]) == ("of another release", None)
    assert first["opened_at"] > 1e9 and first["error"] is None


def test_ls_says_what_cannot_be_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "kv-offload" / "aaaa.1" / "superblock").write_bytes(b"kv-offload tier 99\n")
    (path / "kv-offload" / "bbbb.1" / "superblock").unlink()
    assert main(["tier", "ls", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "aaaa.1: " in printed and "its format is 99, and this release reads" in printed
    assert re.search(r"^bbbb\.1 +0\.00 +- +no +- +-", printed, re.MULTILINE)


def test_check(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\w{4}\.1: 5 of 5 extents are whole, ", printed, re.MULTILINE)) == 3
    assert "not" not in printed


def test_check_finds_damage(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path, "bbbb.1")
    assert main(["tier", "check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "aaaa.1: 5 of 5" in printed
    assert re.search(r"bbbb\.1: 4 of 5 extents are whole, .*; 1 are not$", printed, re.MULTILINE)
    assert "never served" in printed and "An engine that runs" not in printed
    assert main(["tier", "check", str(path), "aaaa.1", "--json"]) == 0
    assert [each["name"] for each in printed_json(capsys)["directories"]] == ["aaaa.1"]
    assert main(["tier", "check", str(path), "--json"]) == 1
    assert [each["broken_places"] for each in printed_json(capsys)["directories"]] == [[], [0], []]


def test_check_says_where_an_engine_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path, "cccc.1")
    assert main(["tier", "check", str(path), "cccc.1"]) == 1
    printed = capsys.readouterr().out
    assert "1 are not, which may be writes under way: an engine owns it" in printed
    assert "An engine that runs" in printed


def test_check_of_what_is_no_tier(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "kv-offload" / "aaaa.1" / "slab").unlink()
    assert main(["tier", "check", str(path)]) == 1
    assert "it has no file slab" in capsys.readouterr().out


def test_drop(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "drop", str(path), "aaaa.1", "cccc.1"]) == 1
    assert "an engine that runs owns cccc.1" in capsys.readouterr().err
    assert main(["tier", "drop", str(path)]) == 1
    assert "an engine that runs owns cccc.1" in capsys.readouterr().err
    assert names(path) == {"aaaa.1", "bbbb.1", "cccc.1"}
    assert main(["tier", "drop", str(path), "aaaa.1"]) == 0
    assert capsys.readouterr().out.startswith("deleted  aaaa.1, 0.00 GiB\nleft     2 directories, ")
    assert names(path) == {"bbbb.1", "cccc.1"}


def test_drop_of_all(tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine(tmp_path, pool, "aaaa").close(30)
    assert main(["tier", "drop", str(tmp_path), "--json"]) == 0
    printed = printed_json(capsys)
    assert ([each["name"] for each in printed["deleted"]], printed["left"]) == (["aaaa.1"], [])
    assert engine(tmp_path, pool, "aaaa").close(30)


def test_gc(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "gc", str(path), "--gib", "1"]) == 0
    assert names(path) == {"aaaa.1", "bbbb.1", "cccc.1"}
    assert main(["tier", "gc", str(path)]) == 0
    assert "engines own cccc.1" in capsys.readouterr().out
    assert names(path) == {"cccc.1"}


@pytest.mark.parametrize("verb", ["ls", "check", "drop", "gc"])
def test_paths_without_a_tier(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", verb, str(tmp_path)]) == 1
    assert f"refused: {tmp_path}: no engine has kept anything there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["check", "drop"])
def test_names_that_are_not_there(verb: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", verb, str(path), "aaaa"]) == 1
    assert "there is no aaaa; there are: aaaa.1, bbbb.1, cccc.1" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["-1", "inf", "nan", "many"])
def test_sizes_that_are_none(size: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tier", "gc", str(tmp_path), f"--gib={size}"])
    assert ended.value.code == 2
