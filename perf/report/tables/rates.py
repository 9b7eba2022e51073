"""What the device's limit was computed from, as lines beneath a table."""

from __future__ import annotations

from collections.abc import Sequence

from perf.limit.rates import DeviceRates
from perf.report.cells import figure
from perf.report.measurement import Measurement
from perf.report.run import Run


def lines(run: Run, rows: Sequence[Measurement]) -> list[str]:
    """Return the measured rates, and for a table with rows in FP16 whether that is slower than FP32 here.

    Nothing where the rates weren't measured.
    """
    rates = _read(run)
    if rates is None:
        return []
    slower = _slower(rates) if any(row.weights == "FP16" for row in rows) else []
    return [*slower, f"Measured rates: {rates.describe()}."]


def _slower(rates: DeviceRates) -> list[str]:
    wide, narrow = rates.operations.get("fp32"), rates.operations.get("fp16")
    if wide is None or narrow is None or narrow >= wide:
        return []
    by_format = "; ".join(f"{kind.upper()} {figure(rate / 1e9)}" for kind, rate in rates.operations.items())
    return [
        f"FP16 products are {figure(wide / narrow)} × slower than FP32 on this device, so FP16 rows compare number "
        f"formats as well as servers. 10^9 operations/s: {by_format}."
    ]


def _read(run: Run) -> DeviceRates | None:
    found = run.fields.optional_part("rates")
    if found is None:
        return None
    bandwidth, operations = found.part("bandwidth"), found.part("operations")
    return DeviceRates.from_json(
        {
            "device": found.text("device"),
            "threads": found.count("threads"),
            "bandwidth": {size: bandwidth.number(size) for size in bandwidth.names()},
            "operations": {kind: operations.number(kind) for kind in operations.names()},
        }
    )
