"""Reads a server's metrics endpoint: every series with its labels, or values by name. docs/metrics.md explains them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

from triton_local.repository import MODEL_NAME

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 30.0

Series = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name, and its labels with their values."""


def text(metrics_url: str) -> str:
    """Return the text of the endpoint at host:port. Raises OSError where there is none."""
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


def series(content: str) -> dict[Series, float]:
    """Return every series of the endpoint's text."""
    return {(name, frozenset(_LABEL.findall(labels))): float(value) for name, labels, value in _LINE.findall(content)}


def total(found: Mapping[Series, float], name: str, **labels: str) -> float:
    """Return the sum of a metric's series with these labels. Raises ValueError if there is none."""
    wanted = labels.items()
    values = [value for (one, its), value in found.items() if one == name and wanted <= dict(its).items()]
    if not values:
        raise ValueError(f"the metrics endpoint has no {name}{f' with {labels}' if labels else ''}")
    return sum(values)


def read(metrics_url: str) -> dict[str, float]:
    """Return the server's and our model's series of the endpoint at host:port, by name, summed over their labels."""
    found: dict[str, float] = {}
    for (name, labels), value in series(text(metrics_url)).items():
        if dict(labels).get("model", MODEL_NAME) == MODEL_NAME:
            found[name] = found.get(name, 0.0) + value
    return found
