"""How each instance of a model computes, from the metric `llama_model_info` on Triton's metrics page."""

from __future__ import annotations

from typing import NamedTuple

from triton_llama.endpoint import DEFAULT_PORT, Endpoint
from triton_llama.health import METRICS_PORT, METRICS_SECONDS, Address, NoAnswerError, exchange, series

MODEL_INFO = "llama_model_info"


class InstanceInfo(NamedTuple):
    """computation: of linear layers, and on what else than its request a row's bits depend, if on anything."""

    instance: str
    computation: str
    kv_cache_dtype: str
    device: str


def metrics_address(endpoint: Endpoint) -> Address:
    """Return Triton's default address for metrics: the same host, as far above the endpoint's port as by default."""
    return Address(endpoint.host, endpoint.port + METRICS_PORT - DEFAULT_PORT[endpoint.protocol])


def read_model_info(page: Address, model: str) -> list[InstanceInfo]:
    """Return the instances of a model, at least one.

    Raises:
        NoAnswerError: the page doesn't answer, or has no such model.
    """
    response = exchange(page, "GET", "/metrics", METRICS_SECONDS)
    found = [
        InstanceInfo(labels["model_instance"], labels["computation"], labels["kv_cache_dtype"], labels["device"])
        for _, labels, metric, _ in series(response.body, model)
        if metric == MODEL_INFO and labels.keys() >= {"model_instance", *InstanceInfo._fields[1:]}
    ]
    if response.status != 200 or not found:
        raise NoAnswerError(f"{page} has no {MODEL_INFO} of the model {model}")
    return found
