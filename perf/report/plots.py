"""The plots of docs/benchmarks.md. Each takes a result and returns an SVG, or raises NotMeasuredError.

The same data gives the same bytes. The background is white, so a plot reads on light and dark pages. Letters are
outlines: the reader needs no font.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from perf.report.results import Part, Result, Row
from perf.report.tables import account_load, arrivals, label, lengths, setting_texts, tuned
from perf.report.text import figure, percent

# Okabe and Ito's colours, which stay distinct under the common kinds of colour blindness; the second four are darker
# than the originals, because they also colour text.
BLUE, GREEN, VERMILION = "#0072b2", "#009e73", "#d55e00"
PURPLE, ORANGE, SKY, GREY = "#b35a8d", "#b87f00", "#3a8fc4", "#666666"
OLIVE, BROWN = "#8a8400", "#7a4b00"
INK, FAINT = "#222222", "#d8d8d8"

_LOOKS = {
    server: look
    for servers, look in {
        ("inflight_int8", "triton_llama_int8"): (BLUE, "o"),
        ("inflight_fp32", "triton_llama_fp32"): (GREEN, "s"),
        ("inflight_bf16", "triton_llama_bf16"): (OLIVE, "p"),
        ("batched_int8", "batching_fastapi"): (VERMILION, "^"),
        ("batched_fp16", "transformers_serve"): (PURPLE, "v"),
        ("naive_fp16", "naive_fastapi"): (GREY, "D"),
        ("vllm",): (ORANGE, "P"),
        ("vllm_int8",): (BROWN, "*"),
        ("naive_fp32",): (SKY, "X"),
    }.items()
    for server in servers
}
"""Each server's colour, the same in all plots, and a marker that tells the lines apart in black and white."""
_OTHER = (INK, "*")

