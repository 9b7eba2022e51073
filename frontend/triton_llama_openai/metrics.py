"""The endpoint's Prometheus metrics (docs/openai.md lists them)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One endpoint's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "llama_openai_requests",
            "Requests answered, by route and code; code 499: the client has left before, or has not read its stream.",
            ("route", "code"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "llama_openai_request_seconds",
            "From a request's arrival to the end of its answer, by route.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "llama_openai_time_to_first_token_seconds",
            "From a streamed request's arrival to its first text, by route.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "llama_openai_tokens", "Tokens of prompts and completions, by kind.", ("kind",), registry=self._registry
        )
        self.resumptions = Counter(
            "llama_openai_resumptions",
            "Losses of a request's Triton, or of all of them, by outcome: resumed at once, waited for a Triton, or "
            "given_up.",
            ("outcome",),
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "llama_openai_requests_in_flight", "Requests that run, scrapes apart.", registry=self._registry
        )

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return bytes(generate_latest(self._registry))
