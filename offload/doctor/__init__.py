"""``kv-offload doctor``: what is wrong with engines that run, and what to do."""
