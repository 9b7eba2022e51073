"""How fast a device reads memory and multiplies matrices.

    {"device": "cpu", "threads": 1, "bandwidth": {"33554432": 3.6e10, …}, "operations": {"fp32": 9.5e10, …}}

Memory has no single bandwidth: what fits into a cache is read several times faster. So the bandwidth is known for
several sizes of what is read repeatedly, and a roofline uses the one for the weights' own size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Weights = Literal["fp32", "fp16", "bf16", "int8"]
BYTES: dict[Weights, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""Per value. In INT8 every row of a matrix also has a scale."""
WIDTHS: tuple[Weights, ...] = ("fp32", "fp16", "bf16", "int8")
"""Weight formats, from the widest to the narrowest."""


@dataclass(frozen=True)
class DeviceRates:
    """device: "cpu" or "cuda". threads: on a CPU.

    bandwidth: bytes per second, by the size in bytes of what is read repeatedly. operations: multiplications and
    additions per second in large square products, by the format of both factors; a format that this device's libraries
    can't multiply is absent. In INT8 it is the faster of PyTorch's product and, on a CPU, the compiled kernels', whose
    two terms are two products of 8-bit factors.
    """

    device: str
    threads: int
    bandwidth: Mapping[int, float]
    operations: Mapping[Weights, float]

    def read(self, working_set: float) -> float:
        """Return an upper bound of the bytes per second for reading this many bytes repeatedly.

        Of the measured sizes, the next smaller one counts (the smallest, if there is none), or a larger one that was
        read faster: reading more is never faster, so that is noise.
        """
        next_smaller = max((size for size in self.bandwidth if size <= working_set), default=min(self.bandwidth))
        return max(rate for size, rate in self.bandwidth.items() if size >= next_smaller)

    def multiply(self, weights: Weights) -> float:
        """Return an upper bound of the operations per second in a product with weights of this format.

        Weights may be widened first, which is faster where the hardware has no fast product of the narrow format:
        bitsandbytes computes INT8 in FP32 on a CPU without AVX512. So the rate is the best of this format and all wider
        ones; widening itself counts as free.
        """
        usable = WIDTHS[: WIDTHS.index(weights) + 1]
        return max(rate for kind, rate in self.operations.items() if kind in usable)

    def to_json(self) -> dict[str, object]:
        """Return the rates for a result's file, to three digits; JSON has no numbers as keys."""
        return {
            "device": self.device,
            "threads": self.threads,
            "bandwidth": {str(size): float(f"{rate:.3g}") for size, rate in self.bandwidth.items()},
            "operations": {kind: float(f"{rate:.3g}") for kind, rate in self.operations.items()},
        }

    def describe(self) -> str:
        """Return the rates as one line."""
        read = ", ".join(f"{rate / 1e9:,.1f} at {size / 2**20:,.0f} MiB" for size, rate in self.bandwidth.items())
        products = ", ".join(f"{kind} {rate / 1e9:,.1f}" for kind, rate in self.operations.items())
        return f"{self.device}, {self.threads} thread(s): reads GB/s {read}; products, 10^9 operations/s: {products}"
