"""How much smaller lossless codecs make KV, and how fast."""
