"""How each instance of a model computes, from the metric `llama_model_info` on Triton's metrics page."""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx

from triton_llama.endpoint import DEFAULT_PORT, Endpoint

METRICS_PORT = 8002
_TIMEOUT_S = 2.0
_SERIES = re.compile(r"^llama_model_info\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoModelInfoError(Exception):
    """The metrics page doesn't answer, or has no such model; the message is one line."""


class InstanceInfo(NamedTuple):
    """computation: of linear layers, and on what else than its request a row's bits depend, if on anything."""

    instance: str
    computation: str
    kv_cache_dtype: str
    device: str


def metrics_address(endpoint: Endpoint) -> str:
    """Return Triton's default address for metrics: the same host, as far above the endpoint's port as by default."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port + METRICS_PORT - DEFAULT_PORT[endpoint.protocol]}"


def read_model_info(address: str, model: str) -> list[InstanceInfo]:
    """Return the instances of a model, at least one. address: host:port of the metrics.

    Raises:
        NoModelInfoError: the page doesn't answer, or has no such model.
    """
    try:
        page = httpx.get(f"http://{address}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoModelInfoError(f"{address} has no metrics: {error}") from error
    every = [dict(_LABEL.findall(labels)) for labels in _SERIES.findall(page)]
    instances = [
        InstanceInfo(labels["model_instance"], labels["computation"], labels["kv_cache_dtype"], labels["device"])
        for labels in every
        if labels.get("model") == model and labels.keys() >= {"model_instance", *InstanceInfo._fields[1:]}
    ]
    if not instances:
        raise NoModelInfoError(f"{address} has no llama_model_info of the model {model}")
    return instances
