"""The engine with its decode steps as CUDA graphs: the same waves as `decoding`'s, whose steps are launched."""

from __future__ import annotations

from llama_engine.model.loader import Checkpoint

from perf.gpu import decoding
from perf.gpu.decoding import Wave
from perf.gpu.precision import Precision
from perf.roofline.rates import DeviceRates


def measure(
    checkpoint: Checkpoint,
    precision: Precision,
    wave: Wave,
    rates: DeviceRates,
    launched: dict[str, object] | None,
) -> dict[str, object]:
    """Run a wave; raises RuntimeError where there are no graphs to be had.

    launched: what the same wave came to without graphs, if that was measured. Other tokens than there are no failure:
    two logits of random weights are soon as good as each other.
    """
    decoding.refuse_without(checkpoint)
    found = decoding.engine(checkpoint, precision, wave, rates, graphs=True)
    if launched is None or "texts" not in launched:
        return found
    return {**found, "same_tokens_as_launched": found["texts"] == launched["texts"]}
