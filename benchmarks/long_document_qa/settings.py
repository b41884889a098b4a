"""Everything the benchmark can be told, validated, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from offload.config import StoreWhen
from offload.restore_config import RestoreWhen
from offload.testing.engines.models import LLAMA_8B, kv_bytes_per_token, llama_parameters

__all__ = ["BARE", "GRAPHS", "HUGE_PAGES", "MODES", "ORDERS", "SHAPES", "Model", "Settings", "Workload"]

MODES = ("plain", "prefix", "native", "offload")
BARE = "bare"  # prefix caching, and a connector whose hooks do nothing
ORDERS = ("random", "tile", "interleave")
SHAPES = ("tiny", "llama-8b")
GRAPHS = ("compiled", "captured", "none")
HUGE_PAGES = ("auto", "false")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """Which prompts are asked, in which order.

    documents: how many documents, one measurement for each count.
    document_tokens, question_tokens, output_tokens: lengths in tokens; a question is new with every asking.
    passes: how often each document is asked; the first asking is cold.
    order: of the askings, see `longdoc.workload`.
    concurrency: requests in flight at any time; the next one is sent when one has finished.
    vocab_size: token ids are drawn from 3 to vocab_size - 1.
    seed: of the documents and of the random order.
    """

    documents: tuple[int, ...] = (8, 16, 32, 64)
    document_tokens: int = 2048
    question_tokens: int = 16
    output_tokens: int = 10
    passes: int = 2
    order: str = "random"
    concurrency: int = 2
    vocab_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.documents:
            raise ValueError("documents: at least one count is needed")
        for count in self.documents:
            _at_least("documents", count, 1)
        for name in ("document_tokens", "question_tokens", "output_tokens", "passes", "concurrency"):
            _at_least(name, getattr(self, name), 1)
        _at_least("vocab_size", self.vocab_size, 8)
        _at_least("seed", self.seed, 0)
        _one_of("order", self.order, ORDERS)

    @property
    def request_tokens(self) -> int:
        """Tokens of one request from the first of its prompt to the last of its output."""
        return self.document_tokens + self.question_tokens + self.output_tokens


@dataclass(frozen=True)
class Model:
    """The model that the offline benchmark makes.

    The default has 8 layers of width 256 and 8 KV heads of 32, in float32: 16 KiB of KV per token. It is
    chosen so that computing costs far more than copying, as it does for real models. On a CPU the ratio is
    larger than on a GPU, and larger still for wider models and longer documents. So copies weigh less here
    than they would on a GPU.

    shape: "tiny" (the sizes below, weights made on the spot) or "llama-8b" (Llama 3.1 8B, dummy weights).
    """

    shape: str = "tiny"
    hidden_size: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 8
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _one_of("model_shape", self.shape, SHAPES)
        _one_of("dtype", self.dtype, tuple(_DTYPE_BYTES))
        for name in ("hidden_size", "layers", "heads", "kv_heads"):
            _at_least(name, getattr(self, name), 1)
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size={self.hidden_size}: must be an even multiple of heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token, over all layers."""
        sizes = (
            LLAMA_8B if self.shape == "llama-8b" else {f.name: getattr(self, f.name) for f in fields(self)}
        )
        return kv_bytes_per_token(
            hidden_size=sizes["hidden_size"],
            layers=sizes["layers"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            dtype_bytes=_DTYPE_BYTES[self.dtype],
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; those of the tiny model do not count."""
        return llama_parameters(LLAMA_8B) * _DTYPE_BYTES[self.dtype] if self.shape == "llama-8b" else 0


@dataclass(frozen=True)
class Settings:
    """A whole offline run.

    gpu_documents: documents the GPU cache holds, beside the little room that running requests need.
    cpu_documents: documents the CPU pool holds.
    block_size: tokens per block; on the CPU backend a multiple of 32.
    max_num_batched_tokens: most tokens the engine computes in one step.
    device: "cpu" or "cuda".
    in_process: whether an engine is one process, forked from one that has imported vLLM, instead of three
        that import it anew. It starts in a fraction of the time and computes on all cores. On a CPU only.
    restore: the connector's setting of that name.
    store: the connector's setting of that name.
    huge_pages: the connector's setting of that name.
    graphs: what a GPU's steps run. "compiled" is vLLM's default. "captured" are CUDA graphs of steps that
        only decode, of the model as it is written. "none" is neither, as always on a CPU.
    """

    workload: Workload
    model: Model
    gpu_documents: int = 8
    cpu_documents: int = 30
    block_size: int = 128
    max_num_batched_tokens: int = 2048
    device: str = "cpu"
    in_process: bool = False
    restore: str = "auto"
    store: str = "eager"
    huge_pages: str = "auto"
    graphs: str = "compiled"

    def __post_init__(self) -> None:
        for name in ("gpu_documents", "cpu_documents", "block_size", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        _one_of("device", self.device, ("cpu", "cuda"))
        _one_of("restore", self.restore, tuple(RestoreWhen))
        _one_of("store", self.store, tuple(StoreWhen))
        _one_of("huge_pages", self.huge_pages, HUGE_PAGES)
        _one_of("graphs", self.graphs, GRAPHS)
        if self.in_process and self.device != "cpu":
            raise ValueError(f"in_process={self.in_process}: needs device 'cpu'")
        if self.device == "cpu" and self.block_size % 32:
            raise ValueError(f"block_size={self.block_size}: the CPU backend needs a multiple of 32")
        if self.device == "cpu" and self.model.shape != "tiny":
            raise ValueError(f"model_shape={self.model.shape!r}: needs device 'cuda'; use 'tiny' on a CPU")
        if self.model.shape == "llama-8b":
            _at_most("vocab_size", self.workload.vocab_size, LLAMA_8B["vocab_size"])
            _at_most(
                "document_tokens + question_tokens + output_tokens",
                self.workload.request_tokens,
                LLAMA_8B["max_position_embeddings"],
            )
        if self.workload.concurrency > self.gpu_documents:
            raise ValueError(
                f"concurrency={self.workload.concurrency}: the GPU cache holds only "
                f"gpu_documents={self.gpu_documents} requests at a time"
            )
        if self.max_num_batched_tokens < self.workload.concurrency:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"concurrency={self.workload.concurrency}"
            )

    @property
    def document_blocks(self) -> int:
        """Blocks that a request leaves behind to be hit: its full ones (the last token is not computed)."""
        return max(1, (self.workload.request_tokens - 1) // self.block_size)

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the GPU cache: the documents, a tail for each running request, and the null block."""
        tail_tokens = self.workload.question_tokens + self.workload.output_tokens
        tail_blocks = 1 + -(-tail_tokens // self.block_size)
        return self.gpu_documents * self.document_blocks + self.workload.concurrency * tail_blocks + 1

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self.workload.request_tokens

    @property
    def max_num_seqs(self) -> int:
        """Most requests running at a time."""
        return self.workload.concurrency

    @property
    def warm_up_documents(self) -> int:
        """Documents asked twice before anything is timed: those that the GPU cache holds, and one more.

        An engine in one process compiles nothing; there, as many as run at a time.
        """
        return self.workload.concurrency if self.in_process else self.gpu_documents + 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self.model.kv_bytes_per_token * self.block_size

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the CPU pool."""
        return self.cpu_documents * self.document_blocks * self.block_bytes


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")


def _at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ValueError(f"{name}={value}: model_shape='llama-8b' takes {most} at most")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
