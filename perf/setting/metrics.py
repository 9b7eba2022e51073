"""A server's metrics endpoint as numbers by name.

Knows the text format, and nothing of what the numbers mean (docs/metrics.md does).
"""

from __future__ import annotations

import re
import urllib.request

from triton_local.repository import MODEL_NAME

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_OF_ANOTHER_MODEL = re.compile(rf'\bmodel="(?!{MODEL_NAME}")')
_TIMEOUT_S = 30.0


def read(metrics_url: str) -> dict[str, float]:
    """Return the server's and our model's series of the endpoint at host:port, by name, added up over their labels."""
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=_TIMEOUT_S) as response:
        return parse(response.read().decode())


def parse(text: str) -> dict[str, float]:
    """Return the same of the endpoint's text."""
    found: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        if not _OF_ANOTHER_MODEL.search(labels):
            found[name] = found.get(name, 0.0) + float(value)
    return found
