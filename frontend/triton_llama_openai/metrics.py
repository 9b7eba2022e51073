"""The endpoint's Prometheus metrics (docs/openai.md lists them)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineLoad(NamedTuple):
    """What a model's engine has to do.

    waiting: requests without a slot, those in Triton's queue included. running: sequences with one. used_pages: of the
    KV cache's pages, those that sequences hold. page_size: tokens in a page.
    """

    waiting: int
    running: int
    used_pages: int
    pages: int
    page_size: int


class _EngineGauges(Collector):
    """vLLM's gauges under vLLM's names, which routers read."""

    def __init__(self, loads: Callable[[], Mapping[str, EngineLoad]]) -> None:
        self._loads = loads

    def describe(self) -> list[GaugeMetricFamily]:
        return self._families({})

    def collect(self) -> list[GaugeMetricFamily]:
        return self._families(self._loads())

    def _families(self, loads: Mapping[str, EngineLoad]) -> list[GaugeMetricFamily]:
        name = "model_name"
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Requests without a slot, by model_name.", labels=[name]
        )
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences with a slot, by model_name.", labels=[name])
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Used pages of the KV cache by all pages, 0 to 1, by model_name.", labels=[name]
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1. Its labels are model_name, block_size (tokens in a page) and num_gpu_blocks (pages).",
            labels=[name, "block_size", "num_gpu_blocks"],
        )
        for model, load in loads.items():
            waiting.add_metric([model], load.waiting)
            running.add_metric([model], load.running)
            usage.add_metric([model], load.used_pages / max(load.pages, 1))
            info.add_metric([model, str(load.page_size), str(load.pages)], 1)
        return [waiting, running, usage, info]


class LoraUse(NamedTuple):
    """Adapters: the number that is loaded, and the names of those with requests, before and after the first token."""

    loaded: int = 0
    waiting: Sequence[str] = ()
    running: Sequence[str] = ()


class _LoraGauge(Collector):
    """vLLM's gauge of adapters, by which the Gateway API's picker finds an endpoint that runs one."""

    def __init__(self, use: Callable[[], LoraUse]) -> None:
        self._use = use

    def describe(self) -> list[GaugeMetricFamily]:
        return [self._family()]

    def collect(self) -> list[GaugeMetricFamily]:
        family, use = self._family(), self._use()
        if use.loaded:
            family.add_metric([str(use.loaded), ",".join(use.running), ",".join(use.waiting)], time.time())
        return [family]

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of the scrape. Its labels are max_lora (loaded adapters, which all run at once), "
            "running_lora_adapters and waiting_lora_adapters: those of this endpoint's requests with and without a "
            "token, with commas between. Absent without adapters.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )


class Metrics:
    """One endpoint's metrics, in a registry of their own. loads: returns those known now, by the model's name."""

    def __init__(
        self, loads: Callable[[], Mapping[str, EngineLoad]] = dict, lora_use: Callable[[], LoraUse] = LoraUse
    ) -> None:
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
            "Interruptions of requests whose Triton was lost, by outcome: resumed or given_up.",
            ("outcome",),
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "llama_openai_requests_in_flight", "Requests that run, scrapes apart.", registry=self._registry
        )

        self._registry.register(_EngineGauges(loads))
        self._registry.register(_LoraGauge(lora_use))

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return bytes(generate_latest(self._registry))
