"""Folders of models that nobody computes with: what vLLM reads of them."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 4_194_304,
    "torch_dtype": "float32",
}
_MTP_MODEL = _MODEL | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "moe_intermediate_size": 48,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 4,
}


@functools.cache
def folder_of(num_kv_heads: int, has_mtp: bool) -> str:
    """Of a model with so many KV heads; ``has_mtp``: and with drafting modules. It goes with this process."""
    folder = tempfile.mkdtemp(prefix="kv-offload-virtual-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = (_MTP_MODEL if has_mtp else _MODEL) | {"num_key_value_heads": num_kv_heads}
    (Path(folder) / "config.json").write_text(json.dumps(model))
    return folder
