"""A server whose slots are all taken by requests that last, so that nobody gets one before they are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from server.calls import Call
from server.metrics import Metrics
from triton_local.server import LocalTriton

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
