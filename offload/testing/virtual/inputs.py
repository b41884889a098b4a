"""What a request's KV depends on besides its token ids, as the virtual model sees it."""

from collections.abc import Mapping
from typing import NamedTuple

from vllm.v1.request import Request

from offload.testing.virtual.tags import TagChain, fold, salted_root


class Inputs(NamedTuple):
    """Requests that differ in one of these must never share KV from where they differ.

    Attributes:
        salt: the cache salt.
        adapter: name and path of the LoRA adapter, and its id; None for the base model.
        items: by position, what a multimodal item or a prompt embedding puts there instead of a token.
    """

    salt: str | None = None
    adapter: tuple[str, str, int] | None = None
    items: dict[int, int] = {}  # noqa: RUF012 (never changed)

    @classmethod
    def of(cls, request: Request) -> "Inputs":
        """Those of a request as vLLM has it."""
        items = {}
        for feature in request.mm_features:
            where = feature.mm_position
            for index in range(where.length):
                items[where.offset + index] = fold(index, feature.identifier.encode())
        if request.prompt_embeds is not None:
            for position, row in enumerate(request.prompt_embeds.numpy()):
                items[position] = fold(1, row.tobytes())
        lora = request.lora_request
        adapter = lora and (lora.lora_name, lora.lora_path, lora.lora_int_id)
        return cls(request.cache_salt, adapter, items)

    def chain(self) -> TagChain:
        """The tags of a request with these, before its first token."""
        root = salted_root(self.salt)
        if self.adapter is not None:
            root = fold(root, repr(self.adapter[:2]).encode())
        return TagChain(root, self.items)


def generation_of(inputs: Inputs, adapters: Mapping[int, int]) -> int:
    """What to add to the generation of the weights; ``adapters``: how often each was loaded again, by id."""
    return adapters.get(inputs.adapter[2], 0) << 32 if inputs.adapter else 0
