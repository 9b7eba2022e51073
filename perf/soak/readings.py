"""A server's metrics endpoint, read: every series with its labels, and the moment when all has been counted.

The model's metrics may be 0.2 s old, and are passed on one after another: counters, then levels, then histograms. So a
request that shows says that all was passed on which was passed on before it, and nothing of what comes along with it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf import metrics
from perf.metrics import Series

_ASK_TIMEOUT_S = 30.0
_POLL_S = 0.1

SETTLED_WITHIN_S = 120.0
"""After that long without a client nobody should have a slot any more, whatever was asked for."""

LEVELS = ("llama_slots_in_use", "llama_waiting_rows", "nv_inference_pending_request_count")
"""What is 0 when nobody is being served."""


@dataclass(frozen=True)
class Readings:
    """The values by name and labels."""

    series: Mapping[Series, float]

    @classmethod
    def parse(cls, text: str) -> Readings:
        """Read the endpoint's text."""
        return cls(metrics.series(text))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that have these labels. Raises ValueError where there is none."""
        wanted = labels.items()
        found = [value for (one, its), value in self.series.items() if one == name and wanted <= dict(its).items()]
        if not found:
            raise ValueError(f"the metrics endpoint has no {name}{f' with {labels}' if labels else ''}")
        return sum(found)

    def requests(self, finish_reason: str) -> float:
        """Return how many rows have ended so."""
        return self.total("llama_requests_total", finish_reason=finish_reason)

    @property
    def levels(self) -> dict[str, float]:
        """What is 0 when nobody is being served."""
        return {name: self.total(name) for name in LEVELS}


@dataclass(frozen=True)
class Settled:
    """readings: when all was counted. asked: bad requests that were sent to see that it was; each is invalid."""

    readings: Readings
    asked: int


def read(server: LocalTriton) -> Readings:
    """Read the endpoint now. Raises OSError where there is none any more."""
    return Readings.parse(metrics.text(server.metrics_url))


def settled(server: LocalTriton) -> Settled:
    """Wait until everything from before is counted and nobody is served any more, and return what the server says then.

    Returns after `SETTLED_WITHIN_S` whatever is the case: rows that never end are for the caller to find.
    """
    until = time.monotonic() + SETTLED_WITHIN_S
    asked = 0
    # What is passed on along with the first request is complete when the second one shows: from then on the levels say
    # who was served after the first. Where they say nobody, what they came along with is complete with the third one.
    for nobody in (False, True, False):
        refused = read(server).requests("invalid")
        _refuse_one(server)
        asked += 1
        now = read(server)
        while now.requests("invalid") <= refused or (nobody and any(now.levels.values())):
            if time.monotonic() > until:
                return Settled(now, asked)
            time.sleep(_POLL_S)
            now = read(server)
    # One reading is not of one moment either.
    return Settled(read(server), asked)


def _refuse_one(server: LocalTriton) -> None:
    body = json.dumps({"text_input": "", "max_tokens": 1}).encode()
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=_ASK_TIMEOUT_S) as response:
            raise RuntimeError(f"an empty prompt was answered with {response.status}")
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 400:
                raise RuntimeError(f"an empty prompt was answered with {error.code}, not with 400") from error
