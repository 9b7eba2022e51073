"""What a reader of a stream notices under requests that come when they come."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from perf.report.cells import figure, percent
from perf.report.measurement import Measurement, Times
from perf.report.plots.axes import plain
from perf.report.plots.bars import Bars, Names, draw
from perf.report.plots.canvas import drawing
from perf.report.plots.palette import Look, looks
from perf.report.run import Run


def streaming(run: Run) -> str | None:
    """Draw time to first token, inter-token latency and goodput of the streaming servers, for the first mix."""
    everything = run.measured("peers", "poisson")
    streamed = [row for row in everything if row.first_token is not None and row.load.mix == everything[0].load.mix]
    if not streamed:
        return None
    names = Names.of(streamed)
    chosen = looks(names.servers)
    rate = streamed[0].load.rate_per_second
    sent = "" if rate is None else f"; {figure(rate)} requests/s"
    subtitle = f"{run.origin.subject}; Poisson arrivals{sent}; new tokens: {streamed[0].load.title}"
    height = 1.75 + 0.42 * len(names.servers)
    with drawing("Streams: how soon and how steadily", subtitle, panels=3, height=height, left=1.9) as made:
        first, between, good = made.panels
        share = Bars("within the objective", "% of all requests", _share, _share_text)
        draw(good, share, names, streamed, chosen, longest=100)
        good.set_xticks([0, 50, 100])
        _ranges(first, "time to first token, p50 to p95", names, [row.first_token for row in streamed], chosen)
        _ranges(between, "between two tokens, p50 to p95", names, [row.inter_token for row in streamed], chosen)
    return made.svg


def _ranges(axes: Axes, title: str, names: Names, times: list[Times | None], chosen: dict[str, Look]) -> None:
    """Draw a line from p50 to p95 for each server; the dot is the median."""
    longest = max((1e3 * one.p95 for one in times if one is not None), default=1.0)
    for place, (server, one) in enumerate(zip(names.servers, times, strict=True)):
        if one is None:
            continue
        colour = chosen[server].colour
        low, high = 1e3 * one.p50, 1e3 * one.p95
        axes.plot([low, high], [place, place], color=colour, linewidth=4, alpha=0.45, solid_capstyle="butt")
        axes.plot([low], [place], color=colour, marker=chosen[server].marker, markersize=7)
        axes.plot([high], [place], color=colour, marker="|", markersize=9, markeredgewidth=2)
        axes.annotate(
            f"{figure(low)} – {figure(high)}", (high, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1.6 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _share(row: Measurement) -> float | None:
    return None if row.goodput is None else 100 * row.goodput.share


def _share_text(row: Measurement) -> str:
    return "" if row.goodput is None else percent(row.goodput.share)
