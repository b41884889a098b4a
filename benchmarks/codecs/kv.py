"""KV of a real engine, as its disk tier has written it."""

from __future__ import annotations

import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from offload.testing.engines.environment import ENVIRONMENT, transfer_config
from offload.testing.engines.models import tiny_llama
from offload.testing.engines.process import IMPORTS, EngineProcess

__all__ = ["HIDDEN_SIZE", "extents_of"]

HIDDEN_SIZE = 1024
_BLOCK_TOKENS = 32
_PROMPT_TOKENS = 2048
_PROMPTS = 4
_SECONDS = 300.0
_EXTENT_BYTES = 1 << 20
_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class _Engine:
    """One engine with a disk tier, in this process."""

    def __init__(self, dtype: str, path: str) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = tiny_llama(hidden_size=HIDDEN_SIZE, layers=4, heads=8, kv_heads=8)
        tier = {"kind": "disk", "path": path, "gib": 1}
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(
                str(model),
                dtype=dtype,
                enforce_eager=True,
                skip_tokenizer_init=True,
                block_size=_BLOCK_TOKENS,
                num_gpu_blocks_override=512,
                max_model_len=4096,
                kv_transfer_config=transfer_config({"cpu_gib": 0.5, "tiers": [tier]}),
            )
        )

    def write(self) -> None:
        """Ask, and step on until the tier has what was asked."""
        rng = random.Random(0)
        for number in range(_PROMPTS):
            self._ask(str(number), rng.choices(range(3, 500), k=_PROMPT_TOKENS))
        until = time.monotonic() + _SECONDS
        number = _PROMPTS
        while self._kept() < _PROMPTS * _PROMPT_TOKENS // _BLOCK_TOKENS * 0.9 * self._block_bytes():
            if time.monotonic() > until:
                raise TimeoutError(f"the tier has not got all after {_SECONDS:g} s")
            number += 1
            self._ask(str(number), [3] * 8)

    def close(self) -> None:
        """Stop it."""
        self._llm.engine_core.shutdown()

    def _ask(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        self._llm.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._llm.has_unfinished_requests():
            self._llm.step()

    def _gauge(self, name: str) -> float:
        found = [each for each in self._llm.get_metrics() if each.name == f"vllm:cpu_offload_{name}"]
        return sum(float(getattr(each, "value", 0)) for each in found)

    def _kept(self) -> float:
        return self._gauge("route_kept_bytes")

    def _block_bytes(self) -> float:
        return self._gauge("pool_bytes") / max(self._gauge("pool_blocks"), 1)


def extents_of(dtype: str) -> list[bytes]:
    """Extents of a MiB, of an engine with KV of that type: ``bfloat16`` or ``float32``. Takes a minute."""
    with tempfile.TemporaryDirectory(prefix="kv-codecs-") as path:
        made: Any = partial(_Engine, dtype, path)
        with EngineProcess(made, "codecs", variables=_ENVIRONMENT, fork_from=[IMPORTS]) as engine:
            engine.run(_Engine.write)
        [slab] = Path(path).rglob("slab")
        content = slab.read_bytes()
    pieces = [content[at : at + _EXTENT_BYTES] for at in range(0, len(content), _EXTENT_BYTES)]
    return [each for each in pieces if len(each) == _EXTENT_BYTES and each.strip(b"\0")]
