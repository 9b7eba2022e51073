"""How the scales of the plots are written."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator


def plain(value: float) -> str:
    """Return a tick's figure without needless zeros: 0.5, 10, 2,000."""
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:,g}"


def decades(axis: Axis) -> None:
    """Mark 1, 2 and 5 of each decade of a logarithmic axis, in figures and not in powers."""
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def doublings(axis: Axis, values: list[int]) -> None:
    """Mark just these values of a logarithmic axis."""
    axis.set_ticks(values, [plain(value) for value in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
