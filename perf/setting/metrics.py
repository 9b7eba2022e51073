"""A server's metrics endpoint, read: every series with its labels, or numbers by name.

Knows the text format, and nothing of what the numbers mean (docs/metrics.md does).
"""

from __future__ import annotations

import re
import urllib.request

from triton_local.repository import MODEL_NAME

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 30.0

Series = tuple[str, frozenset[tuple[str, str]]]
"""The name of a metric, and the labels with their values."""


def text(metrics_url: str) -> str:
    """Return what the endpoint at host:port says, as it is. Raises OSError where there is none."""
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


def series(said: str) -> dict[Series, float]:
    """Return every series of the endpoint's text."""
    return {(name, frozenset(_LABEL.findall(labels))): float(value) for name, labels, value in _LINE.findall(said)}


def read(metrics_url: str) -> dict[str, float]:
    """Return the server's and our model's series of the endpoint at host:port, by name, added up over their labels."""
    return parse(text(metrics_url))


def parse(said: str) -> dict[str, float]:
    """Return the same of the endpoint's text."""
    found: dict[str, float] = {}
    for (name, labels), value in series(said).items():
        if dict(labels).get("model", MODEL_NAME) == MODEL_NAME:
            found[name] = found.get(name, 0.0) + value
    return found
