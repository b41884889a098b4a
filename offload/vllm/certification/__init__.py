"""``kv-offload certify``: whether an untested vLLM behaves at the border as the tested ones do."""
