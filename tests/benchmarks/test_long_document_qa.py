"""The long-document benchmark without any engine: sizes, refusals, and arguments that vLLM takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import EngineArgs
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.long_document_qa import __main__ as long_document_qa
from benchmarks.long_document_qa import arguments, options
from benchmarks.long_document_qa.arguments import check_memory, make_settings
from benchmarks.long_document_qa.engine import engine_arguments
from benchmarks.long_document_qa.offline import Start
from benchmarks.long_document_qa.options import parse
from benchmarks.long_document_qa.settings import GRAPHS, MODES, Settings
from benchmarks.long_document_qa.summary import notes

GIB = 2**30


@pytest.fixture
def gpu_settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What ``--device cuda --model-shape llama-8b`` means where there is a GPU."""
    monkeypatch.setattr(arguments, "device_of", lambda wanted: wanted)
    return make_settings({"device": "cuda", "shape": "llama-8b"})


def test_sizes_of_llama_8b(gpu_settings: Settings) -> None:
    assert gpu_settings.model.kv_bytes_per_token == 32 * 8 * 128 * 2 * 2 == 131_072
    assert gpu_settings.block_bytes == 2 * 2**20
    assert gpu_settings.model.weight_bytes == 2 * 8_030_261_248
    assert gpu_settings.document_blocks == 20_025 // 16
    assert gpu_settings.cpu_bytes == 30 * 1251 * 2 * 2**20
    assert gpu_settings.workload.documents == (8, 16, 32, 64)
    assert gpu_settings.workload.vocab_size == 128_256


def test_the_gpu_cache_holds_eight_documents_and_no_ninth(gpu_settings: Settings) -> None:
    """Beside them there is room for what two running requests add, and for the block that vLLM reserves."""
    a_request = -(-gpu_settings.workload.request_tokens // 16)
    assert gpu_settings.gpu_blocks >= 1 + 6 * gpu_settings.document_blocks + 2 * a_request
    assert gpu_settings.gpu_blocks < 1 + 9 * gpu_settings.document_blocks
    assert gpu_settings.gpu_blocks - 8 * gpu_settings.document_blocks == 1 + 2 * 3


@pytest.mark.parametrize("mode", MODES)
def test_vllm_takes_the_engine_of_a_gpu(gpu_settings: Settings, mode: str) -> None:
    """As far as it looks at arguments without a GPU. A small pool: its size is checked against memory."""
    settings = replace(gpu_settings, cpu_documents=1, max_num_batched_tokens=4096, store="lazy")
    config = EngineArgs(**engine_arguments(settings, mode)).create_engine_config()
    model, cache = config.model_config, config.cache_config
    assert model.architecture == "LlamaForCausalLM"
    assert (model.dtype, model.max_model_len) == (torch.bfloat16, 20_026)
    assert config.load_config.load_format == "dummy"
    assert (cache.block_size, cache.num_gpu_blocks_override) == (16, settings.gpu_blocks)
    assert cache.enable_prefix_caching is (mode != "plain")
    page = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    ).page_size_bytes
    assert page * model.get_num_layers(config.parallel_config) == settings.block_bytes
    transfer = config.kv_transfer_config
    names = {"native": "OffloadingConnector", "offload": "CpuOffloadConnector"}
    assert (transfer and transfer.kv_connector) == names.get(mode)
    if mode == "offload":
        assert transfer.kv_connector_extra_config["store"] == "lazy"
    if mode == "native":
        assert "spec_name" not in transfer.kv_connector_extra_config, "a GPU has vLLM's own copies"


def test_what_a_gpus_steps_run_can_be_chosen(gpu_settings: Settings) -> None:
    compiled, captured, none = (
        EngineArgs(**engine_arguments(replace(gpu_settings, cpu_documents=1, graphs=graphs), "offload"))
        for graphs in GRAPHS
    )
    assert (compiled.enforce_eager, captured.enforce_eager, none.enforce_eager) == (False, False, True)
    assert compiled.compilation_config == CompilationConfig()
    assert captured.compilation_config.mode == CompilationMode.NONE
    assert captured.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"vocab_size": 200_000}, "vocab_size=200000: model_shape='llama-8b' takes 128256 at most"),
        ({"document_tokens": 131_072}, r"=131098: model_shape='llama-8b' takes 131072 at most"),
    ],
)
@pytest.mark.usefixtures("gpu_settings")
def test_what_the_model_cannot_take_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_settings({"device": "cuda", **wrong})


