"""The command ``kv-offload``: ``check``, and how wrong usage ends."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm

from offload.cli import main
from offload.files.private import PrivateDirectory
from offload.files.tier_path import open_one


def test_a_good_configuration_prints_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", '{"cpu_gib": 0.5, "store_decode_blocks": false}']) == 0
    printed = capsys.readouterr().out
    assert f"vLLM     {vllm.__version__}" in printed
    assert re.search(
        r"^memory   [\d.]+ GiB in all, [\d.]+ free, 0\.5 of them for the pool$", printed, re.MULTILINE
    )
    assert flag_as_a_shell_reads_it(printed) == {
        "kv_connector": "CpuOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_gib": 0.5, "store_decode_blocks": False},
    }
    assert "reset_prefix_cache(reset_connector=True)" in printed


def test_the_default_is_a_pool_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    flag = flag_as_a_shell_reads_it(capsys.readouterr().out)
    assert flag["kv_connector_extra_config"] == {"cpu_gib": 8}


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        ({"cpu_gib_max": 5e4}, "cpu_gib_max is 50000, and this machine, or the container, has"),
        ({"cpu_gib_max": 0.75}, None),
        ({"restore": "never"}, 'restore is "never", and nobody else reads the pool'),
        ({"restore": "never", "listen": "127.0.0.1:7000"}, None),
        ({"restore": "auto"}, None),
    ],
)
def test_what_is_hardly_meant_is_remarked_on(
    settings: dict[str, Any], remark: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", json.dumps({"cpu_gib": 0.5, **settings})]) == 0
    remarks = re.findall(
        r"^note     (.*(?:cpu_gib_max|restore is).*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [each[: len(remark or "")] for each in remarks] == ([] if remark is None else [remark])


NAMES = [
    "it's a trace",
    '"quoted"',
    "$HOME `date` $(date)",
    "a\\b",
    "a\nb",
    "!history",
    "Spuren für später",
    "*",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_flag_survives_a_shell(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"cpu_gib": 0.5, "record_trace": str(tmp_path / name)}
    assert main(["check", "--config", json.dumps(settings)]) == 0
    flag = flag_as_a_shell_reads_it(capsys.readouterr().out)
    assert flag["kv_connector_extra_config"] == settings


def with_disk(path: Path, gib: float) -> str:
    return json.dumps({"cpu_gib": 0.5, "tiers": [{"kind": "disk", "path": str(path), "gib": gib}]})


def test_disks_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", with_disk(tmp_path / "kv", 0.25)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("disk")]
    assert re.fullmatch(
        rf"disk     {tmp_path}/kv: 0\.25 GiB, [\d.]+ free; reads and writes with(out)? O_DIRECT.*", line
    )
    assert list(tmp_path.iterdir()) == []


def test_disks_that_cannot_be_had_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", with_disk(tmp_path, 1e6)]) == 1
    assert f"refused: {tmp_path}: tiers there may take 1000000.00 GiB" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["check", "--config", with_disk(tmp_path / "file", 1)]) == 1
    assert "no directory" in capsys.readouterr().err


def test_disks_of_engines_that_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "kv-offload"
    owner = open_one(root, "name", 4096, 8192, PrivateDirectory.open)
    owner.replace("slab", bytes(4096))
    assert main(["check", "--config", with_disk(tmp_path, 0.1)]) == 1
    assert f"those of engines that run are {root}/name.1" in capsys.readouterr().err
    owner.close()
    assert main(["check", "--config", with_disk(tmp_path, 0.1)]) == 0
    assert "free and 0.0 of earlier engines; reads" in capsys.readouterr().out


def with_pool(path: Path, **more: float) -> str:
    pool = {"kind": "shared-memory", "path": str(path), **more}
    return json.dumps({"cpu_gib": 0.5, "pool": pool})


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_shared_memory_is_looked_at(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", with_pool(memory)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pool")]
    assert re.fullmatch(rf"pool     {memory}: [\d.]+ GiB free; it outlives the engine", line)
    assert list(memory.iterdir()) == []


def test_shared_memory_that_cannot_be_had_is_refused(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = open_one(memory / "kv-offload-pool", "name", 4096, None, PrivateDirectory.open)
    owner.replace("pool", bytes(4096))
    assert main(["check", "--config", with_pool(memory, gib=0.5)]) == 1
    assert "raise gib of pool, or lower cpu_gib" in capsys.readouterr().err
    owner.close()
    assert main(["check", "--config", with_pool(memory, gib=0.5)]) == 0
    (tmp_path / "file").touch()
    assert main(["check", "--config", with_pool(tmp_path / "file")]) == 1
    assert "choose another path" in capsys.readouterr().err


def flag_as_a_shell_reads_it(printed: str) -> dict[str, Any]:
    """What vLLM would be given if a user copied the flag to a command line."""
    (line,) = (line for line in printed.splitlines() if line.startswith("flag"))
    echo = "import sys, json; print(json.dumps(sys.argv[1:]))"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(echo)} {line.removeprefix('flag')}"
    echoed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    name, value = json.loads(echoed)
    assert name == "--kv-transfer-config"
    flag: dict[str, Any] = json.loads(value)
    return flag


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{cpu_gib: 8}", "is not JSON"),
        ("{'cpu_gib': 8}", "with double quotes inside"),
        ('{"kv_connector": "CpuOffloadConnector"}', "it is the value of --kv-transfer-config"),
        ('{"cpu_gib": ' + "1" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("8", "is not a JSON object"),
        ('{"cpu_gib": 8, "store": "lazy", "cpu_gib": 9}', "--config has 'cpu_gib' more than once"),
        ("[]", "is not a JSON object"),
        ('{"cpu_gb": 8}', "did you mean 'cpu_gib'"),
        ('{"cpu_gib": 1e300}', "GiB of memory"),
        ('{"cpu_gib": NaN}', "a positive number"),
        ('{"cpu_gib": 0.5, "record_trace": "/nowhere/t.jsonl"}', "there is no directory /nowhere"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_one_is_refused(config: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", config]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("refused: ")
    assert reason in output.err
    assert "--kv-transfer-config" not in output.out


@pytest.mark.parametrize(
    ("installed", "reason"), [("0.1.0", "vLLM 0.1.0 is not supported"), (None, "not installed")]
)
def test_vllm_is_looked_at(
    installed: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if installed is None:
        monkeypatch.delitem(sys.modules, "offload.vllm.versions", raising=False)
        monkeypatch.setitem(sys.modules, "vllm", None)
    else:
        monkeypatch.setattr(vllm, "__version__", installed)
    assert main(["check", "--config", '{"cpu_gib": 0.5}']) == 1
    assert reason in capsys.readouterr().err


def test_bad_settings_are_refused_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "offload.vllm.versions", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["check", "--config", '{"cpu_gb": 8}']) == 1
    assert "did you mean 'cpu_gib'" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "offload.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kv-offload {version('kv-offload')}\n")


def test_certify_needs_a_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "offload.vllm.certification.certificate", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["certify"]) == 1
    assert "refused: vLLM is not installed here" in capsys.readouterr().err


def test_a_vllm_that_lacks_something_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("vllm", "offload.vllm.versions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "offload.vllm.certification.certificate", raising=False)
    assert main(["check", "--config", '{"cpu_gib": 0.5}']) == 1
    said = capsys.readouterr().err
    assert "vLLM cannot be imported here (No module named 'no_such_module')" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kv-offload {version('kv-offload')}\n"


WRONG = [
    [],
    ["serve"],
    ["check", "--cpu-gib", "8"],
    ["certify", "--seconds", "-1"],
    ["certify", "--seconds", "inf"],
    ["certify", "--seconds", "a minute"],
    ["certify", "--seed", "-1"],
    ["certify", "--seed", "1.5"],
    ["certify", "vllm"],
    ["tier"],
    ["tier", "ls"],
    ["tier", "rm", "/tmp"],
    ["tier", "ls", "/tmp", "--gib", "1"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "MODEL", "--block-size", "16"], "16; put vLLM's arguments after --, as in: kv-offload"),
        (["check", "--block-size", "16", "--", "MODEL"], "--block-size; put vLLM's arguments after --"),
        (["certify", "MODEL"], "MODEL; certify takes none of vLLM's arguments"),
        (["certify", "--", "MODEL"], "MODEL; certify takes none of vLLM's arguments"),
    ],
    ids=str,
)
def test_where_the_arguments_of_vllm_go(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
