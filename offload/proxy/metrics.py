"""What the proxy counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from offload.proxy.members import Members

__all__ = ["ProxyMetrics"]

MOST_REASONS = 32
"""That are told apart: an engine's words become labels."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ProxyMetrics:
    """Counters of one proxy, in a registry of their own. Labels have few values: none comes from a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests by their end", "path", "outcome")
        self.legs = self._counter("legs", "requests to engines by their end", "role", "outcome")
        self.alone = self._counter("decoded_alone", "requests without a prefill leg, and why", "reason")
        self.failovers = self._counter("failovers", "decode legs that another engine took over", "stage")
        self.continued = self._counter(
            "continuations", "answers that went on after their first byte", "outcome"
        )
        self.ejections = self._counter("ejections", "engines that are left alone for a while", "engine")
        self.stripped = self._counter("stripped_keys", "keys that clients may not send")
        self.strangers = self._counter(
            "unknown_peers", "hand-offs that a decode engine could not use", "reason"
        )
        self._refused = self._counter("refused_hand_offs", "hand-offs that prefill engines refuse", "reason")
        self._reasons: set[str] = set()
        self.fallbacks = self._counter("policy_fallbacks", "requests whose policy made no choice", "reason")
        self.tokenized = self._counter("tokenized", "prompts that the policy wanted token ids of", "outcome")
        self.located = self._counter("located", "prompts that engines were asked about", "answers")
        self.kv_events = self._counter("kv_event_messages", "messages of engines' KV events", "outcome")
        self.first_byte = self._histogram("first_byte_seconds", "to the first byte of an answer", "path")
        self.seconds = self._histogram("request_seconds", "to the end of an answer", "path")
        self.waited = self._histogram("prefill_seconds", "of prefill legs", "outcome")
        self.running = Gauge("kv_offload_proxy_running", "requests now", registry=self.registry)
        self._engines = Gauge(
            "kv_offload_proxy_engine_legs",
            "decode legs now",
            ["engine", "role", "state"],
            registry=self.registry,
        )

    def refused_for(self, reason: str) -> str:
        """Count a hand-off that an engine refused. Returns its reason, or "other" behind ``MOST_REASONS``."""
        if reason not in self._reasons:
            if len(self._reasons) >= MOST_REASONS:
                reason = "other"
            else:
                self._reasons.add(reason)
        self._refused.labels(reason).inc()
        return reason

    def text(self, members: Members, now: float) -> bytes:
        """All of it, as Prometheus reads it."""
        self._engines.clear()
        for each in members:
            self._engines.labels(each.url, each.role, each.state(now)).set(len(each.legs))
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"kv_offload_proxy_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"kv_offload_proxy_{name}", what, labels, buckets=_SECONDS, registry=self.registry)
