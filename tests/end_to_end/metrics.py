"""A server's metrics and its log lines about requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from end_to_end.servers import HTTP, until
from end_to_end.streams import Call
from end_to_end.wires import post
from llama_engine.triton.metrics import INSTANCE_LABEL
from triton_local.server import LocalTriton
from triton_local.triton_log import parse_line

PENDING = "nv_inference_pending_request_count"
"""Requests in Triton's own queue."""

LASTING = {"text_input": "a", "max_tokens": 1500, "min_tokens": 1500, "temperature": 2.0}
"""To be cancelled. Nothing of this text repeats, so that drafts don't shorten it."""

Series = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name, and its labels with their values."""

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


class Metrics:
    """The model's metrics, now and relative to the time when this object was made."""

    def __init__(self, server: LocalTriton) -> None:
        """Wait until earlier requests have ended and are counted."""
        self._server = server
        self._before = self.read()
        # Metrics are a moment late. When this refusal shows, so does all that was counted before it.
        assert post(server, "generate", {"text_input": "", "temprature": 1}).status_code == 400
        self.wait_for(1, "llama_requests_total", finish_reason="invalid")
        self.wait(Metrics.idle, "earlier requests have ended")
        self._before = self.read()

    def read(self) -> dict[Series, float]:
        """Return every series by name and labels, without the instance label: these servers have one instance."""
        return {
            (name, frozenset(label for label in labels if label[0] != INSTANCE_LABEL)): value
            for (name, labels), value in series(self._server).items()
        }

    def now(self, name: str, **labels: str) -> float:
        """Return the value of a series; labels: besides model and version."""
        return self.read()[_series(name, labels)]

    def grown(self, name: str, **labels: str) -> float:
        """Return the increase of a series since this object was made."""
        series = _series(name, labels)
        return self.read()[series] - self._before[series]

    def reasons(self) -> dict[str, float]:
        """Return how many requests have ended since for each reason; a reason of none is left out."""
        grown = {
            dict(labels)["finish_reason"]: value - self._before[name, labels]
            for (name, labels), value in self.read().items()
            if name == "llama_requests_total"
        }
        return {reason: count for reason, count in grown.items() if count}

    def wait(self, condition: Callable[[Metrics], bool], what: str) -> None:
        """Wait until the metrics, which are a moment late, fulfil a condition."""
        until(lambda: condition(self), lambda: f"{what}; the metrics are {series(self._server)}")

    def wait_for(self, expected: float, name: str, **labels: str) -> None:
        """Wait until a series has grown by the expected amount; more fails the test."""
        until(lambda: self.grown(name, **labels) >= expected, lambda: f"{name} {labels} grows by {expected}")
        grown = self.grown(name, **labels)
        assert grown == expected, f"{name} {labels} has grown by {grown} and not by {expected}"

    def wait_for_slots(self, slots: int, waiting: int = 0) -> None:
        """Wait until `slots` sequences run and `waiting` requests wait, in the model or in Triton's queue.

        One more may wait: the supervisor asks a model that hasn't made a step for a token.
        """
        seen = Counter[tuple[float, ...]]()

        def are_there() -> bool:
            now = self.read()
            running, *waits = (
                now[_series(name, {})] for name in ("llama_slots_in_use", "llama_waiting_requests", PENDING)
            )
            seen[running, *waits] += 1
            return running == slots and waiting <= sum(waits) <= waiting + 1

        until(are_there, lambda: f"{slots} run, {waiting} wait, in the model or in Triton; seen were {seen}")

    def idle(self) -> bool:
        """Return whether no request has a slot or waits for one."""
        now = self.read()
        return not any(now[_series(name, {})] for name in ("llama_slots_in_use", "llama_waiting_requests"))


def level(server: LocalTriton, name: str) -> float:
    """Return the value of a metric, summed over its labels."""
    values = [value for (other, _), value in series(server).items() if other == name]
    assert values, f"there is no {name}"
    return sum(values)


def series(server: LocalTriton) -> dict[Series, float]:
    """Return every series of the metrics endpoint."""
    page = HTTP.get(f"http://{server.metrics_address}/metrics").raise_for_status().text
    return {(name, frozenset(_LABEL.findall(labels))): float(value) for name, labels, value in _LINE.findall(page)}


def _series(name: str, labels: dict[str, str]) -> Series:
    return name, frozenset({"model": "llama", "version": "1", **labels}.items())


@contextmanager
def all_slots_taken(server: LocalTriton, metrics: Metrics, slots: int) -> Iterator[list[Call]]:
    """Run a long request in each slot inside the block; cancel those that still run after it."""
    with ExitStack() as calls:
        lasting = [calls.enter_context(Call(server, LASTING)) for _ in range(slots)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == slots, "all slots are taken")
        yield lasting
        for call in lasting:
            call.cancel()


def request_lines(server: LocalTriton) -> list[str]:
    """Return the log messages about answered requests."""
    messages = [parse_line(line)[1] for line in server.log_text().splitlines()]
    return [message for message in messages if message.startswith("llama: request answered ")]


def fields(message: str) -> dict[str, str]:
    """Return the fields of such a message, unparsed."""
    return dict(_FIELD.findall(message))


def line_of(server: LocalTriton, request_id: str) -> dict[str, str]:
    """Wait for a request's one log line; return its fields."""

    def its() -> list[str]:
        return [message for message in request_lines(server) if f"id={request_id} " in message]

    # The line is written after the answer is sent, and passes through Triton.
    until(lambda: bool(its()), lambda: f"{request_id} is in the log")
    (message,) = its()
    return fields(message)
