"""Requests of chance to the proxy, over engines that misbehave; see ``python -m tests.proxy_soak --help``."""
