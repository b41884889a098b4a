"""``kv-offload check`` refuses what the start of an engine refuses, in the same words, and nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from offload import HostMemoryError, OffloadError
from offload.cli import main
from offload.vllm import start_check, support
from offload.vllm.plugin import CONNECTOR, register
from offload.worker.pool.host_limits import check_room, host_memory_bytes
from tests.offload.vllm.models import KINDS, LEAST_BLOCK_BYTES_PER_TOKEN, write_model

GIB = 1 << 30
ENGINE = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 32}

BAD_SETTINGS: list[dict[str, Any]] = [
    {},
    {"cpu_gb": 8},
    {"cpu_gib": "8"},
    {"cpu_gib": True},
    {"cpu_gib": None},
    {"cpu_gib": 0},
    {"cpu_gib": -1},
    {"cpu_gib": 1e9},
    {"cpu_gib": 1e300},
    {"cpu_gib": 1.7e308},
    {"cpu_gib": 10**400},
    {"cpu_gib": 0.01, "store_decode_blocks": 1},
    {"cpu_gib": 0.01, "eviction_policy": "LRU"},
    {"cpu_gib": 0.01, "eviction_policy": ["lru"]},
    {"cpu_gib": 0.01, "verify_loads": "often"},
    {"cpu_gib": 0.01, "hinted_share": 1.5},
    {"cpu_gib": 0.01, "hinted_share": "0.5"},
    {"cpu_gib": 0.01, "huge_pages": "yes"},
    {"cpu_gib": 0.01, "record_trace": ""},
    {"cpu_gib": 0.01, "record_trace": 3},
    {"cpu_gib": 0.01, "record_trace": "/"},
    {"cpu_gib": 0.01, "record_trace": "/nowhere/t.jsonl"},
    {"cpu_gib": 0.01, "record_trace": "/tmp/" + "x" * 999},
    {"cpu_gib": 0.01, "record_trace": "/tmp/\0"},
    {"cpu_gib": 0.01, "tiers": [{"kind": "disk", "path": "/tmp"}]},
    {"cpu_gib": 0.01, "tiers": [{"kind": "disk", "path": "/etc/passwd", "gib": 1}]},
    {"cpu_gib": 0.01, "tiers": [{"kind": "disk", "path": "/proc/nowhere", "gib": 1}]},
]

GOOD_SETTINGS: list[dict[str, Any]] = [
    {"cpu_gib": 0.01},
    {"cpu_gib": 1, "store_decode_blocks": False, "eviction_policy": "lru", "verify_loads": "never"},
    {"cpu_gib": 0.01, "hinted_share": 0, "huge_pages": True, "record_trace": "/tmp/trace.jsonl"},
    {"cpu_gib": 0.01, "tiers": [{"kind": "disk", "path": "/tmp/not-there", "gib": 0.01}]},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by kind of model."""
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root, kind) for kind in KINDS}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(support, "check_pinning", lambda: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM turns it off for an external launcher


def transfer(settings: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    return {"kv_connector": CONNECTOR, "kv_role": role, "kv_connector_extra_config": settings}


def refusal_of_the_start(**arguments: Any) -> str | None:
    """None: the engine would be built."""
    try:
        EngineArgs(**ENGINE | arguments).create_engine_config()
    except OffloadError as error:
        return str(error)
    return None


class Check:
    """The command, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def refusal(self, *arguments: str) -> str | None:
        """None: it had nothing against it."""
        status = main(["check", *arguments])
        printed = self._capsys.readouterr()
        if status == 0:
            return None
        assert status == 1
        assert "--kv-transfer-config" not in printed.out
        (line,) = (line for line in printed.err.splitlines() if line.startswith("refused: "))
        return line.removeprefix("refused: ")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(capsys)


def options(**arguments: Any) -> list[str]:
    """As they are written after ``vllm serve MODEL``."""
    words = []
    for name, value in (ENGINE | arguments).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=lambda settings: str(settings)[:60])
def test_bad_settings(settings: dict[str, Any], models: dict[str, str], check: Check) -> None:
    refusal = refusal_of_the_start(model=models["llama"], kv_transfer_config=transfer(settings))
    assert refusal is not None
    config = json.dumps(settings)
    assert check.refusal("--config", config) == refusal
    assert check.refusal("--config", config, "--", models["llama"], *options()) == refusal


@pytest.mark.parametrize("settings", GOOD_SETTINGS, ids=lambda settings: str(settings)[:60])
def test_good_settings(settings: dict[str, Any], models: dict[str, str], check: Check) -> None:
    assert refusal_of_the_start(model=models["llama"], kv_transfer_config=transfer(settings)) is None
    config = json.dumps(settings)
    assert check.refusal("--config", config) is None
    assert check.refusal("--config", config, "--", models["llama"], *options()) is None


HIDDEN_STATES = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
TOO_SMALL = (LEAST_BLOCK_BYTES_PER_TOKEN * 32 - 1) / GIB
BAD_ENGINES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"cpu_gib": TOO_SMALL}, {}),
    ("llama", {"cpu_gib": 0.01, "record_trace": "/tmp/t.jsonl"}, {"block_size": 96}),
    ("llama", {"cpu_gib": 0.01}, {"enable_prefix_caching": False}),
    ("llama", {"cpu_gib": 0.01}, {"speculative_config": HIDDEN_STATES}),
    ("llama", {"cpu_gib": 0.01}, {"distributed_executor_backend": "external_launcher"}),
    ("llama", {"cpu_gib": 0.01}, {"kv_offloading_size": 4.0}),
    ("hybrid", {"cpu_gib": 0.01}, {"enable_prefix_caching": False}),
]
if current_platform.is_cpu():  # whose ranks need no devices
    BAD_ENGINES += [
        ("llama", {"cpu_gib": TOO_SMALL}, {"tensor_parallel_size": 2}),  # one copy of its one head
        ("llama", {"cpu_gib": host_memory_bytes() / GIB * 0.6}, {"data_parallel_size": 2}),
        (
            "llama",
            {"cpu_gib": 0.01, "record_trace": "/tmp/t.jsonl"},
            {"block_size": 512, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ),
    ]


@pytest.mark.parametrize(("model", "settings", "arguments"), BAD_ENGINES, ids=lambda value: str(value)[:50])
def test_engines_that_cannot_be_served(
    model: str, settings: dict[str, Any], arguments: dict[str, Any], models: dict[str, str], check: Check
) -> None:
    refusal = refusal_of_the_start(model=models[model], kv_transfer_config=transfer(settings), **arguments)
    assert refusal is not None
    found = check.refusal("--config", json.dumps(settings), "--", models[model], *options(**arguments))
    assert found == refusal


MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
BAD_TRANSFERS: list[dict[str, Any]] = [
    transfer({"cpu_gib": 0.01}, "kv_producer"),
    transfer({"cpu_gib": 0.01}, "kv_consumer"),
    {**MULTI, "kv_connector_extra_config": {"connectors": [transfer({"cpu_gib": 0.01})]}},
    {
        **MULTI,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [transfer({"cpu_gb": 1})]},
    },
]


@pytest.mark.parametrize("config", BAD_TRANSFERS, ids=lambda config: str(config)[:90])
def test_a_flag_that_somebody_wrote(config: dict[str, Any], models: dict[str, str], check: Check) -> None:
    refusal = refusal_of_the_start(model=models["llama"], kv_transfer_config=config)
    assert refusal is not None
    assert check.refusal("--", models["llama"], *options(kv_transfer_config=config)) == refusal


def test_a_good_flag_that_somebody_wrote(models: dict[str, str], check: Check) -> None:
    config = transfer({"cpu_gib": 0.01})
    assert check.refusal("--", models["llama"], *options(kv_transfer_config=config)) is None
    given = ["--config", '{"cpu_gib": 0.01}', "--", models["llama"], *options(kv_transfer_config=config)]
    twice = check.refusal(*given)
    assert twice is not None
    assert "given twice" in twice


def test_a_flag_without_our_connector(models: dict[str, str], check: Check) -> None:
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    refusal = check.refusal("--", models["llama"], *options(kv_transfer_config=other))
    assert refusal is not None
    assert f"does not name {CONNECTOR}" in refusal


def test_what_vllm_itself_refuses(models: dict[str, str], check: Check) -> None:
    refusal = check.refusal("--", models["llama"], *options(max_model_len=10**9))
    assert refusal is not None
    assert "vLLM refuses these arguments" in refusal


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--blok-size", "16"], "unrecognized arguments: --blok-size 16; `vllm serve --help=all` lists"),
        (["--block-size", "many"], "argument --block-size: "),
        (["--config", "/nowhere/serve.yaml"], "vLLM cannot read these arguments: [Errno 2] No such file"),
        (["--config", '{"cpu_gib": 8}'], "vLLM cannot read these arguments: Config file must be"),
    ],
)
def test_arguments_that_vllm_does_not_take(
    arguments: list[str],
    reason: str,
    models: dict[str, str],
    check: Check,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = check.refusal("--config", '{"cpu_gib": 0.01}', "--", models["llama"], *arguments)
    assert refusal is not None
    assert reason in refusal
    main(["check", "--", models["llama"], *arguments])
    assert "usage:" not in capsys.readouterr().err


def test_a_model_has_to_be_named(models: dict[str, str], check: Check, tmp_path: Path) -> None:
    """vLLM itself would take its default model."""
    refusal = check.refusal("--config", '{"cpu_gib": 0.01}', "--", "--block-size", "32")
    assert refusal is not None
    assert "'--block-size 32' name no model; put it first: -- MODEL" in refusal
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {models['llama']}\n")
    for named in (["--model", models["llama"]], ["--config", str(file)]):
        assert check.refusal("--config", '{"cpu_gib": 0.01}', "--", *named, *options()) is None


def test_memory_that_is_in_use(models: dict[str, str], check: Check) -> None:
    """The start finds out when it takes the memory, with the model loaded."""
    size = host_memory_bytes() / GIB
    with pytest.raises(HostMemoryError, match=r"cannot take .* GiB for the CPU pool"):
        check_room(int(size * GIB))
    config = json.dumps({"cpu_gib": size})
    for arguments in ([], ["--", models["llama"], *options()]):
        refusal = check.refusal("--config", config, *arguments)
        assert refusal is not None
        assert "GiB for the CPU pool" in refusal


@pytest.mark.parametrize("cuda", [True, False])
def test_pinning_is_asked_for_on_cuda(cuda: bool, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise HostMemoryError("cannot pin")

    monkeypatch.setattr(support, "check_pinning", refuse)
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    assert check.refusal("--config", '{"cpu_gib": 0.01}') == ("cannot pin" if cuda else None)


@pytest.mark.parametrize("allowed", [None, ["cpu_offload"], ["a", "cpu_offload"], ["a"], []], ids=str)
def test_plugins_that_vllm_may_load(
    allowed: list[str] | None, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_check, "envs", SimpleNamespace(VLLM_PLUGINS=allowed))
    refusal = check.refusal("--config", '{"cpu_gib": 0.01}')
    assert (refusal is None) == (allowed is None or "cpu_offload" in allowed)
    assert refusal is None or "add cpu_offload to it" in refusal
