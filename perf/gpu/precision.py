"""The precisions that are compared on one shape, in the order in which one model can take them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.roofline.rates import Weights


@dataclass(frozen=True)
class Precision:
    """key: in results. weights: of the layers' matrices. threshold: bitsandbytes' for outliers; None is unquantized."""

    key: str
    title: str
    weights: Weights
    threshold: float | None

    def to_json(self) -> dict[str, object]:
        """Return what names it in a measurement."""
        return {"title": self.title, "weights": self.weights.upper(), "threshold": self.threshold}


FP16 = Precision("fp16", "FP16", "fp16", None)
FP32 = Precision("fp32", "FP32", "fp32", None)
INT8 = Precision("int8", "INT8, threshold 0", "int8", 0.0)
INT8_OUTLIERS = Precision("int8_outliers", "INT8, threshold 6", "int8", 6.0)


def precisions(device: str) -> Sequence[Precision]:
    """Return unquantized first, because quantizing can't be undone; a CPU computes FP32 faster than FP16."""
    return (FP32 if device == "cpu" else FP16, INT8, INT8_OUTLIERS)