_STYLE: dict[str, object] = {
    "svg.hashsalt": "triton-llama",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
styled = style.context(["default", _STYLE])
"""Decorates what draws: a style of its own, whatever the user's matplotlibrc says."""

_DASHED = (0, (5, 3))
_WIDTH = 9.6
"""Inches of every figure."""
_LETTER, _LINE = 0.068, 0.17
"""Approximate inches per letter and per line of the subtitle."""


def panels(
    title: str,
    subtitle: str,
    shape: tuple[int, int] = (1, 1),
    height: float = 4.6,
    left: float = 0.85,
    right: float = 0.25,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, in `shape` rows and columns; rows share the x axis, columns the y axis.

    height: inches, without what a subtitle takes that is longer than a line. left, right: inches beside the panels.
    """
    lines = textwrap.wrap(subtitle, int((_WIDTH - 0.3) / _LETTER))
    head = 0.78 + _LINE * len(lines)
    height += _LINE * (len(lines) - 1)
    drawn = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasSVG(drawn)
    # Margins in inches rather than a layout engine: what it would measure isn't the same everywhere.
    drawn.subplots_adjust(left / _WIDTH, 0.6 / height, 1 - right / _WIDTH, 1 - head / height, wspace=0.12, hspace=0.22)
    drawn.text(0.15 / _WIDTH, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="center")
    above = 1 - 0.46 / height
    drawn.text(0.15 / _WIDTH, above, "\n".join(lines), fontsize=9, color="#555555", va="top")
    return drawn, list(drawn.subplots(*shape, squeeze=False, sharex="col", sharey="row").flat)


def svg(drawn: Figure) -> str:
    """Return the figure as an SVG without a date and without spaces at the ends of lines."""
    target = io.StringIO()
    title = drawn.texts[0].get_text()
    drawn.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


@styled
def latency(result: Result) -> str:
    """Draw p50 and p95 latency over tokens/s, a line per server and a point per concurrency."""
    servers = _sweep(result)
    subtitle = f"{_subtitle(result, servers[0][0])}; small figures: requests at a time"
    drawn, both = panels("Latency and throughput", subtitle, (1, 2))
    for axes, name in zip(both, ("p50", "p95"), strict=True):
        for rows in servers:
            colour, marker = _look(rows[0])
            points = [(row["tokens_per_second"], row["latency_ms"][name] / 1e3) for row in rows]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label(rows[0]))
            for row, point in zip(rows, points, strict=True):
                _above(axes, str(row["load"]["concurrency"]), point, 6.5, colour)
        axes.set_yscale("log")
        _decades(axes.yaxis)
        axes.set_xlim(left=0)
        axes.set_title(name)
        axes.set_xlabel("tokens/s")
        axes.legend(loc="upper left")
    both[0].set_ylabel("latency of a request, s")
    return svg(drawn)


@styled
def scaling(result: Result) -> str:
    """Draw tokens/s over concurrency, with each server's limit as a dashed line of its colour."""
    servers = _sweep(result)
    subtitle = f"{_subtitle(result, servers[0][0])}; dashed: the device's limit for the same load"
    drawn, (axes,) = panels("Throughput and requests at a time", subtitle, height=5.0)
    for rows in servers:
        colour, marker = _look(rows[0])
        steps = [row["load"]["concurrency"] for row in rows]
        limits = [row["limit"]["tokens_per_second"] for row in rows]
        axes.plot(steps, [*map(_rate, rows)], color=colour, marker=marker, label=label(rows[0]))
        axes.plot(steps, limits, color=colour, linestyle=_DASHED, linewidth=1.2, label=f"limit of {label(rows[0])}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _decades(axes.yaxis)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("tokens/s")
    axes.legend()
    return svg(drawn)


def by_lengths(result: Result) -> str:
    """Draw tokens/s of the article's servers at each distribution of output lengths."""
    return _grouped(result, result.measured("article/"), "Output lengths: what equal ones hide")


def peers(result: Result) -> str:
    """Draw tokens/s of this server and the baselines in a closed loop."""
    return _grouped(result, result.measured("peers/closed/"), "The same model in other servers, closed loop")


@styled
def _grouped(result: Result, rows: Sequence[Row], title: str) -> str:
    """Draw a panel of bars for each distribution of lengths, on one scale."""
    mixes = {row["load"]["mix"]: lengths(row["load"]) for row in rows}
    load = f"{rows[0]['load']['concurrency']} requests at a time"
    subtitle = f"{result.subject()}; {load}; in brackets: of the device's limit"

    def text(row: Row) -> str:
        return f"{figure(_rate(row))} ({percent(row['limit']['fraction'])})"

    longest = max(map(_rate, rows))
    servers = len({row["server"] for row in rows})
    drawn, each = panels(title, subtitle, (1, len(mixes)), height=1.75 + 0.36 * servers, left=1.9)
    for axes, (mix, name) in zip(each, mixes.items(), strict=True):
        _bars(axes, [row for row in rows if row["load"]["mix"] == mix], _rate, text)
        _horizontal(axes, name, "tokens/s", 1.45 * longest)
    return svg(drawn)


@styled
def streaming(result: Result) -> str:
    """Draw TTFT, ITL and goodput of the streaming servers under Poisson arrivals."""
    rows = [row for row in result.measured("peers/poisson/") if "time_to_first_token_ms" in row]
    rate = figure(rows[0]["load"]["rate_per_second"])
    subtitle = f"{result.subject()}; Poisson arrivals; {rate} requests/s; new tokens: {lengths(rows[0]['load'])}"
    height = 1.75 + 0.42 * len(rows)
    drawn, (first, between, good) = panels(
        "Streams: how soon and how steadily", subtitle, (1, 3), height=height, left=1.9
    )
    _ranges(first, rows, "time to first token", "time_to_first_token_ms")
    _ranges(between, rows, "between two tokens", "inter_token_latency_ms")
    _bars(good, rows, lambda row: 100 * row["goodput"]["share"], lambda row: percent(row["goodput"]["share"]))
    _horizontal(good, "within the objective", "% of all requests", 145)
    good.set_xticks([0, 50, 100])
    return svg(drawn)


@styled
def pareto(result: Result) -> str:
    """Draw tokens/s over p95 of the tuned points, the Pareto front, the recommended point and the bound on p95.

    The front's points are numbered and their settings listed beside the plot: on a real front they lie close together.
    """
    points = tuned(result)
    load, bound = result.content["settings"]["load"], result.content["slo_p95_ms"] / 1e3
    subtitle = f"{result.subject()}; {arrivals(load)}; new tokens: {lengths(load)}; up and left is better"
    drawn, (axes,) = panels("Settings: throughput and latency", subtitle, right=3.3)
    front = sorted((point for point in points if point["pareto"]), key=_p95)
    shown = sorted((point for point in points if point["pareto"] or point["recommended"]), key=_p95)
    others = [point for point in points if not point["pareto"]]
    axes.plot([*map(_p95, others)], [*map(_rate, others)], "o", color=GREY)
    axes.plot([*map(_p95, front)], [*map(_rate, front)], "-", color=BLUE)
    shared, differing = _settings(shown)
    for number, (point, settings) in enumerate(zip(shown, differing, strict=True), start=1):
        place = (_p95(point), _rate(point))
        colour, marker, size = (VERMILION, "*", 14) if point["recommended"] else (BLUE, "o", 5)
        text = f"{number}  {settings}{', recommended' if point['recommended'] else ''}"
        axes.plot(*place, marker, color=colour, markersize=size, label=text)
        _above(axes, str(number), place, 9, colour)
    axes.axvline(bound, color=INK, linestyle=_DASHED, linewidth=1.2, label=f"bound: {_plain(bound)} s")
    axes.set_xlabel("p95 latency of a request, s")
    axes.set_ylabel("tokens/s")
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    axes.margins(0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), alignment="left", title=shared, title_fontsize=9)
    return svg(drawn)


def overhead(result: Result) -> str:
    """Draw the parts of the overhead account."""
    account = result.section("overhead")
    return icicle([Part(**part) for part in account["parts"]], f"{result.subject()}; {account_load(account)}")


@styled
def icicle(parts: Sequence[Part], subtitle: str) -> str:
    """Draw each whole as a bar with its parts below, as wide as their share. Raises ValueError without parts.

    A part that is too narrow for its name has none; the table names them all.
    """
    if not parts:
        raise ValueError("an account without parts can't be drawn")
    wholes = [part for part in parts if not part.parent]
    # With half a row of space behind each.
    rows = [1.5 + max(part.name.count("/") for part in parts if _whole(part) == whole.name) for whole in wholes]
    drawn, (axes,) = panels("Where the time goes", subtitle, height=1.55 + 0.3 * sum(rows), left=0.15)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(sum(rows), 0)
    for number, whole in enumerate(wholes):
        top, left = sum(rows[:number]), 0.0
        label = f"{whole.name}: {whole.seconds:.3g} {whole.unit}, {whole.per_token_us:,.0f} µs per token"
        _box(axes, [label], left, 1.0, top, _pale(GREY, 0))
        for part, colour in zip(_below(parts, whole), 9 * (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY), strict=False):
            left = _tree(axes, parts, part, left, top, colour)
    return svg(drawn)


def _tree(axes: Axes, parts: Sequence[Part], part: Part, left: float, top: float, colour: str) -> float:
    """Draw a part and what is below it; return its right edge."""
    name, depth = part.name.rsplit("/", 1)[-1], part.name.count("/")
    if name.startswith("the rest of "):
        colour = GREY
    # A rest of independent measurements can be below zero; it has no width.
    width = max(part.share, 0.0)
    _box(axes, [f"{name} {100 * width:.1f} %", name], left, width, top + depth, _pale(colour, depth))
    begin = left
    for below in _below(parts, part):
        begin = _tree(axes, parts, below, begin, top, colour)
    return left + width


def _box(
    axes: Axes, labels: Sequence[str], left: float, width: float, top: float, colour: tuple[float, float, float]
) -> None:
    """Draw a box with the first label that fits, if any does."""
    axes.add_patch(Rectangle((left, top), width, 0.94, facecolor=colour, edgecolor="white", linewidth=0.6))
    room = width * (_WIDTH - 0.4) / (0.95 * _LETTER) - 1
    label = next((label for label in labels if len(label) <= room), "")
    axes.text(left + 0.004, top + 0.47, label, va="center", fontsize=8, clip_on=True)


def _below(parts: Sequence[Part], above: Part) -> list[Part]:
    return [part for part in parts if part.parent == above.name]


def _whole(part: Part) -> str:
    return part.name.split("/")[0]


def _pale(colour: str, depth: int) -> tuple[float, float, float]:
    """Return the colour mixed with white, paler with depth, so that black text stays readable on it."""
    share = 0.5 + 0.08 * depth
    red, green, blue = (one * (1 - share) + share for one in to_rgb(colour))
    return red, green, blue


def _look(row: Row) -> tuple[str, str]:
    return _LOOKS.get(row["server"], _OTHER)


def _rate(row: Row) -> float:
    rate: float = row["tokens_per_second"]
    return rate


def _p95(point: Row) -> float:
    p95: float = point["p95_ms"] / 1e3
    return p95


def _sweep(result: Result) -> list[list[Row]]:
    """Return each server's measurements by rising concurrency."""
    servers: dict[str, list[Row]] = {}
    for row in sorted(result.measured("sweep/"), key=lambda row: row["load"]["concurrency"]):
        servers.setdefault(row["server"], []).append(row)
    return list(servers.values())


def _subtitle(result: Result, row: Row) -> str:
    return f"{result.subject()}; new tokens: {lengths(row['load'])}"


def _bars(axes: Axes, rows: Sequence[Row], length: Callable[[Row], float], text: Callable[[Row], str]) -> None:
    """Draw a bar per row, at its server's place in all panels."""
    for row in rows:
        axes.barh(label(row), length(row), height=0.62, color=_look(row)[0])
        _right(axes, text(row), (length(row), label(row)))


def _ranges(axes: Axes, rows: Sequence[Row], title: str, times: str) -> None:
    """Draw a line from p50 to p95 for each server; the marker is the median."""
    longest = 0.0
    for row in rows:
        p50, p95, place, (colour, marker) = row[times]["p50"], row[times]["p95"], label(row), _look(row)
        axes.plot([p50, p95], [place] * 2, color=colour, linewidth=4, alpha=0.45, solid_capstyle="butt")
        axes.plot([p50], [place], marker, color=colour, markersize=7)
        axes.plot([p95], [place], "|", color=colour, markersize=9, markeredgewidth=2)
        _right(axes, f"{figure(p50)} – {figure(p95)}", (p95, place))
        longest = max(longest, p95)
    _horizontal(axes, f"{title}, p50 to p95", "ms", 1.6 * longest)


def _horizontal(axes: Axes, title: str, unit: str, longest: float) -> None:
    """Finish a panel of bars or ranges: its scale, with room for the figures, the first server at the top."""
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_xlim(0, longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(_plain)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    # Shared by all panels.
    axes.yaxis.set_inverted(True)
    axes.margins(y=0.04)


def _right(axes: Axes, text: str, place: tuple[float, str]) -> None:
    """Write a text to the right of a bar or a range."""
    axes.annotate(text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _above(axes: Axes, text: str, place: tuple[float, float], size: float, colour: str) -> None:
    """Write a text above a point of a line, to the left."""
    axes.annotate(text, place, xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=size, color=colour)


def _decades(axis: Axis) -> None:
    """Mark 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_plain)


def _plain(value: float, _: object = None) -> str:
    """Return a tick's figure without needless zeros: 0.5, 10, 2,000."""
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:,g}"


def _settings(shown: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the settings that all points share, in short, and each point's others."""
    short = {
        "max_queue_delay_microseconds": "delay µs",
        "preferred_batch_size": "preferred",
        "prefill_tokens": "prefill",
    }
    each = [setting_texts(point) for point in shown]
    shared = {name for name in each[0] if len({texts.get(name) for texts in each}) == 1}

    def described(texts: Mapping[str, str], common: bool) -> str:
        chosen = {name: value for name, value in texts.items() if (name in shared) is common}
        return ", ".join(f"{short.get(name, name)} {value}" for name, value in chosen.items())

    return described(each[0], True), [described(texts, False) for texts in each]
