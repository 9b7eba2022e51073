"""The endpoint's Prometheus metrics (docs/openai.md lists them)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triton_llama_openai.triton_load import TritonLoad

CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


Loads = Mapping[str, Mapping[int, TritonLoad]]
"""By the model's name and the number of its Triton in the setting `triton_metrics`; without those that aren't known."""

_GAUGES: Mapping[str, tuple[str, Callable[[TritonLoad], float]]] = {
    "vllm:num_requests_waiting": ("Requests without a slot, by model_name.", lambda load: load.waiting),
    "vllm:num_requests_running": ("Sequences with a slot, by model_name.", lambda load: load.running),
    "vllm:kv_cache_usage_perc": (
        "Used pages of the KV cache by all pages, 0 to 1, by model_name.",
        lambda load: load.used_pages / max(load.pages, 1),
    ),
    "llama_openai_slots": ("Sequences that can run at once, by model_name.", lambda load: load.slots),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[TritonLoad], float]]] = {
    "vllm:generation_tokens": ("Generated tokens", lambda load: load.generated),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda load: load.queried),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda load: load.hit),
    "vllm:spec_decode_num_draft_tokens": ("Guessed tokens that steps computed", lambda load: load.guessed),
    "vllm:spec_decode_num_accepted_tokens": ("Guessed tokens that were the next ones", lambda load: load.accepted),
}
_BY_TRITON = "by model_name and engine, the number of the Triton in triton_metrics."


class _LoadMetrics(Collector):
    """The load of every Triton, under vLLM's names, which routers read. Gauges are sums over a model's Tritons."""

    def __init__(self, loads: Callable[[], Loads]) -> None:
        self._loads = loads

    def collect(self) -> list[Metric]:
        loads, name = self._loads(), "model_name"
        totals = {model: _total(list(tritons.values())) for model, tritons in loads.items()}
        families: list[Metric] = []
        for metric, (meaning, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(metric, meaning, labels=[name])
            for model, load in totals.items():
                gauge.add_metric([model], value(load))
            families.append(gauge)
        pages = GaugeMetricFamily(
            "llama_openai_kv_cache_pages",
            "Pages of the KV cache, by model_name and state: used, cached (a prefix that no sequence uses) or free.",
            labels=[name, "state"],
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1. Its labels are model_name, block_size (tokens in a page) and num_gpu_blocks (pages).",
            labels=[name, "block_size", "num_gpu_blocks"],
        )
        for model, load in totals.items():
            pages.add_metric([model, "used"], load.used_pages)
            pages.add_metric([model, "cached"], load.cached_pages)
            pages.add_metric([model, "free"], load.pages - load.used_pages - load.cached_pages)
            info.add_metric([model, str(load.page_size), str(load.pages)], 1)
        families += [pages, info]
        for metric, (meaning, value) in _COUNTERS.items():
            counter = CounterMetricFamily(metric, f"{meaning}, {_BY_TRITON}", labels=[name, "engine"])
            for model, tritons in loads.items():
                for number, load in tritons.items():
                    counter.add_metric([model, str(number)], value(load))
            families.append(counter)
        return families


def _total(loads: Sequence[TritonLoad]) -> TritonLoad:
    """Return the sum of a model's loads, at least one."""
    return TritonLoad(*map(sum, zip(*loads, strict=True)))._replace(page_size=loads[0].page_size)


class LoraUse(NamedTuple):
    """Adapters: the number that is loaded, and the names of those with requests, before and after the first token."""

    loaded: int = 0
    waiting: Sequence[str] = ()
    running: Sequence[str] = ()


class _LoraGauge(Collector):
    """vLLM's gauge of adapters, by which the Gateway API's picker finds an endpoint that runs one."""

    def __init__(self, use: Callable[[], LoraUse]) -> None:
        self._use = use

    def collect(self) -> list[Metric]:
        use = self._use()
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of the scrape. Its labels are max_lora (loaded adapters, which all run at once), "
            "running_lora_adapters and waiting_lora_adapters: those of this endpoint's requests with and without a "
            "token, with commas between. Absent without adapters.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        if use.loaded:
            family.add_metric([str(use.loaded), ",".join(use.running), ",".join(use.waiting)], time.time())
        return [family]


class Metrics:
    """One endpoint's metrics, in a registry of their own. loads: returns those known now."""

    def __init__(self, loads: Callable[[], Loads] = dict, lora_use: Callable[[], LoraUse] = LoraUse) -> None:
        self._registry = CollectorRegistry()
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
        self._registry.register(_LoadMetrics(loads))
        self._registry.register(_LoraGauge(lora_use))

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return bytes(generate_latest(self._registry))
