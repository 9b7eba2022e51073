"""The loss curve as an SVG: training loss and held-out loss, in nats per token, over the steps."""

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 130, 16, 40
# Readable on a light and on a dark page.
TRAINING_COLOUR, HELD_OUT_COLOUR, GREY = "#2f81f7", "#d1711d", "#808890"


def curve(log: Sequence[dict[str, float]]) -> str:
    """Return the SVG of a log: training.json's rows with step, loss and held_out_perplexity."""
    steps = [row["step"] for row in log]
    series = {
        "training": [row["loss"] for row in log],
        "held out": [math.log(row["held_out_perplexity"]) for row in log],
    }
    values = [value for line in series.values() for value in line]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + across * step / steps[-1]

    def y(value: float) -> float:
        return TOP + down * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="Loss over training steps">'
    ]
    tick = low
    while tick <= high:
        parts.append(
            f'<path d="M{LEFT} {y(tick):.1f}h{across}" stroke="{GREY}" stroke-opacity=".3"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="{GREY}">{tick:.1f}</text>'
        )
        tick += 0.5
    for quarter in range(5):
        step = steps[-1] * quarter / 4
        parts.append(
            f'<text x="{x(step):.1f}" y="{TOP + down + 18}" text-anchor="middle" fill="{GREY}">{step:.0f}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="{GREY}">steps; loss in nats per token</text>')
    for (name, line), colour in zip(series.items(), (TRAINING_COLOUR, HELD_OUT_COLOUR), strict=True):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, line, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{LEFT + across + 8}" y="{y(line[-1]) + 4:.1f}" fill="{colour}">{name} {line[-1]:.2f}</text>'
        )
    return "\n".join(parts) + "\n</svg>\n"
