"""Ours and the baselines in a run: the same load for every server, and every failure recorded with its reason."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from perf.bench import __main__ as bench
from perf.bench import baselines
from perf.bench.measure import Pace
from perf.checkpoint import EMBEDDED, TINY_LLAMA, Shape, described
from perf.course import Budget, Course
from perf.load.arrivals import Closed, Poisson
from perf.load.protocols import Request, Target
from perf.load.records import TIME_OVER, Record, Run
from perf.load.summary import SLO
from perf.results_file import Results
from perf.roofline.rates import DeviceRates
from perf.servers.running import NotRunError, Running, Server

CONCURRENCY = 4
RATES = DeviceRates("cpu", 1, {2**20: 1e10}, {"fp32": 1e11, "int8": 1e11})
MIXES = ("closed/uniform", "closed/geometric", "poisson/uniform")


class Drive:
    """A load generator whose servers answer each request within a second; from number `until` on, never."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.until = math.inf

    def __call__(
        self, target: Target, requests: Sequence[Request], arrivals: Closed | Poisson, warmup: int, timeout: float
    ) -> Run:
        users = arrivals.concurrency if isinstance(arrivals, Closed) else 1
        before = self.asked.get(target.name, 0)
        records = []
        for number, request in enumerate(requests):
            due, answered = number // users, before + number < self.until
            error = "" if answered else TIME_OVER
            records.append(Record(due, due, due + 1.0, (), 100, request.output_tokens if answered else 0, error))
        self.asked[target.name] = before + len(requests)
        return Run(arrivals, tuple(records), warmup)


@contextmanager
def _running(key: str, checkpoint: Path, threads: int) -> Iterator[Running]:
    settings = {"threads": threads, "checkpoint": checkpoint.name}
    yield Running(Target(key, "fastapi", "http://127.0.0.1", "llama"), "serve it", settings, os.getpid(), 1.0)


def ours(key: str) -> Server:
    return Server(key, key, "ours", "fp32", partial(_running, key))


def failing(key: str, error: Exception) -> Server:
    def start(checkpoint: Path, threads: int) -> AbstractContextManager[Running]:
        raise error

    return Server(key, key, "peer", "fp32", start)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Drive:
    drive = Drive()
    monkeypatch.setattr(baselines, "drive", drive)
    monkeypatch.setattr("perf.bench.measure.drive", drive)
    return drive


@pytest.fixture
def run(driven: Drive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Course]:
    def of(
        *under_test: Server,
        seconds: float = 600.0,
        there: Sequence[str] = (),
        loads: Sequence[baselines.Load] | None = None,
    ) -> Course:
        monkeypatch.setattr(baselines, "servers", lambda: list(under_test))
        monkeypatch.setattr(baselines, "SLOTS", CONCURRENCY)
        monkeypatch.setattr(baselines, "CORES", 1)
        course = Course(Results(tmp_path / "bench.json", "bench", {}, False, tmp_path), Budget(seconds))
        for key in there:
            course.note(f"peers/{key}", {"tokens_per_second": 1.0, "errors": 0})
        baselines.Loads(course, EMBEDDED, SLO(2.0, 0.1), RATES).measure(
            under_test, baselines.peers() if loads is None else loads
        )
        return course

    return of


def not_run(course: Course, key: str) -> list[object]:
    return [course.results.measurements[f"peers/{mix}/{key}"].get("not_run") for mix in MIXES]


def test_a_server_that_can_not_run_is_recorded_and_the_next_one_follows(run: Callable[..., Course]) -> None:
    course = run(failing("absent", subprocess.CalledProcessError(3, ["vllm"])), failing("next", NotRunError("no")))
    reason = "CalledProcessError: Command '['vllm']' returned non-zero exit status 3."
    assert not_run(course, "absent") == [reason] * 3
    assert not_run(course, "next") == ["NotRunError: no"] * 3
    named = {"server": "absent", "title": "absent", "family": "peer", "weights": "FP32"}
    assert course.results.measurements["peers/closed/uniform/absent"] == {**named, "not_run": reason}


