"""What /metrics shows, in the Prometheus form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 90)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class Metrics:
    """The server's own counters; the gauges of the cache are set by whoever knows them."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.running = Gauge("arkbench_requests_running", "requests that have their first token", registry=registry)
        self.waiting = Gauge("arkbench_requests_waiting", "requests without a first token yet", registry=registry)
        self.cache_tokens = Gauge("arkbench_cache_tokens_used", "tokens of requests in flight", registry=registry)
        self.cache_room = Gauge("arkbench_cache_tokens", "room of the cache in tokens", registry=registry)
        self.pages = Gauge("arkbench_pages_used", "pages of the cache that are taken", registry=registry)
        self.requests = Counter("arkbench_requests", "requests by how they ended", ["outcome"], registry=registry)
        self.prompt_tokens = Counter("arkbench_prompt_tokens", "prompt tokens answered", registry=registry)
        self.cached_tokens = Counter("arkbench_cached_tokens", "prompt tokens not computed again", registry=registry)
        self.output_tokens = Counter("arkbench_output_tokens", "tokens generated", registry=registry)
        self.ttft = Histogram("arkbench_ttft_seconds", "time to first token", buckets=_TTFT, registry=registry)
        self.itl = Histogram("arkbench_itl_seconds", "time between tokens, by piece", buckets=_ITL, registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
