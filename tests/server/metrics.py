"""What a server says of itself on its metrics endpoint, and what has come to it since."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from llama_engine.triton.metrics import INSTANCE_LABEL
from server.clients import generate_url, post
from server.servers import until
from server.streams import Call
from triton_local.log_lines import parse_line
from triton_local.server import LocalTriton

from perf import metrics
from perf.metrics import Series

PENDING = "nv_inference_pending_request_count"
"""How many requests wait in Triton's own queue."""


def text(server: LocalTriton) -> str:
    """Return what the endpoint says, as it is."""
    return metrics.text(server.metrics_url)


def read(server: LocalTriton) -> dict[Series, float]:
    """Return every series of the endpoint, by its name and labels; the servers here have one instance, left out."""
    return {
        (name, frozenset(label for label in labels if label[0] != INSTANCE_LABEL)): value
        for (name, labels), value in metrics.series(text(server)).items()
    }


def level(server: LocalTriton, name: str) -> float:
    """Return the present value of one of the model's series without labels of its own."""
    return read(server)[_series(name, {})]


class Metrics:
    """The model's metrics as they were when this was made, and are now."""

    def __init__(self, server: LocalTriton) -> None:
        """Wait until nobody is left from before and everything is counted."""
        self._server = server
        self._before = self.read()
        # Metrics are a moment late. This is counted, too, and what was counted before it shows with it or earlier.
        status, _ = post(generate_url(server), b'{"text_input": "", "temprature": 1}')
        assert status == 400
        self.wait_for(1, "llama_requests_total", finish_reason="invalid")
        self.wait(Metrics.idle, "nobody from before has a slot")
        self._before = self.read()

    def read(self) -> dict[Series, float]:
        """Return every series of the endpoint, by its name and labels."""
        return read(self._server)

    def now(self, name: str, **labels: str) -> float:
        """Return the present value of one of the model's series; its labels beside model and version have to match."""
        return self.read()[_series(name, labels)]

    def grown(self, name: str, **labels: str) -> float:
        """Return by how much one of the model's series has grown since this was made."""
        series = _series(name, labels)
        return self.read()[series] - self._before[series]

    def wait(self, condition: Callable[[Metrics], bool], what: str) -> None:
        """Wait until the metrics, which are a moment late, say so."""
        until(lambda: condition(self), lambda: f"{what}; the metrics are {self.own()}")

    def wait_for(self, expected: float, name: str, **labels: str) -> None:
        """Wait until a series has grown by so much, and no more."""
        until(lambda: self.grown(name, **labels) >= expected, lambda: f"{name} {labels} grows by {expected}")
        grown = self.grown(name, **labels)
        assert grown == expected, f"{name} {labels} has grown by {grown} and not by {expected}"

    def idle(self) -> bool:
        """Return whether nobody has a slot, or waits for one."""
        return self.now("llama_slots_in_use") == 0 and self.now("llama_waiting_rows") == 0

    def own(self) -> dict[str, float]:
        """Return the counters and levels that the model keeps, for a message."""
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
    """Run a lasting request in each slot for as long as the block lasts, then take back those that still run."""
    with ExitStack() as calls:
        lasting = [calls.enter_context(Call(server, LASTING)) for _ in range(slots)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == slots, "all slots are taken")
        yield lasting
        for call in lasting:
            call.cancel()


_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def said(server: LocalTriton) -> list[str]:
    """Return the messages of every line about a request."""
    messages = [parse_line(line).message for line in server.log_text().splitlines()]
    return [message for message in messages if message.startswith("llama: request answered ")]


def fields(message: str) -> dict[str, str]:
    """Return the fields of such a message."""
    return dict(_FIELD.findall(message))


def line_of(server: LocalTriton, request_id: str) -> dict[str, str]:
    """Wait for the one line of a request, and return its fields."""

    def its() -> list[str]:
        return [message for message in said(server) if f"id={request_id} " in message]

    # Answers go out before they are noted, and lines take their time through Triton.
    until(lambda: bool(its()), lambda: f"{request_id} is in the log")
    (message,) = its()
    return fields(message)
