"""Figures as people read them: three digits are enough, and more would promise a precision that no run has."""

from __future__ import annotations

NONE = "–"


def figure(value: float) -> str:
    """Return three significant digits at least, never in exponents: 0.0123, 1.23, 12.3, 123, 1,235."""
    if value == 0:
        return "0"
    for digits in range(8):
        if abs(value) >= 10.0 ** (2 - digits):
            return f"{value:,.{digits}f}"
    return f"{value:.2e}"


def whole(value: float) -> str:
    """Return a whole number."""
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share of 1 in percent, a decimal more close to nothing or to everything; only 1 itself is 100 %."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    for digits in range(0 if 0.0995 <= share < 0.9 else 1, 4):
        if (text := f"{100 * share:.{digits}f}") != f"{100:.{digits}f}":
            return f"{text} %"
    return f"{100 * share:.5f} %"


def several(*values: float) -> str:
    """Return percentiles in one cell: 1.23 / 4.56."""
    return " / ".join(map(figure, values))
