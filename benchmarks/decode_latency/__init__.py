"""Parts of the decode-latency benchmark; `benchmarks.decode_latency` runs them."""
