"""The article's tables on this GPU, through Triton and perf_analyzer: `bench.articles`, within what time is left.

What the aims are about comes first, and the article's naive server, which takes longest, last.

Needs what the rest of a run doesn't: tritonserver, its Python backend's stub for this Python, perf_analyzer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perf.article.configurations import Configuration
from perf.bench import articles
from perf.checkpoint import default_checkpoint
from perf.course import Course
from perf.gpu.options import Options
from perf.roofline.rates import DeviceRates

CONCURRENCY = 32
"""The article's."""


def article(course: Course, options: Options, rates: DeviceRates) -> None:
    """Measure every subject of the article's tables, equal lengths first; what there is no time for says so."""
    # Servers are processes of their own: what this one's allocator keeps is missing from their memory plans.
    torch.cuda.empty_cache()
    # On disk, since servers load it: of Llama-2-7B's shape it takes 13 GB there.
    checkpoint = default_checkpoint()
    for mix in ("equal", "uniform"):
        articles.tables(course, CONCURRENCY, options.threads, checkpoint, rates, [mix], course.budget.left, _ours_first)


def _ours_first(configurations: Sequence[Configuration]) -> Sequence[Configuration]:
    return sorted(configurations, key=lambda one: (-one.quick, -one.max_batch_size))
