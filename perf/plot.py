"""Draw docs/speed.svg: tokens/s at 32 users over the KL divergence of what a server computes (`make report`)."""

from __future__ import annotations

import math

from perf.environment import ROOT
from perf.load.workload import SLOTS
from perf.report import distance
from perf.results_file import RESULTS, at, read
from perf.table import figure

PICTURE = ROOT / "docs" / "speed.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP = 720, 400, 70, 50, 20, 30
COLORS = {"triton_llama": "#0969da", "vllm": "#8250df", "llama_cpp": "#bc4c00", "openvino": "#1a7f37"}


def picture() -> str:
    """Return the picture of the committed results that have a quality measurement; without any, an empty one."""
    path = RESULTS / "bench-smollm2.json"
    rows = read(path).measured() if path.exists() else []
    points = [
        (math.log10(at(quality, "kl_nats/mean")), row["tokens_per_second"], row)
        for row in rows
        if row["load"]["concurrency"] == SLOTS and (quality := distance(row))
    ]
    least = math.floor(min((x for x, _, _ in points), default=-3))
    most = math.ceil(max((x for x, _, _ in points), default=-1))
    step = 200
    top = step * math.ceil(max((y for _, y, _ in points), default=1) / step)

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - least) / (most - least)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / top

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for power in range(least, most + 1):
        x = across(power)
        lines.append(f'<line x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{up(0):.0f}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.0f}" y="{up(0) + 18:.0f}" text-anchor="middle">{10.0**power:g}</text>')
    for tick in range(round(top / step) + 1):
        y = up(tick * step)
        lines.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{WIDTH - RIGHT}" y2="{y:.0f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{tick * step:,}</text>')
    lines.append(f'<text x="{LEFT}" y="18">tokens/s, {SLOTS} users</text>')
    caption = "KL divergence from FP32 in nats: further left is nearer to the weights"
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{caption}</text>')
    last = 0.0
    for x, y, row in sorted(points, key=lambda point: -point[1]):
        color = next(color for key, color in COLORS.items() if row["server"].startswith(key))
        lines.append(f'<circle cx="{across(x):.0f}" cy="{up(y):.0f}" r="5" fill="{color}"/>')
        # Above its point, or below if the last one is there; where it would leave the picture, it ends at its point.
        last = up(y) + 20 if up(y) - 10 - last < 16 else up(y) - 10
        anchor = "end" if across(x) > WIDTH * 0.65 else "start"
        label = f"{row['title']}: {figure(y)}"
        lines.append(f'<text x="{across(x):.0f}" y="{last:.0f}" text-anchor="{anchor}" fill="{color}">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
