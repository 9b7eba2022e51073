"""What more requests at a time bring, and how far it is from what the device allows."""

from __future__ import annotations

from perf.report.plots.axes import decades, doublings
from perf.report.plots.canvas import drawing
from perf.report.plots.labels import Label, beside
from perf.report.plots.series import sweep
from perf.report.run import Run


def scaling(run: Run) -> str | None:
    """Draw tokens/s over the requests at a time, and each server's limit as a dashed line of its colour."""
    series = sweep(run)
    if not series:
        return None
    subtitle = f"{run.origin.subject}; new tokens: {series[0].load.title}; dashed: the device's limit for the same load"
    with drawing("Throughput and requests at a time", subtitle, height=5.0, titled=False) as made:
        axes = made.panels[0]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("tokens/s")
        ends = []
        for line in series:
            colour = line.look.colour
            steps = [point.concurrency for point in line.points]
            rates = [point.measurement.tokens_per_second for point in line.points]
            axes.plot(steps, rates, color=colour, marker=line.look.marker)
            ends.append(Label(line.title, steps[-1], rates[-1], colour))
            limits = [
                (point.concurrency, point.measurement.limit.tokens_per_second)
                for point in line.points
                if point.measurement.limit is not None
            ]
            if limits:
                axes.plot(*zip(*limits, strict=True), color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
                ends.append(Label(f"limit of {line.title}", *limits[-1], colour))
        everywhere = sorted({point.concurrency for line in series for point in line.points})
        # Two doublings of room for the names at the right.
        axes.set_xlim(everywhere[0] / 1.15, everywhere[-1] * 3.2)
        doublings(axes.xaxis, everywhere)
        decades(axes.yaxis)
        beside(axes, ends)
    return made.svg
