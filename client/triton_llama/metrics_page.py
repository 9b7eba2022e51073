"""Triton's metrics page, in Prometheus' text format: the samples of one model."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from triton_llama.address import DEFAULT_PORTS, ServerAddress

METRICS_PORT = 8002
_TIMEOUT_S = 2.0
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    """A value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class NoMetricsError(Exception):
    """The metrics page doesn't answer, or has no such model; the message is one line."""


def metrics_address(server: ServerAddress) -> str:
    """Return Triton's default address for metrics: the same host, as far above the server's port as by default."""
    return replace(server, port=server.port + METRICS_PORT - DEFAULT_PORTS[server.protocol]).authority


def read_samples(address: str, model: str, timeout: float = _TIMEOUT_S) -> list[Sample]:
    """Return a model's samples, `llama_model_info` among them. address: HOST:PORT of the metrics. timeout: seconds.

    Raises:
        NoMetricsError: the page doesn't answer, or has no such model.
    """
    try:
        # Not urllib, which would use the environment's proxies.
        with closing(HTTPConnection(address, timeout=timeout)) as connection:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            page = response.read().decode()
        series = [(name, dict(_LABEL.findall(labels)), value) for name, labels, value in _SAMPLE.findall(page)]
        samples = [Sample(name, labels, float(value)) for name, labels, value in series if labels.get("model") == model]
    except (OSError, HTTPException, ValueError) as error:
        raise NoMetricsError(f"{address} has no metrics: {error}") from error
    if response.status != HTTPStatus.OK:
        raise NoMetricsError(f"{address} answers /metrics with HTTP {response.status}")
    if not any(sample.name == "llama_model_info" for sample in samples):
        raise NoMetricsError(f"{address} has no llama_model_info of the model {model}")
    return samples