@pytest.mark.parametrize(("seconds", "shapes"), [(5.0, []), (600.0, [TINY_LLAMA])], ids=["without time", "with time"])
def test_the_larger_checkpoint_is_made_and_a_server_started_only_while_there_is_time(
    run: Callable[..., Course], monkeypatch: pytest.MonkeyPatch, seconds: float, shapes: list[Shape]
) -> None:
    made: list[Shape] = []

    def make(shape: Shape, folder: Path) -> Path:
        made.append(shape)
        return EMBEDDED

    monkeypatch.setattr(bench, "random_checkpoint", make)
    course = run(seconds=seconds)
    loads = baselines.Loads(course, EMBEDDED, SLO(2.0, 0.1), RATES)
    bench.larger_model(loads, [failing("vllm", NotRunError("no")), failing("elsewhere", NotRunError("no"))])
    assert made == shapes
    found = course.results.measurements
    assert set(found) == {f"large/{users}/vllm" for users in (CONCURRENCY, 1)}
    said = "NotRunError: no" if shapes else "are left of --budget"
    assert all(str(one["not_run"]).endswith(said) for one in found.values())


def test_every_server_gets_the_same_load(
    run: Callable[..., Course], driven: Drive, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of ours can't run: the rate is the second one's, and one before that has none."""
    monkeypatch.setattr(baselines, "OPEN_SECONDS", 0.1)
    course = run(
        failing("first", NotRunError("no")),
        ours("early"),
        ours("second"),
        # What is measured already takes no time here, and has no rate.
        there=("closed/uniform/early", "closed/geometric/early", "closed/geometric/second"),
    )
    reason = "NoRateError: the rate is a share of our own server's in the closed loop (uniform), which wasn't measured"
    assert not_run(course, "early") == [None, None, reason]
    assert not_run(course, "second") == [None, None, None]
    closed, opened = (course.results.measurements[f"peers/{mix}/uniform/second"] for mix in ("closed", "poisson"))
    assert (closed["requests"], closed["errors"]) == (baselines.MEASURED, 0)
    assert closed["load"]["warmup_requests"] == CONCURRENCY
    assert closed["whole_run"]["requests"] == baselines.MEASURED + CONCURRENCY
    assert opened["load"]["rate_per_second"] == round(baselines.OPEN_SHARE * closed["requests_per_second"], 3)
    assert opened["requests"] == max(baselines.OPEN_LEAST, round(0.1 * opened["load"]["rate_per_second"]))
    # A server whose load has no rate is not even warmed up.
    assert driven.asked == {"second": 3 * CONCURRENCY + baselines.MEASURED + opened["requests"]}
    assert f"second runs: serve it\n  threads: 1\n  checkpoint: {EMBEDDED.name}" in capsys.readouterr().out


def test_a_server_that_is_still_at_work_gets_no_further_load(run: Callable[..., Course], driven: Drive) -> None:
    # The two waves of the pace are answered, and half of the first load.
    driven.until = 2 * CONCURRENCY + 32
    course = run(ours("ours"))
    measured = course.results.measurements["peers/closed/uniform/ours"]
    assert measured["unanswered"] == measured["errors"] == CONCURRENCY + baselines.MEASURED - 32
    reason = f"RuntimeError: {measured['unanswered']} requests of the last load weren't answered in time"
    assert not_run(course, "ours") == [None, reason, reason]
    assert driven.asked == {"ours": 3 * CONCURRENCY + baselines.MEASURED}


def test_a_number_of_users_has_a_load_of_each_mix_and_its_pace_is_measured_once(
    run: Callable[..., Course], driven: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "USERS", (6,))
    measured = run(ours("ours"), loads=baselines.by_users()).results.measurements
    assert {key: (one["requests"], one["load"]["concurrency"], one["errors"]) for key, one in measured.items()} == {
        f"users/{mix}/6/ours": (12, 6, 0) for mix in ("uniform", "geometric")
    }
    assert {one["model"] for one in measured.values()} == {described(EMBEDDED)}
    # Two waves of the pace, then of each mix a warm-up of one request a user, and what is measured.
    assert driven.asked == {"ours": 2 * 6 + 2 * (6 + 12)}


def test_a_load_that_is_predicted_to_take_too_long_is_not_run_and_the_next_one_follows(
    run: Callable[..., Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = {1: Pace(1, 60.0, 60.0), 2: Pace(2, 0.1, 0.1)}
    monkeypatch.setattr(baselines, "measured_pace", lambda *arguments: paces[arguments[3]])
    loads = [baselines.Load(f"users/uniform/{users}", "uniform", users, 8) for users in (1, 2)]
    slow, quick = run(ours("ours"), loads=loads).results.measurements.values()
    assert slow["not_run"] == "9 requests take 540 s; a load may take 300 s"
    assert quick["errors"] == 0
