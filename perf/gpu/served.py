"""The article's table on this GPU, through Triton and perf_analyzer: `bench.articles`, within what time is left.

Needs what the rest of a run doesn't: tritonserver, its Python backend's stub for this Python, perf_analyzer.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import articles
from bench.course import Course
from limit.rates import DeviceRates
from setting.checkpoint import default_checkpoint

from gpu.options import Options

CONCURRENCY = 32
"""The article's."""


@dataclass(frozen=True)
class _Asked:
    concurrency: int
    threads: int


def article(course: Course, options: Options, rates: DeviceRates) -> None:
    """Measure every subject of the article's table, at equal lengths; what there is no time for says so."""
    # On disk, since servers load it: of Llama-2-7B's shape it takes 13 GB there.
    checkpoint = default_checkpoint()
    articles.tables(course, _Asked(CONCURRENCY, options.threads), checkpoint, rates, ["equal"], course.budget.left)
