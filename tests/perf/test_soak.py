"""`make soak`: what counts as growth."""

from __future__ import annotations

import os

from perf.environment import family
from perf.soak import grown, memory_mib


def test_growth_counts_in_the_second_half_alone() -> None:
    assert grown([10.0, 50.0, 90.0, 100.0, 100.0, 100.0, 110.0, 130.0]) == 30.0


def test_the_memory_of_a_process_is_sampled_by_its_name() -> None:
    assert all(mib > 1.0 for mib in memory_mib(family(os.getpid())).values())
