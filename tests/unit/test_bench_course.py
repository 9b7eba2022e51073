"""A run's course: every task once, what fails is written down with its reason, and the others go on."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from perf.course import Budget, Course, NoTimeError
from perf.results import Results

NAME = {"server": "a", "title": "A"}
SETTINGS = {"command": "make bench", "model": "a made-up Llama"}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of four processors that were idle, in use and stolen, as the system says them; nothing happens."""
    seconds = [50.0, 40.0, 10.0]
    times = namedtuple("times", "idle user steal")
    monkeypatch.setattr("perf.environment.psutil.cpu_times", lambda: times(*seconds))
    return seconds


def course(path: Path, seconds: float = 60.0, resume: bool = False) -> Course:
    return Course(Results(path, "bench", SETTINGS, resume), Budget(seconds))


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())["measurements"]
    return content


def test_one_failure_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = course(tmp_path / "bench.json")

    def fail() -> dict[str, object]:
        raise RuntimeError("the server is gone\nand more lines")

    run.measure("one", NAME, fail)
    run.measure("other", NAME, lambda: {"tokens_per_second": 7.0, "errors": 0})
    run.results.finish()
    assert written(tmp_path / "bench.json") == {
        "one": {**NAME, "not_run": "RuntimeError: the server is gone"},
        "other": {"tokens_per_second": 7.0, "errors": 0, "stolen_share": 0.0},
    }
    assert "one: not run: RuntimeError: the server is gone" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_missing_in_silence(tmp_path: Path) -> None:
    run = course(tmp_path / "bench.json", seconds=10.0)
    run.refuse_without(5.0)

    def too_long() -> dict[str, object]:
        run.refuse_without(500.0)
        raise AssertionError("it was begun")

    run.measure("long", NAME, too_long)
    assert "takes 500 s; " in str(run.results.measurements["long"]["not_run"])
    with pytest.raises(NoTimeError, match=r"; 0 s are left of --budget"):
        course(tmp_path / "other.json", seconds=-3.0).refuse_without(1.0)


def test_a_resumed_run_measures_again_what_is_there_or_not_what_failed(tmp_path: Path) -> None:
    first = course(tmp_path / "bench.json")
    first.measure("there", NAME, lambda: {"tokens_per_second": 1.0, "errors": 0})
    first.note("failed", {**NAME, "not_run": "no wheel"})
    first.results.finish()
    again = course(tmp_path / "bench.json", resume=True)
    for key in ("there", "failed"):
        again.measure(key, NAME, lambda: {"tokens_per_second": 2.0, "errors": 0})
    again.results.finish()
    assert {key: found["tokens_per_second"] for key, found in written(tmp_path / "bench.json").items()} == {
        "there": 1.0,
        "failed": 2.0,
    }


def test_what_a_measurement_says_of_itself_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = course(tmp_path / "bench.json")
    run.note("check", {"passed": True, "in_short": "145 tokens, 0 ties: passed"})
    assert capsys.readouterr().out.endswith("] check: 145 tokens, 0 ties: passed\n")


def test_a_run_under_other_settings_is_gone_on_with(tmp_path: Path) -> None:
    course(tmp_path / "bench.json").results.finish()
    with pytest.raises(ValueError, match="has other settings"):
        Results(tmp_path / "bench.json", "bench", {**SETTINGS, "threads": 3}, resume=True)


def test_what_the_host_took_before_counts_or_nothing_does(tmp_path: Path, host: list[float]) -> None:
    def slow() -> dict[str, object]:
        host[:] = [52.0, 45.0, 13.0]
        return {"tokens_per_second": 7.0, "errors": 0}

    run = course(tmp_path / "bench.json")
    run.measure("slow", NAME, slow)
    run.measure("quick", NAME, lambda: {"tokens_per_second": 7.0, "errors": 0})
    assert [found["stolen_share"] for found in run.results.measurements.values()] == [0.3, 0.0]


def test_a_system_that_does_not_tell_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = namedtuple("without", "idle user")
    monkeypatch.setattr("perf.environment.psutil.cpu_times", lambda: without(50.0, 40.0))
    run = course(tmp_path / "bench.json")
    run.measure("one", NAME, lambda: {"tokens_per_second": 7.0, "errors": 0})
    assert run.results.measurements["one"]["stolen_share"] == 0.0
