"""A soak of seconds: every kind of action, counts, samples, verdict and picture.

Whether memory stays flat takes `make soak MINUTES=30`.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace

import pytest
from server.servers import is_decoupled, new_server
from triton_local.ports import Service
from triton_local.server import LocalTriton

from perf.soak import libraries
from perf.soak.__main__ import sections
from perf.soak.observed import Course
from perf.soak.picture import columns, picture
from perf.soak.soaking import soak
from perf.soak.stack import Stack
from perf.soak.verdict import FIGURES, judge
from perf.soak.verdict import lines as lines_of

# One round, and more on a machine that doesn't do every action in one.
SHORT = Course(
    seconds=1.0,
    users=12,
    steady_seconds=1.5,
    burst_seconds=1.0,
    rest_seconds=0.2,
    thinking_seconds=0.1,
    sample_seconds=0.1,
    late_rounds=20,
)


@pytest.mark.long
def test_a_soak_of_seconds_finds_no_fault(either: LocalTriton) -> None:
    lines: list[str] = []
    soaked = soak(Stack.around(either), SHORT, lines.append)
    findings = judge(soaked)
    outcomes = {one.name: one.outcome for one in findings}
    growing = {figure.name: outcomes.pop(figure.name) for figure in FIGURES}
    assert [one for one in findings if one.name in outcomes and one.outcome != "ok"] == []
    # Seconds prove nothing about growth. Left out: the GPU's memory, where there is none.
    assert set(growing.values()) <= {"can't be told", "left out"}
    untold = [*growing.values()].count("can't be told")
    assert ("stream" in soaked.kinds) is is_decoupled(either)
    assert 1 <= len(lines) == len(soaked.rests) <= 1 + SHORT.late_rounds
    assert "rest" in {sample.phase for sample in soaked.samples}
    assert soaked.fixed_text
    # The result file and the picture.
    written = json.loads(json.dumps(sections(soaked, findings)))
    assert written["counts"]["completed"]["length"] > 0
    assert len({len(column) for column in written["looks"].values()}) == 1
    assert ElementTree.fromstring(picture(columns(soaked.samples), "seconds")).tag.endswith("svg")
    of_all = f"{untold} of {len(findings)}"
    verdict = f"NOT PASSED: {of_all} can't be told and aren't counted, none of the others failed"
    assert lines_of(findings).splitlines()[-1] == written["verdict"] == verdict
    assert written["passed"] is False


@pytest.mark.campaign
def test_a_soak_with_restarts_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint, OpenAI's library, and a restart of each part with requests running.

    The libraries in environments of their own are among the tests of clients.
    """
    monkeypatch.setattr(libraries, "LIBRARIES", ())

    def make(ports: Mapping[Service, int]) -> LocalTriton:
        return new_server("streaming", ports=ports)

    with Stack.of(make) as stack:
        soaked = soak(stack, replace(SHORT, restart_seconds=1.0), lambda _: None)
    assert [one for one in judge(soaked) if one.outcome == "failed"] == []
    assert [one.part for one in soaked.restarts[:2]] == ["server", "endpoint"]
    assert all(one.running for one in soaked.restarts)
    assert soaked.tally.done["openai"]
    assert len(soaked.lives) == 1 + len(soaked.restarts)
