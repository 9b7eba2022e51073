"""What a server says of itself on its metrics endpoint, and what has come to it since."""

from __future__ import annotations

from collections.abc import Callable

from llama_engine.triton.metrics import INSTANCE_LABEL
from server.polling import until
from server.wires import generate_url, post
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
