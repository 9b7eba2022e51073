"""Made-up results of the forms that perf/results has no file of: a GPU's, and one measurement in a result's head."""

from __future__ import annotations

Content = dict[str, object]


def result(kind: str, command: str, measurements: Content, **sections: object) -> Content:
    """A result's file in the form that perf.results_file writes."""
    machine = {
        "commit": "0123456789abcdef0123456789abcdef01234567", "uncommitted_changes": False,
        "device": "CPU: Made-up 9000", "cores": 2, "python": "3.11.7",
        "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
    }  # fmt: skip
    head = {"kind": kind, "date": "2001-01-01T00:00:00+00:00", "machine": machine, "command": command}
    settings = {"model": "a made-up Llama", "threads": 1}
    return {**head, "settings": settings, "measurements": measurements, **sections}


WAVE: Content = {
    "title": "INT8, threshold 0", "rows": 32, "requests_per_second": 25.0, "tokens_per_second": 5000.0,
    "limit": {"tokens_per_second": 8000.0, "fraction": 0.625},
}  # fmt: skip
"""Rows that decode together on a GPU; `generate()`'s have no more than that."""

STEPPED: Content = {
    **WAVE, "step_ms": {"p50": 6.4}, "step_limit_ms": 3.9, "vram_mib": 13000.0,
    "steps": "decode steps: fused 8-bit product and attention, launched",
}  # fmt: skip
"""The same of the engine."""

PRODUCT: Content = {
    "outputs": 4096, "inputs": 11008, "rows": 8, "bandwidth_us": {"int8": 15.0, "fp16": 30.0},
    "ways": {
        "fp16": {"eager_us": 20.0, "graph_us": 10.0},
        "bitsandbytes_6": {"eager_us": 90.0, "graph_us": None},
        "fused": {"failed": "RuntimeError: no"},
    },
}  # fmt: skip
"""A matrix in three ways, of which one couldn't be captured and one failed."""


def gpu(**measurements: object) -> Content:
    """A gpu.json with these measurements beside a wave and a product."""
    aims = [
        {"aim": "quick", "bound": 24.0, "measured": 25.0, "from": "decode/int8/32", "met": True},
        {"aim": "quick", "bound": 30.0, "measured": 25.0, "from": "decode/int8/32", "met": False},
        {"aim": "quick", "bound": None, "measured": None, "from": None, "met": None},
    ]
    some = {"decode/int8/32": STEPPED, "products/4096x11008/8": PRODUCT}
    content = result("gpu", "make bench-gpu", {**some, **measurements}, verdict=aims)
    content["settings"] = {"model": "a made-up Llama", "threads": 1, "prompt_tokens": 100, "output_tokens": 200}
    return content


def stops() -> Content:
    """A stops.json with one cell that held and one that failed under each config."""
    held = {"situation": "idle", "stop": "sigterm", "accepted": 1, "outcomes": {"complete": 1}, "seconds": 4.25}
    lost = {
        "situation": "running",
        "stop": "group",
        "accepted": 33,
        "outcomes": {"complete": 31, "lost": 2},
        "seconds": 9,
    }
    measurements: Content = {
        f"{config}/{cell['situation']}/{cell['stop']}": {**cell, "failures": failures, "held": False, "code": 0}
        for config in ("default", "streaming")
        for cell, failures in ((held, []), (lost, ["2 requests lost"]))
    }
    return result("stops", "make stops", measurements)
