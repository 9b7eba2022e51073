"""The article's two tables: its three configurations and ours, at equal and at mixed lengths, by perf_analyzer.

Every entry has a fresh server. On a CPU the mixed lengths are measured without the FP16 configurations: it computes
FP16 many times slower than FP32, and the table of equal lengths shows that cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from perf.analyzer.binary import fetched
from perf.bench.measure import Measurement, article_entry
from perf.command import CORES
from perf.course import START_S, Course
from perf.roofline.rates import DeviceRates
from perf.servers.triton import Configuration, configurations, serving
from perf.workload import Mix


def tables(
    course: Course,
    concurrency: int,
    checkpoint: Path,
    rates: DeviceRates,
    mixes: Sequence[Mix],
    seconds: float,
) -> None:
    """Measure every configuration under every mix, `seconds` for all of them together."""
    tasks = [
        (mix, one)
        for mix in mixes
        for one in configurations()
        if mix == "equal" or one.weights != "fp16" or torch.cuda.is_available()
    ]
    until = course.budget.spent + seconds

    def task(one: Configuration, mix: Mix, share: float) -> Measurement:
        course.refuse_without(START_S)
        fetched()  # without perf_analyzer no server is started
        with serving(one, checkpoint, CORES, course.budget.left) as served:
            return article_entry(course, one, served, checkpoint, mix, concurrency, rates, share)

    for number, (mix, one) in enumerate(tasks):
        share = (until - course.budget.spent) / (len(tasks) - number)
        course.measure(f"article/{mix}/{one.key}", one.to_json(), partial(task, one, mix, share))
