"""Names at the ends of lines don't cover each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

from perf.report.plots.labels import apart


def test_names_with_room_stay_where_they_are() -> None:
    assert apart([30.0, 10.0, 50.0], 15) == [30.0, 10.0, 50.0]


@pytest.mark.parametrize("wanted", [[10.0, 10.0, 10.0], [0.0, 4.0, 21.0, 22.0], [5.0, 1.0, 9.0, 40.0, 41.0, 30.0]])
def test_names_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    placed = apart(wanted, 12)
    assert len(placed) == len(wanted)
    in_order = [height for _, height in sorted(zip(wanted, placed, strict=True))]
    assert all(upper - lower >= 12 - 1e-9 for lower, upper in pairwise(in_order))
    # Moved around the middle, not all to one side.
    assert sum(placed) == pytest.approx(sum(wanted))


def test_no_names_need_no_room() -> None:
    assert apart([], 12) == []
