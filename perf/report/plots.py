"""The plots of docs/benchmarks.md. Each takes a result and returns an SVG, or None if it has nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from perf.report.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Label,
    Look,
    beside,
    decades,
    doublings,
    drawing,
    horizontal,
    looks,
    numbers,
    plain,
)
from perf.report.results import Measurement, Part, Percentiles, Result, TunePoint
from perf.report.tables import arrivals
from perf.report.text import figure, percent


@dataclass(frozen=True)
class _Series:
    """A server's measurements by rising concurrency."""

    title: str
    look: Look
    rows: Sequence[Measurement]

    @property
    def concurrencies(self) -> list[int]:
        return [row.load.concurrency or 0 for row in self.rows]

    @property
    def rates(self) -> list[float]:
        return [row.tokens_per_second for row in self.rows]


def _sweep(result: Result) -> list[_Series]:
    servers: dict[str, list[Measurement]] = {}
    for row in result.measured("sweep"):
        servers.setdefault(row.server, []).append(row)
    chosen = looks(list(servers))
    return [
        _Series(rows[0].label, chosen[server], sorted(rows, key=lambda row: row.load.concurrency or 0))
        for server, rows in servers.items()
    ]


def latency(result: Result) -> str | None:
    """Draw p50 and p95 latency over tokens/s, a line per server and a point per concurrency."""
    series = _sweep(result)
    if not series:
        return None
    lengths = series[0].rows[0].load.title
    subtitle = f"{result.origin.subject}; new tokens: {lengths}; small figures: requests at a time"
    with drawing("Latency and throughput", subtitle, panels=2) as made:
        fastest = max(max(line.rates) for line in series)
        for axes, name in zip(made.panels, ("p50", "p95"), strict=True):
            _latency_panel(axes, series, name, fastest)
        made.panels[0].set_ylabel("latency of a request, s")
    return made.svg


def _latency_panel(axes: Axes, series: list[_Series], name: str, fastest: float) -> None:
    axes.set_yscale("log")
    axes.set_title(name)
    axes.set_xlabel("tokens/s")
    ends = []
    points = []
    for line in series:
        colour = line.look.colour
        up = [getattr(row.latency_ms, name) / 1e3 for row in line.rows]
        axes.plot(line.rates, up, color=colour, marker=line.look.marker)
        ends.append(Label(line.title, line.rates[-1], up[-1], colour))
        places = zip(line.concurrencies, line.rates, up, strict=True)
        points += [Label(str(concurrency), x, y, colour) for concurrency, x, y in places]
    # Room for the names at the right.
    axes.set_xlim(0, 1.4 * fastest)
    decades(axes.yaxis)
    beside(axes, ends)
    numbers(axes, points)


def scaling(result: Result) -> str | None:
    """Draw tokens/s over concurrency, with each server's limit as a dashed line of its colour."""
    series = _sweep(result)
    if not series:
        return None
    lengths = series[0].rows[0].load.title
    subtitle = f"{result.origin.subject}; new tokens: {lengths}; dashed: the device's limit for the same load"
    with drawing("Throughput and requests at a time", subtitle, height=5.0, titled=False) as made:
        axes = made.panels[0]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("tokens/s")
        ends = []
        for line in series:
            colour = line.look.colour
            steps = line.concurrencies
            axes.plot(steps, line.rates, color=colour, marker=line.look.marker)
            ends.append(Label(line.title, steps[-1], line.rates[-1], colour))
            limits = [
                (step, row.limit.tokens_per_second)
                for step, row in zip(steps, line.rows, strict=True)
                if row.limit is not None
            ]
            if limits:
                axes.plot(*zip(*limits, strict=True), color=colour, linestyle=(0, (5, 3)), linewidth=1.2)
                ends.append(Label(f"limit of {line.title}", *limits[-1], colour))
        everywhere = sorted({step for line in series for step in line.concurrencies})
        # Two doublings of room for the names at the right.
        axes.set_xlim(everywhere[0] / 1.15, everywhere[-1] * 3.2)
        doublings(axes.xaxis, everywhere)
        decades(axes.yaxis)
        beside(axes, ends)
    return made.svg


