"""The article's tables on this GPU, through Triton and perf_analyzer, in the remaining time.

The aims' servers come first, the naive server, which takes longest, last. Needs tritonserver, its Python backend's stub
for this Python, and perf_analyzer.
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
    """Measure every server of the article's tables, equal lengths first; each within the time left."""
    # Servers are other processes: what this one's allocator caches is missing from their memory plans.
    torch.cuda.empty_cache()
    # On disk, where servers load it from: 13 GB at Llama-2-7B's shape.
    checkpoint = default_checkpoint()
    for mix in ("equal", "uniform"):
        articles.tables(course, CONCURRENCY, options.threads, checkpoint, rates, [mix], course.budget.left, _ours_first)


def _ours_first(configurations: Sequence[Configuration]) -> Sequence[Configuration]:
    return sorted(configurations, key=lambda one: (-one.quick, -one.max_batch_size))
