"""A server's metrics and its log lines about requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from llama_engine.triton.metrics import INSTANCE_LABEL
from server.clients import generate_url, post
from server.servers import until
from server.streams import Call
from triton_local.log import parse_line
from triton_local.server import LocalTriton

from perf import metrics
from perf.metrics import Series

PENDING = "nv_inference_pending_request_count"
"""Requests in Triton's own queue."""


def text(server: LocalTriton) -> str:
    """Return the page of the metrics endpoint."""
    return metrics.text(server.metrics_url)


def read(server: LocalTriton) -> dict[Series, float]:
    """Return every series by name and labels, without the instance label: these servers have one instance."""
    return {
        (name, frozenset(label for label in labels if label[0] != INSTANCE_LABEL)): value
        for (name, labels), value in metrics.series(text(server)).items()
    }


def level(server: LocalTriton, name: str) -> float:
    """Return the value of a series that has no labels besides model and version."""
    return read(server)[_series(name, {})]


class Metrics:
    """The model's metrics, now and relative to the time when this object was made."""

    def __init__(self, server: LocalTriton) -> None:
        """Wait until earlier requests have ended and are counted."""
        self._server = server
        self._before = self.read()
        # Metrics are a moment late. When this refusal shows, so does all that was counted before it.
        status, _ = post(generate_url(server), b'{"text_input": "", "temprature": 1}')
        assert status == 400
        self.wait_for(1, "llama_requests_total", finish_reason="invalid")
        self.wait(Metrics.idle, "earlier requests have ended")
        self._before = self.read()

    def read(self) -> dict[Series, float]:
        """Return every series by name and labels."""
        return read(self._server)

    def now(self, name: str, **labels: str) -> float:
        """Return the value of a series; labels: besides model and version."""
        return self.read()[_series(name, labels)]

    def grown(self, name: str, **labels: str) -> float:
        """Return the increase of a series since this object was made."""
        series = _series(name, labels)
        return self.read()[series] - self._before[series]

    def wait(self, condition: Callable[[Metrics], bool], what: str) -> None:
        """Wait until the metrics, which are a moment late, fulfil a condition."""
        until(lambda: condition(self), lambda: f"{what}; the metrics are {self.own()}")

    def wait_for(self, expected: float, name: str, **labels: str) -> None:
        """Wait until a series has grown by the expected amount; more fails the test."""
        until(lambda: self.grown(name, **labels) >= expected, lambda: f"{name} {labels} grows by {expected}")
        grown = self.grown(name, **labels)
        assert grown == expected, f"{name} {labels} has grown by {grown} and not by {expected}"

    def idle(self) -> bool:
        """Return whether no request has a slot or waits for one."""
        return self.now("llama_slots_in_use") == 0 and self.now("llama_waiting_rows") == 0

    def own(self) -> dict[str, float]:
        """Return the model's counters and gauges, for a message."""
        return {
            f"{name} {dict(labels).get('finish_reason', '')}".strip(): value
            for (name, labels), value in sorted(self.read().items(), key=str)
            if name.startswith("llama_") and not name.endswith(("_bucket", "_sum", "_count"))
        }


def _series(name: str, labels: dict[str, str]) -> Series:
    return name, frozenset({"model": "llama", "version": "1", **labels}.items())


LASTING = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 0.0}


@contextmanager
def all_slots_taken(server: LocalTriton, metrics: Metrics, slots: int) -> Iterator[list[Call]]:
    """Run a long request in each slot inside the block; cancel those that still run after it."""
    with ExitStack() as calls:
        lasting = [calls.enter_context(Call(server, LASTING)) for _ in range(slots)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == slots, "all slots are taken")
        yield lasting
        for call in lasting:
            call.cancel()


_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def said(server: LocalTriton) -> list[str]:
    """Return the log messages about answered requests."""
    messages = [parse_line(line).message for line in server.log_text().splitlines()]
    return [message for message in messages if message.startswith("llama: request answered ")]


def fields(message: str) -> dict[str, str]:
    """Return the fields of such a message, unparsed."""
    return dict(_FIELD.findall(message))


def line_of(server: LocalTriton, request_id: str) -> dict[str, str]:
    """Wait for a request's one log line; return its fields."""

    def its() -> list[str]:
        return [message for message in said(server) if f"id={request_id} " in message]

    # The line is written after the answer is sent, and passes through Triton.
    until(lambda: bool(its()), lambda: f"{request_id} is in the log")
    (message,) = its()
    return fields(message)