def lengths(result: Result) -> str | None:
    """Draw tokens/s of the article's servers at each distribution of output lengths."""
    return _grouped(result, result.measured("article"), "Output lengths: what equal ones hide")


def peers(result: Result) -> str | None:
    """Draw tokens/s of this server and the baselines in a closed loop."""
    return _grouped(result, result.measured("peers", "closed"), "The same model in other servers, closed loop")


def _grouped(result: Result, rows: list[Measurement], title: str) -> str | None:
    """Draw a panel of bars for each distribution of lengths."""
    if not rows:
        return None
    titles = {row.server: row.label for row in rows}
    mixes = list(dict.fromkeys(row.load.mix for row in rows))
    subtitle = f"{result.origin.subject}; {rows[0].load.concurrency} requests at a time"
    if any(row.limit is not None for row in rows):
        subtitle += "; in brackets: of the device's limit"

    def text(row: Measurement) -> str:
        limit = "" if row.limit is None else f" ({percent(row.limit.fraction)})"
        return figure(row.tokens_per_second) + limit

    # One scale for all panels, to compare them.
    longest = max(row.tokens_per_second for row in rows)
    with drawing(title, subtitle, panels=len(mixes), height=1.75 + 0.36 * len(titles), left=1.9) as made:
        for axes, mix in zip(made.panels, mixes, strict=True):
            of_mix = [row for row in rows if row.load.mix == mix]
            _bars(axes, titles, of_mix, lambda row: row.tokens_per_second, text)
            _rows(axes, titles, of_mix[0].load.title, "tokens/s", longest)
    return made.svg


