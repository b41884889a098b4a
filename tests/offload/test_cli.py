"""The command ``kv-offload check``."""

import json
import sys
from importlib.metadata import version

import pytest
import vllm

from offload.cli import main


def test_a_good_configuration_prints_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", '{"cpu_gib": 0.5, "store_decode_blocks": false}']) == 0
    printed = capsys.readouterr().out
    assert f"vLLM     {vllm.__version__}" in printed
    flag = printed.splitlines()[-1].split("--kv-transfer-config ")[1].strip("'")
    assert json.loads(flag) == {
        "kv_connector": "CpuOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_gib": 0.5, "store_decode_blocks": False},
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{cpu_gib: 8}", "is not JSON"),
        ("8", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"cpu_gb": 8}', "did you mean 'cpu_gib'"),
        ('{"cpu_gib": 1e300}', "GiB of memory"),
        ('{"cpu_gib": NaN}', "a positive number"),
        ('{"cpu_gib": 0.5, "record_trace": "/nowhere/t.jsonl"}', "there is no directory /nowhere"),
    ],
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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kv-offload {version('kv-offload')}\n"


@pytest.mark.parametrize("arguments", [[], ["serve"], ["check", "--cpu-gib", "8"]], ids=str)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
