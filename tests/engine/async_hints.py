"""A real ``AsyncLLM`` with our connector, asked with hints from everywhere. Prints what it saw as JSON.

Run as ``python -m tests.engine.async_hints``, with the environment that engines need.
"""

import asyncio
import json
import os
import sys
from typing import Any

from offload.testing.engines.environment import ENVIRONMENT, transfer_config
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE, Prompt, prompt_of
from tests.engine.engine import MAX_MODEL_LEN, SHORT, model_directory

POOL_BLOCKS = 40
DOCUMENT = 10  # blocks; the share of the pool that hints protect has as many


class Asked:
    """The engine and what is asked of it."""

    def __init__(self) -> None:
        """Start it: a pool of 4 documents."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        extra = {
            "cpu_gib": POOL_BLOCKS * BLOCK_BYTES / 2**30,
            "eviction_policy": "lru",
            **ALL_RESTORED,
            "store_decode_blocks": False,
        }
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                str(model_directory()),
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=49,
                gpu_memory_utilization=0.2,
                max_model_len=MAX_MODEL_LEN,
                kv_transfer_config=transfer_config(extra),
            )
        )
        self._num_asked = 0

    async def ask(self, prompt: Prompt, *, kv_hints: Any = None, **extra_args: Any) -> int:
        """Ask one; returns how many of its tokens came from a cache."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra_args or None
        )
        self._num_asked += 1
        outputs = self._llm.generate(
            {"prompt_token_ids": prompt}, sampling, f"r{self._num_asked}", kv_hints=kv_hints
        )
        async for output in outputs:
            last = output
        return int(last.num_cached_tokens or 0)

    async def reset(self, *, connector: bool) -> None:
        """Forget the GPU's prefix cache, and the pool if ``connector``, once nothing is in flight."""
        for _ in range(1000):
            await self.ask(SHORT)
            if await self._llm.reset_prefix_cache(reset_connector=connector):
                return
        raise TimeoutError("GPU blocks are still held")

    async def blocks_left(self, **said: Any) -> list[int]:
        """Blocks that the pool still has of two documents after four others; ``said`` about the first."""
        await self.reset(connector=True)
        documents = [prompt_of(DOCUMENT * BLOCK_SIZE + 1, seed=number) for number in range(6)]
        for number, document in enumerate(documents):
            await self.ask(document, **(said if number == 0 else {}))
            await self.reset(connector=False)
        left = []
        for document in documents[:2]:
            left.append(await self.ask(document, cpu_offload_store=0) // BLOCK_SIZE)
            await self.reset(connector=False)
        return left

    def close(self) -> None:
        """Stop it."""
        self._llm.shutdown()


async def main() -> dict[str, list[int]]:
    """By what was said: blocks left of the document it was said about, and of the one after it."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    def envelope(kind: str, **payload: Any) -> KvHintsEnvelope:
        return KvHintsEnvelope("0.1", "m", [KvHintAction("a", kind, "1.0", payload)])

    asked = Asked()
    try:
        return {
            "nothing": await asked.blocks_left(),
            "kv.pin": await asked.blocks_left(kv_hints=envelope("kv.pin", ttl_seconds=3600)),
            "kv.retain": await asked.blocks_left(
                kv_hints=envelope("kv.retain", priority="high", ttl_seconds=3600)
            ),
            "kv.fetch": await asked.blocks_left(kv_hints=envelope("kv.fetch", block_hashes=[1])),
            "vllm_xargs": await asked.blocks_left(cpu_offload_pin_seconds=3600),
            "overwritten": await asked.blocks_left(
                cpu_offload_priority="high", kv_transfer_params={"do_remote_decode": False}
            ),
            "params first": await asked.blocks_left(
                kv_hints=envelope("kv.retain", priority="high"),
                kv_transfer_params={"cpu_offload_priority": "normal"},
            ),
            "max_offload_tokens": await asked.blocks_left(
                cpu_offload_pin_seconds=3600, kv_transfer_params={"max_offload_tokens": 3 * BLOCK_SIZE + 5}
            ),
        }
    finally:
        asked.close()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    json.dump(asyncio.run(main()), sys.stdout)
