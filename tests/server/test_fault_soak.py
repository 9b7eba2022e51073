"""A soak of seconds: every kind of action, counts, samples, verdict and picture.

Whether memory stays flat takes `make soak MINUTES=30`.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

import pytest
from server.servers import new_server
from triton_local.ports import Service
from triton_local.server import LocalTriton

from perf.soak.__main__ import sections
from perf.soak.observed import Course
from perf.soak.picture import picture
from perf.soak.soaking import soak
from perf.soak.stack import Stack
from perf.soak.verdict import FIGURES, judge


@pytest.mark.parametrize(
    ("variant", "restart_seconds"),
    [
        pytest.param("default", None, marks=pytest.mark.long),
        pytest.param("streaming", None, marks=pytest.mark.long),
        pytest.param("default", 1.0, marks=pytest.mark.campaign),
        pytest.param("streaming", 1.0, marks=pytest.mark.campaign),
    ],
)
async def test_a_soak_of_seconds_finds_no_fault(
    variant: str, restart_seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The libraries in environments of their own are among the tests of clients.
    monkeypatch.setattr("perf.soak.soaking.installed", list)

    def make(ports: Mapping[Service, int]) -> LocalTriton:
        return new_server(variant, ports=ports)

    # One round, and more on a machine that doesn't do every action in one.
    course = Course(
        seconds=1.0,
        users=12,
        steady_seconds=1.5,
        burst_seconds=1.0,
        rest_seconds=0.2,
        thinking_seconds=0.1,
        sample_seconds=0.1,
        late_rounds=20,
        restart_seconds=restart_seconds,
    )
    with Stack(make) as stack:
        soaked = await soak(stack, course, lambda _: None)
    findings = judge(soaked)
    growing = {name for name, *_ in FIGURES}
    assert [one for one in findings if one.name not in growing and one.outcome != "ok"] == []
    # Seconds prove nothing about growth. Left out: the GPU's memory, where there is none.
    assert {one.outcome for one in findings if one.name in growing} <= {"can't be told", "left out"}
    assert ("stream" in soaked.kinds) is (variant == "streaming")
    assert 1 <= len(soaked.rests) <= 1 + course.late_rounds
    assert "rest" in {sample["phase"] for sample in soaked.samples}
    # The result file and the picture.
    written = json.loads(json.dumps(sections(soaked, findings)))
    assert written["passed"] is False
    assert written["counts"]["length"] > 0
    assert len({len(column) for column in written["looks"].values()}) == 1
    assert ElementTree.fromstring(picture(soaked.samples, "seconds")).tag.endswith("svg")
    parts = [one["part"] for one in soaked.restarts]
    assert parts[:2] == ([] if restart_seconds is None else ["server", "endpoint"])
    assert all(one["running"] for one in soaked.restarts)
    assert len(soaked.lives) == 1 + len(parts)
