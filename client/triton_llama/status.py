"""The state of a server and its model, and how each instance of the model computes.

The protocols' JSON differs: gRPC's has 64-bit numbers as text, and omits values that are zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

from triton_llama.address import ServerAddress
from triton_llama.errors import ServerError
from triton_llama.metrics_page import read_samples


@dataclass(frozen=True)
class ModelConfig:
    """The live configuration of the model."""

    backend: str
    max_batch_size: int
    dynamic_batching: bool
    """False: requests are executed one by one."""
    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_microseconds: int
    """How long the batcher delays a smaller batch."""
    decoupled: bool
    """True: several responses per request (streaming)."""
    parameters: Mapping[str, str]
    """The settings written in the config (`quantization`, `scheduling`, ...)."""


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server that answered, and the client's versions."""

    url: str
    live: bool
    ready: bool
    server: str
    server_version: str
    model: str
    model_ready: bool
    config: ModelConfig | None
    """None while the model isn't ready."""
    client_version: str
    tritonclient_version: str


def read_status(
    server: ServerAddress,
    model: str,
    live: bool,
    ready: bool,
    metadata: Mapping[str, Any],
    config: Mapping[str, Any] | None,
) -> ServerStatus:
    """Put the answers to the five questions together. config: None if the model isn't ready.

    Raises:
        ServerError: they aren't Triton's.
    """
    return ServerStatus(
        url=str(server),
        live=live,
        ready=ready,
        server=str(metadata.get("name", "")),
        server_version=str(metadata.get("version", "")),
        model=model,
        model_ready=config is not None,
        config=None if config is None else read_config(config),
        client_version=version("triton-llama"),
        tritonclient_version=version("tritonclient"),
    )


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Decode Triton's model configuration, in its JSON form.

    Raises:
        ServerError: it isn't Triton's.
    """
    try:
        batcher = config.get("dynamic_batching") or {}
        parameters = config.get("parameters") or {}
        return ModelConfig(
            backend=str(config.get("backend", "")),
            max_batch_size=int(config.get("max_batch_size", 0)),
            dynamic_batching=config.get("dynamic_batching") is not None,
            preferred_batch_sizes=tuple(int(size) for size in batcher.get("preferred_batch_size", [])),
            max_queue_delay_microseconds=int(batcher.get("max_queue_delay_microseconds", 0)),
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled", False)),
            parameters={name: str(parameters[name].get("string_value", "")) for name in sorted(parameters)},
        )
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ServerError(f"the server's configuration is not Triton's: {error}") from error


class InstanceInfo(NamedTuple):
    """An instance of the model, from the labels of the metric `llama_model_info`.

    computation: the product of the linear layers, and whether it is batch-invariant.
    """

    instance: str
    computation: str
    kv_cache_dtype: str
    device: str


class CacheInfo(NamedTuple):
    """The KV cache of all instances.

    pages: their number. used: pages that sequences hold. cached: pages that only hold a prefix. hit_ratio: share of the
    prompt tokens found in the prefix cache since the start; None if none was looked up.
    """

    pages: int
    used: int
    cached: int
    hit_ratio: float | None


class ModelInfo(NamedTuple):
    """How a model computes.

    instances: at least one. outlier_shares: share of the activations with two 8-bit terms since the start, by linear
    layer with exact INT8 products; of all instances. cache: None if the server has no metrics of it. drafts: numbers of
    right and of all guessed tokens since the start, by source.
    """

    instances: list[InstanceInfo]
    outlier_shares: dict[str, float]
    cache: CacheInfo | None = None
    drafts: Mapping[str, tuple[int, int]] = MappingProxyType({})


def read_model_info(address: str, model: str) -> ModelInfo:
    """Return how a model computes. address: host:port of the metrics.

    Raises:
        NoMetricsError: the page doesn't answer, or has no such model.
    """
    samples = read_samples(address, model)
    instances = [
        InstanceInfo(labels["model_instance"], labels["computation"], labels["kv_cache_dtype"], labels["device"])
        for name, labels, _ in samples
        if name == "llama_model_info"
    ]
    counts = defaultdict[tuple[str, str], float](float)
    for name, labels, value in samples:
        # A model may have several loaded versions.
        counts[name, labels.get("linear") or labels.get("state") or labels.get("source", "")] += value
    shares = {
        linear: counts.get(("llama_int8_outlier_columns_total", linear), 0.0) / columns
        for (name, linear), columns in counts.items()
        if name == "llama_int8_columns_total" and columns
    }
    drafts = {
        source: (int(counts.get(("llama_accepted_draft_tokens_total", source), 0)), int(drafted))
        for (name, source), drafted in counts.items()
        if name == "llama_draft_tokens_total" and drafted
    }
    return ModelInfo(instances, shares, _cache_info(counts), drafts)


def _cache_info(counts: Mapping[tuple[str, str], float]) -> CacheInfo | None:
    pages = {state: int(count) for (name, state), count in counts.items() if name == "llama_kv_cache_pages"}
    if not pages:
        return None
    queries = counts.get(("llama_prefix_cache_queries_total", ""), 0.0)
    hit_ratio = counts.get(("llama_prefix_cache_hits_total", ""), 0.0) / queries if queries else None
    return CacheInfo(sum(pages.values()), pages.get("used", 0), pages.get("cached", 0), hit_ratio)


def status_lines(state: ServerStatus, info: ModelInfo, reason: str | None) -> Iterator[str]:
    """Yield the lines of `status`; reason: why the info is unknown."""
    server = f"{state.server} {state.server_version} at {state.url}"
    yield f"server      {server}: {'live' if state.live else 'not live'}, {'ready' if state.ready else 'not ready'}"
    yield f"model       {state.model}: {'ready' if state.model_ready else 'not ready'}"
    for instance in info.instances:
        name = f" ({instance.instance})" if len(info.instances) > 1 else ""
        yield f"computes    {instance.computation}; KV cache {instance.kv_cache_dtype}; on {instance.device}{name}"
    if info.outlier_shares:
        shares = ", ".join(f"{linear} {share:.1%}" for linear, share in info.outlier_shares.items())
        yield f"outliers    columns with two terms: {shares}"
    if (cache := info.cache) is not None:
        hits = "" if cache.hit_ratio is None else f"; {cache.hit_ratio:.1%} of prompt tokens were cached"
        yield f"KV cache    {cache.used} of {cache.pages} pages used, {cache.cached} hold cached prefixes{hits}"
    if info.drafts:
        shares = ", ".join(f"{source} {right} of {guessed}" for source, (right, guessed) in info.drafts.items())
        yield f"drafts      right guesses: {shares}"
    if reason:
        yield f"computes    unknown: {reason}"
    if (config := state.config) is not None:
        preferred = " ".join(map(str, config.preferred_batch_sizes)) or "none"
        delay = config.max_queue_delay_microseconds / 1000
        batching = f"preferred {preferred}, delay {delay:g} ms" if config.dynamic_batching else "no dynamic batching"
        yield f"batching    at most {config.max_batch_size}, {batching}"
        yield f"responses   {'several to a request (decoupled)' if config.decoupled else 'one to a request'}"
        for name, value in config.parameters.items():
            yield f"parameter   {name} = {value} (the config file's; LLAMA_* may override it)"
    yield f"versions    triton-llama {state.client_version}, tritonclient {state.tritonclient_version}"