def test_too_little_memory_is_told_before_anything_starts(
    gpu_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"host": 128 * GIB, "gpu": 80 * GIB, "shared": 64 * GIB}
    monkeypatch.setattr(arguments, "host_memory_bytes", lambda: memory["host"])
    monkeypatch.setattr(arguments, "_gpu_memory_bytes", lambda: memory["gpu"])
    monkeypatch.setattr(arguments, "_shared_memory_bytes", lambda: memory["shared"])
    check_memory(gpu_settings, ["plain", "prefix", "offload"])
    with pytest.raises(ValueError, match=r"its pool of 73\.\d GiB in /dev/shm, where 64\.0 GiB are free"):
        check_memory(gpu_settings, MODES)
    memory["shared"] = 128 * GIB
    memory["gpu"] = 40 * GIB
    check_memory(gpu_settings, MODES)
    memory["gpu"] = 32 * GIB
    with pytest.raises(ValueError, match=r"take 36\.\d GiB of GPU memory, this GPU has 32\.0 GiB"):
        check_memory(gpu_settings, MODES)
    memory["host"] = 64 * GIB
    with pytest.raises(ValueError, match=r"take 73\.\d GiB, this machine has 64\.0 GiB"):
        check_memory(gpu_settings, MODES)


def test_weights_that_mean_nothing_are_noted(gpu_settings: Settings) -> None:
    (note,) = notes(MODES, gpu_settings)
    assert "dummy weights" in note


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which serves what is asked for")
@pytest.mark.parametrize("asked", ["--device cuda", "--device cuda --model-shape llama-8b --modes offload"])
def test_without_cuda_the_command_line_says_so(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        long_document_qa.main(asked.split())
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "error: device='cuda': " in said.err
    assert "NVIDIA GPU" in said.err
    assert said.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a demo is a full one")
def test_a_demo_asks_sixteen_documents_first_of_two_engines_that_start_together() -> None:
    made = parse(["--demo"])
    assert made.settings is not None
    assert made.settings.workload.documents == (16, 8, 32)
    assert made.modes == ("prefix", "offload") and made.side_by_side
    assert made.settings.in_process and made.settings.warm_up_documents == 2
    assert made.json is not None and made.plot is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU's sizes")
def test_a_full_demo_is_the_benchmark_itself() -> None:
    made, benchmark = parse(["--demo", "--full"]), parse(["--documents", "8", "16", "32"])
    assert made.settings is not None and made.settings == benchmark.settings
    assert made.modes == ("plain", "prefix", "offload") and not made.side_by_side
    assert made.settings.warm_up_documents == 9


@pytest.mark.usefixtures("gpu_settings")
def test_a_demo_on_a_gpu_is_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of several modes do not fit beside each other there."""
    monkeypatch.setattr(options, "device_of", lambda wanted: "cuda")
    monkeypatch.setattr(options, "check_memory", lambda *given: None)
    made = parse(["--demo", "--device", "cuda"])
    assert made.settings is not None
    assert not made.side_by_side and made.settings.workload.documents == (8, 16, 32)
    with pytest.raises(ValueError, match="in_process=True: needs device 'cpu'"):
        replace(made.settings, in_process=True)


def test_full_is_a_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--full"])
    assert "error: --full: only with --demo" in capsys.readouterr().err


@pytest.mark.parametrize("modes", [("prefix",), ("prefix", "offload")])
def test_a_start_says_what_starts_and_for_how_long(
    modes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    start = Start(modes)
    start.tell()  # no terminal: nothing is written over
    start.ended()
    first, last = capsys.readouterr().err.splitlines()
    what = "an engine (prefix)" if len(modes) == 1 else "2 engines (prefix, offload)"
    assert first == f"starting {what} ..." and last == f"starting {what}, 0 s: done"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which serves what is asked for")
def test_llama_8b_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_document_qa.main(["--model-shape", "llama-8b"])
    assert "model_shape='llama-8b': needs device 'cuda'" in capsys.readouterr().err