def _bars(
    axes: Axes,
    titles: dict[str, str],
    rows: list[Measurement],
    length: Callable[[Measurement], float | None],
    text: Callable[[Measurement], str],
) -> None:
    """Draw a bar per row at its server's place, a dash where there is no figure."""
    chosen = looks(list(titles))
    for row in rows:
        place = list(titles).index(row.server)
        found = length(row)
        if found is not None:
            axes.barh(place, found, height=0.62, color=chosen[row.server].colour)
        axes.annotate(
            "–" if found is None else text(row), (found or 0, place), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip


def _rows(axes: Axes, titles: dict[str, str], title: str, unit: str, longest: float) -> None:
    """Finish a panel of bars: its scale, with room for the figures, and the servers' names at the left."""
    horizontal(axes, title, unit, 1.45 * longest)
    axes.set_yticks(range(len(titles)), list(titles.values()))
    axes.set_ylim(len(titles) - 0.5, -0.5)


def streaming(result: Result) -> str | None:
    """Draw TTFT, ITL and goodput of the streaming servers under Poisson arrivals, for the first distribution."""
    everything = result.measured("peers", "poisson")
    rows = [
        row for row in everything if row.time_to_first_token_ms is not None and row.load.mix == everything[0].load.mix
    ]
    if not rows:
        return None
    titles = {row.server: row.label for row in rows}
    rate = rows[0].load.rate_per_second
    sent = "" if rate is None else f"; {figure(rate)} requests/s"
    subtitle = f"{result.origin.subject}; Poisson arrivals{sent}; new tokens: {rows[0].load.title}"
    height = 1.75 + 0.42 * len(titles)
    with drawing("Streams: how soon and how steadily", subtitle, panels=3, height=height, left=1.9) as made:
        first, between, good = made.panels
        _bars(
            good,
            titles,
            rows,
            lambda row: None if row.goodput is None else 100 * row.goodput.share,
            lambda row: "" if row.goodput is None else percent(row.goodput.share),
        )
        _rows(good, titles, "within the objective", "% of all requests", longest=100)
        good.set_xticks([0, 50, 100])
        chosen = looks(list(titles))
        to_first = [(chosen[row.server], row.time_to_first_token_ms) for row in rows]
        _ranges(first, "time to first token, p50 to p95", to_first)
        inter = [(chosen[row.server], row.inter_token_latency_ms) for row in rows]
        _ranges(between, "between two tokens, p50 to p95", inter)
    return made.svg


def _ranges(axes: Axes, title: str, times: Sequence[tuple[Look, Percentiles | None]]) -> None:
    """Draw a line from p50 to p95 for each server; the marker is the median."""
    longest = max((found.p95 for _, found in times if found is not None), default=1.0)
    for place, (look, found) in enumerate(times):
        if found is None:
            continue
        low, high = found.p50, found.p95
        axes.plot([low, high], [place, place], color=look.colour, linewidth=4, alpha=0.45, solid_capstyle="butt")
        axes.plot([low], [place], color=look.colour, marker=look.marker, markersize=7)
        axes.plot([high], [place], color=look.colour, marker="|", markersize=9, markeredgewidth=2)
        axes.annotate(
            f"{figure(low)} – {figure(high)}", (high, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8.5,
        )  # fmt: skip
    horizontal(axes, title, "ms", 1.6 * longest)


def pareto(result: Result) -> str | None:
    """Draw tokens/s over p95 of the tuned points, the Pareto front, the recommended point and the bound on p95.

    The front's points are numbered and their settings listed beside the plot: on a real front they lie close together.
    """
    found = result.tune
    if found is None or not found.points:
        return None
    subtitle = f"{result.origin.subject}; {arrivals(found.load)}; new tokens: {found.load.title}; up and left is better"
    shown = sorted((point for point in found.points if point.pareto or point.recommended), key=lambda one: one.p95_ms)
    with drawing("Settings: throughput and latency", subtitle, right=3.3, titled=False) as made:
        axes = made.panels[0]
        axes.set_xlabel("p95 latency of a request, s")
        axes.set_ylabel("tokens/s")
        axes.xaxis.set_major_formatter(lambda value, _: plain(value))
        axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.margins(0.1)
        _front(axes, [point for point in found.points if not point.pareto], GREY, "o")
        _front(axes, [point for point in shown if point.pareto], BLUE, "-o")
        for number, point in enumerate(shown, start=1):
            place = (point.p95_ms / 1e3, point.tokens_per_second)
            if point.recommended:
                axes.plot([place[0]], [place[1]], "*", color=VERMILION, markersize=14)
            axes.annotate(
                str(number), place, xytext=(-5, 6), textcoords="offset points",
                ha="right", fontsize=9, color=_colour(point),
            )  # fmt: skip
        axes.axvline(found.bound, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            f"bound: {plain(found.bound)} s", (found.bound, 0), xycoords=("data", "axes fraction"), xytext=(4, 6),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
        _settings(axes, shown)
    return made.svg


def _front(axes: Axes, points: Sequence[TunePoint], colour: str, style: str) -> None:
    across, up = [point.p95_ms / 1e3 for point in points], [point.tokens_per_second for point in points]
    axes.plot(across, up, style, color=colour, alpha=0.8)


def _settings(axes: Axes, shown: Sequence[TunePoint]) -> None:
    """List the numbered points' settings at the right of the panel, shared ones once."""
    short = {
        "max_queue_delay_microseconds": "delay µs",
        "preferred_batch_size": "preferred",
        "prefill_tokens": "prefill",
    }
    shared = {name for name in shown[0].texts if len({point.texts.get(name) for point in shown}) == 1}

    def described(point: TunePoint, common: bool) -> str:
        return ", ".join(
            f"{short.get(name, name)} {value}" for name, value in point.texts.items() if (name in shared) is common
        )

    lines = [
        (f"{number}  {described(point, False) or 'as below'}", _colour(point))
        for number, point in enumerate(shown, start=1)
    ]
    lines.append((f"all: {described(shown[0], True)}" if shared else "", INK))
    if any(point.recommended for point in shown):
        lines.append(("★ recommended", VERMILION))
    for place, (text, colour) in enumerate(lines):
        axes.annotate(
            text, (1, 1), xycoords="axes fraction", xytext=(12, -14 * place - 6), textcoords="offset points",
            fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def _colour(point: TunePoint) -> str:
    return VERMILION if point.recommended else BLUE


def overhead(result: Result) -> str | None:
    """Draw the parts of the overhead account."""
    account = result.overhead
    return None if account is None else icicle(account.parts, f"{result.origin.subject}; {account.load}")


_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_WIDTH = 9.6
_ROW = 0.3
"""Inches per row of the icicle."""
_LETTER = 0.065
"""Approximate inches per letter."""


@dataclass(frozen=True)
class _Box:
    """A part's place: left and width as shares of its whole, depth below it."""

    label: str
    left: float
    width: float
    depth: int
    colour: tuple[float, float, float]


def icicle(parts: Sequence[Part], subtitle: str) -> str:
    """Draw each whole as a bar with its parts below, as wide as their share. Raises ValueError without parts.

    A part that is too narrow for its name has none; the table names them all.
    """
    if not parts:
        raise ValueError("an account without parts can't be drawn")
    blocks = [list(_boxes(parts, part)) for part in parts if not part.parent]
    # With half a row of space behind each.
    rows = [max(box.depth for box in block) + 1.5 for block in blocks]
    height = 0.95 + 0.6 + _ROW * sum(rows)
    with drawing("Where the time goes", subtitle, width=_WIDTH, height=height, left=0.15) as made:
        (axes,) = made.panels
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(sum(rows), 0)
        top = 0.0
        for block, taken in zip(blocks, rows, strict=True):
            for box in block:
                _draw(axes, box, top + box.depth)
            top += taken
    return made.svg


def _draw(axes: Axes, box: _Box, top: float) -> None:
    axes.add_patch(Rectangle((box.left, top), box.width, 0.94, facecolor=box.colour, edgecolor="white", linewidth=0.6))
    # The label, or it without the share, or nothing: what fits.
    room = box.width * (_WIDTH - 0.4) / _LETTER - 1
    short = box.label.rsplit(" ", 2)[0] if box.label.endswith("%") else box.label
    label = next((label for label in (box.label, short) if len(label) <= room), "")
    if label:
        axes.text(box.left + 0.004, top + 0.47, label, va="center", fontsize=8, color=INK, clip_on=True)


def _boxes(parts: Sequence[Part], whole: Part) -> Iterator[_Box]:
    label = f"{whole.name}: {whole.seconds:.3g} {whole.unit}, {whole.per_token_us:,.0f} µs per token"
    yield _Box(label, 0.0, 1.0, 0, _pale(GREY, 0))
    left = 0.0
    for index, part in enumerate(part for part in parts if part.parent == whole.name):
        yield from _tree(parts, part, left, 1, _COLOURS[index % len(_COLOURS)])
        left += max(part.share, 0.0)


def _tree(parts: Sequence[Part], part: Part, left: float, depth: int, colour: str) -> Iterator[_Box]:
    name = part.name.rsplit("/", 1)[-1]
    if name.startswith("the rest of "):
        colour = GREY
    # A rest of independent measurements can be below zero; it has no width.
    width = max(part.share, 0.0)
    yield _Box(f"{name} {100 * width:.1f} %", left, width, depth, _pale(colour, depth))
    for below in (other for other in parts if other.parent == part.name):
        yield from _tree(parts, below, left, depth + 1, colour)
        left += max(below.share, 0.0)


def _pale(colour: str, depth: int) -> tuple[float, float, float]:
    """Return the colour mixed with white, paler with depth, so that black text stays readable on it."""
    share = 0.5 + 0.08 * depth
    red, green, blue = (one * (1 - share) + share for one in to_rgb(colour))
    return red, green, blue
