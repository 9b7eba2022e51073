"""The metrics: names, kinds, units and descriptions. A `Registry` exposes them on Triton's metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from llama_engine.kernels.activation_terms import LINEAR_LAYERS


@dataclass(frozen=True)
class Metric:
    """One metric.

    help: description on the metrics endpoint. buckets: upper bounds of a histogram. label, values: name of the label
    that distinguishes the series, and all of its values; empty for a single series. info: names of the labels whose
    values are set once, when the model is loaded.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    values: tuple[str, ...] = ("",)
    info: tuple[str, ...] = ()


# Buckets of time to first token, latency and queue time.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0)
_POWERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

REASONS = ("stop", "length", "cancelled", "unavailable", "invalid", "error")

REQUESTS = Metric(
    "llama_requests_total",
    "counter",
    "Finished sequences by reason: stop, length, cancelled (by the client, or it has disconnected), unavailable "
    "(deadline over or server stopping), invalid (a refused request, counted once, or a sequence whose masks or guide "
    "leave no token), error (decoding failed).",
    label="finish_reason",
    values=REASONS,
)
PROMPT_TOKENS = Metric(
    "llama_prompt_tokens_total",
    "counter",
    "Prompt tokens of sequences that got a slot, without cached ones.",
)
GENERATED_TOKENS = Metric(
    "llama_generated_tokens_total", "counter", "Generated tokens, including those of aborted sequences."
)
STEP_ERRORS = Metric(
    "llama_step_errors_total",
    "counter",
    "Failed computations, including retries on fewer sequences and failures outside of a step.",
)
STEPS = Metric("llama_steps_total", "counter", "Steps of the decode loop.")
TIME_TO_FIRST_TOKEN = Metric(
    "llama_time_to_first_token_seconds",
    "histogram",
    "From the sequence's arrival in the model (after Triton's queue) to its first token.",
    _SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    "llama_inter_token_latency_seconds",
    "histogram",
    "Between two tokens of decoding sequences, one observation per step, because it is the same for all of a step. "
    "With drafts it is between two steps, each of which may give several tokens.",
    _STEP_SECONDS,
)
LATENCY = Metric(
    "llama_request_latency_seconds",
    "histogram",
    "From the sequence's arrival in the model to its last token, for completed sequences.",
    _SECONDS,
)
QUEUE_TIME = Metric(
    "llama_queue_time_seconds",
    "histogram",
    "From the sequence's arrival in the model to its slot. Triton's own queue is nv_inference_queue_duration_us.",
    _SECONDS,
)
STEP_SEQUENCES = Metric("llama_step_sequences", "histogram", "Sequences that got a token in a step.", _POWERS)
STEP_PREFILL_TOKENS = Metric(
    "llama_step_prefill_tokens",
    "histogram",
    "Prompt tokens prefilled in a step, for steps with a prefill.",
    (*_POWERS, 2048.0, 4096.0, 8192.0),
)
INT8_COLUMNS = Metric(
    "llama_int8_columns_total",
    "counter",
    "Columns of activations (tokens times inputs) multiplied by the compiled kernels' INT8 weights, by linear layer, "
    "summed over all decoder layers.",
    label="linear",
    values=LINEAR_LAYERS,
)
INT8_OUTLIER_COLUMNS = Metric(
    "llama_int8_outlier_columns_total",
    "counter",
    "Columns of llama_int8_columns_total with two 8-bit terms; under int8_terms auto, four adjacent ones that have an "
    "outlier.",
    label="linear",
    values=LINEAR_LAYERS,
)
INT8_PRODUCTS = Metric(
    "llama_int8_products_total",
    "counter",
    "Products of a weight and an 8-bit term, by linear layer: columns times outputs, twice for columns with two terms "
    "(on AVX2 both are one 16-bit product).",
    label="linear",
    values=LINEAR_LAYERS,
)
DRAFT_SOURCES = ("guide", "prediction", "text", "finished")
DRAFT_TOKENS = Metric(
    "llama_draft_tokens_total",
    "counter",
    "Guessed tokens that steps computed, by source: guide (what it forces), prediction (the client's), text (what the "
    "prompt or the output repeats), finished (what a finished sequence of the salt had).",
    label="source",
    values=DRAFT_SOURCES,
)
ACCEPTED_DRAFT_TOKENS = Metric(
    "llama_accepted_draft_tokens_total",
    "counter",
    "Tokens of llama_draft_tokens_total that were the sequence's next ones.",
    label="source",
    values=DRAFT_SOURCES,
)
PAGE_STATES = ("used", "cached", "free")
"""States of a page: used are those that `PagePool` calls held, cached its idle ones."""
KV_CACHE_PAGES = Metric(
    "llama_kv_cache_pages",
    "gauge",
    "Pages of the KV cache by state: used (held by sequences that have a slot), cached (a prefix that no sequence "
    "uses; evicted when no page is free), free.",
    label="state",
    values=PAGE_STATES,
)
KV_CACHE_USAGE = Metric(
    "llama_kv_cache_usage_ratio",
    "gauge",
    "Used pages of the KV cache by all pages, 0 to 1: the Gateway API inference extension's KV cache utilization, as "
    "vllm:kv_cache_usage_perc.",
)
PREFIX_QUERIES = Metric(
    "llama_prefix_cache_queries_total",
    "counter",
    "Prompt tokens looked up in the prefix cache, once for each sequence.",
)
PREFIX_HITS = Metric(
    "llama_prefix_cache_hits_total", "counter", "Prompt tokens of llama_prefix_cache_queries_total that were found."
)
EVICTIONS = Metric("llama_kv_cache_evictions_total", "counter", "Cached pages that gave way to a sequence's new page.")
DROPPED_KV_EVENTS = Metric(
    "llama_kv_events_dropped_total",
    "counter",
    "Events (kv_events) that were dropped because too many waited; subscribers then take the KV cache to be empty.",
)
PREEMPTIONS = Metric(
    "llama_preemptions_total",
    "counter",
    "How often a sequence has lost its pages to others, with none free or cached; it waits and continues later.",
)
SLOTS = Metric("llama_slots", "gauge", "Sequences that can be decoded together.")
SLOTS_IN_USE = Metric("llama_slots_in_use", "gauge", "Sequences that have a slot.")
WAITING = Metric("llama_waiting_requests", "gauge", "Sequences in the model that have no slot yet.")
QUEUE_LIMIT = Metric(
    "llama_queue_limit_requests",
    "gauge",
    "Capacity of Triton's queue in requests (max_queue_size of the config); 0 is no limit.",
)
LAST_STEP = Metric(
    "llama_last_step_timestamp_seconds",
    "gauge",
    "End of the last successful step, in seconds since 1970; after a failure only a step that yields a token counts. "
    "Its age is time() - llama_last_step_timestamp_seconds.",
)
LOADED_ADAPTERS = Metric("llama_loaded_adapters", "gauge", "LoRA adapters that requests can name.")
MODEL_INFO = Metric(
    "llama_model_info",
    "gauge",
    "Always 1. Its labels say how the model computes: computation (of linear layers, and whether it is "
    "batch-invariant), kv_cache_dtype, device.",
    info=("computation", "kv_cache_dtype", "device"),
)

