"""What a token a second costs in latency: a line a server, a point a concurrency."""

from __future__ import annotations

from matplotlib.axes import Axes

from perf.report.plots.axes import decades
from perf.report.plots.canvas import drawing
from perf.report.plots.labels import Label, beside, numbers
from perf.report.plots.series import Series, sweep
from perf.report.run import Run


def latency(run: Run) -> str | None:
    """Draw p50 and p95 over tokens/s for every server of the sweep."""
    series = sweep(run)
    if not series:
        return None
    subtitle = f"{run.origin.subject}; new tokens: {series[0].load.title}; small figures: requests at a time"
    with drawing("Latency and throughput", subtitle, panels=2) as made:
        fastest = max(point.measurement.tokens_per_second for line in series for point in line.points)
        for axes, name in zip(made.panels, ("p50", "p95"), strict=True):
            _panel(axes, series, name, fastest)
        made.panels[0].set_ylabel("latency of a request, s")
    return made.svg


def _panel(axes: Axes, series: list[Series], name: str, fastest: float) -> None:
    axes.set_yscale("log")
    axes.set_title(name)
    axes.set_xlabel("tokens/s")
    ends = []
    points = []
    for line in series:
        across = [point.measurement.tokens_per_second for point in line.points]
        up = [getattr(point.measurement.latency, name) for point in line.points]
        axes.plot(across, up, color=line.look.colour, marker=line.look.marker)
        ends.append(Label(line.title, across[-1], up[-1], line.look.colour))
        points += [
            Label(str(point.concurrency), x, y, line.look.colour)
            for point, x, y in zip(line.points, across, up, strict=True)
        ]
    # Room for the names at the right.
    axes.set_xlim(0, 1.4 * fastest)
    decades(axes.yaxis)
    beside(axes, ends)
    numbers(axes, points)