METRICS = (
    REQUESTS, PROMPT_TOKENS, GENERATED_TOKENS, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, LATENCY, QUEUE_TIME,
    STEP_SEQUENCES, STEP_PREFILL_TOKENS, SLOTS, SLOTS_IN_USE, WAITING, QUEUE_LIMIT, KV_CACHE_PAGES, KV_CACHE_USAGE,
    PREFIX_QUERIES, PREFIX_HITS, EVICTIONS, DROPPED_KV_EVENTS, PREEMPTIONS, STEPS, STEP_ERRORS,
    LAST_STEP, DRAFT_TOKENS, ACCEPTED_DRAFT_TOKENS, INT8_COLUMNS, INT8_OUTLIER_COLUMNS, INT8_PRODUCTS,
    LOADED_ADAPTERS, MODEL_INFO,
)  # fmt: skip


class Registry(Protocol):
    """Stores and exposes the metrics."""

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        """Increase a counter. value: the value of the metric's label, which selects the series."""

    def set(self, metric: Metric, amount: float, value: str = "") -> None:
        """Set a gauge to `amount`. value: the value of the metric's label, which selects the series."""

    def observe(self, metric: Metric, amount: float) -> None:
        """Observe a value in a histogram."""

    def close(self) -> None:
        """Freeze the metrics at their current values. No other method is called afterwards."""
