"""A run's course, the command lines of bench and sweep, and how many requests fit into the time."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from perf.bench import sweep
from perf.bench.__main__ import parse
from perf.bench.counters import NAMES, Samples
from perf.bench.measure import Pace, article_entry, choose
from perf.checkpoint import EMBEDDED
from perf.course import Budget, Course, NoTimeError
from perf.load.arrivals import Closed
from perf.load.protocols import Request, Target
from perf.load.records import Record, Run
from perf.results_file import Results
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.triton import Served, configurations
from perf.workload import PROMPT_TOKENS, lengths

NAME = {"server": "a", "title": "A"}
SETTINGS = {"command": "make bench", "model": "a small Llama"}
FOUND: dict[str, object] = {"tokens_per_second": 7.0, "errors": 0}


@pytest.fixture(autouse=True)
def cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of all processors, idle, in use and steal time, as the system reports them."""
    seconds = [50.0, 40.0, 10.0]
    times = namedtuple("times", "idle user steal")
    monkeypatch.setattr("perf.environment.psutil.cpu_times", lambda: times(*seconds))
    return seconds


def course(path: Path, seconds: float = 60.0, resume: bool = False) -> Course:
    return Course(Results(path, "bench", SETTINGS, resume), Budget(seconds))


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())["measurements"]
    return content


def test_a_failed_task_is_recorded_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = course(tmp_path / "bench.json")

    def fail() -> dict[str, object]:
        raise RuntimeError("the server is gone\nand more lines")

    run.measure("one", NAME, fail)
    run.measure("other", NAME, lambda: FOUND)
    run.results.finish()
    assert written(tmp_path / "bench.json") == {
        "one": {**NAME, "not_run": "RuntimeError: the server is gone"},
        "other": {**FOUND, "stolen_share": 0.0},
    }
    assert "one: not run: RuntimeError: the server is gone" in capsys.readouterr().out


def test_a_task_without_time_is_recorded(tmp_path: Path) -> None:
    run = course(tmp_path / "bench.json", seconds=10.0)
    run.refuse_without(5.0)

    def too_long() -> dict[str, object]:
        run.refuse_without(500.0)
        raise AssertionError("the task has begun")

    run.measure("long", NAME, too_long)
    assert "takes 500 s; " in str(run.results.measurements["long"]["not_run"])
    with pytest.raises(NoTimeError, match=r"; 0 s are left of --budget"):
        course(tmp_path / "other.json", seconds=-3.0).refuse_without(1.0)


def test_a_resumed_run_measures_only_what_failed(tmp_path: Path) -> None:
    first = course(tmp_path / "bench.json")
    first.measure("there", NAME, lambda: FOUND)
    first.note("failed", {**NAME, "not_run": "no wheel"})
    first.results.finish()
    again = course(tmp_path / "bench.json", resume=True)
    for key in ("there", "failed"):
        again.measure(key, NAME, lambda: {"tokens_per_second": 2.0, "errors": 0})
    again.results.finish()
    found = written(tmp_path / "bench.json")
    assert {key: one["tokens_per_second"] for key, one in found.items()} == {"there": 7.0, "failed": 2.0}


def test_a_measurement_s_own_summary_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    course(tmp_path / "bench.json").note("check", {"passed": True, "in_short": "145 tokens, 0 ties: passed"})
    assert capsys.readouterr().out.endswith("] check: 145 tokens, 0 ties: passed\n")


def test_only_the_steal_time_of_the_task_itself_counts(tmp_path: Path, cpu_seconds: list[float]) -> None:
    def slow() -> dict[str, object]:
        cpu_seconds[:] = [52.0, 45.0, 13.0]
        return FOUND

    run = course(tmp_path / "bench.json")
    run.measure("slow", NAME, slow)
    run.measure("quick", NAME, lambda: FOUND)
    assert [found["stolen_share"] for found in run.results.measurements.values()] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("parser", "line", "command"),
    [
        (parse, "--only peers --without vllm", "make bench MODEL=pydoc-llama 'BENCH=--only peers --without vllm'"),
        (sweep.parse, "inflight_int8 naive_fp16", "make sweep MODEL=pydoc-llama 'SWEEP=inflight_int8 naive_fp16'"),
        (parse, "", "make bench MODEL=pydoc-llama"),
    ],
)
def test_the_command_repeats_a_run_without_folders_of_this_machine(
    parser: Callable[[list[str]], Any], line: str, command: str
) -> None:
    assert parser([*line.split(), "--budget", "5", "--model", str(EMBEDDED)]).command == command


def pace(wave_s: float, concurrency: int = 32) -> Pace:
    """Return a pace at which a wave of 200 tokens takes `wave_s`: a fifth for the prompts, the rest in proportion."""
    fixed, per_token = 0.2 * wave_s, 0.8 * wave_s / 200
    return Pace(concurrency, fixed + 4 * per_token, fixed + 20 * per_token)


def test_the_pace_of_short_requests_predicts_long_ones() -> None:
    assert pace(100.0).seconds(32) == pytest.approx(100.0)
    assert pace(100.0).seconds(16, 400) == pytest.approx(90.0)
    assert Pace(32, 2.0, 1.5).seconds(32, 200) == 2.0, "longer requests are never predicted to be faster"


@pytest.mark.parametrize(
    ("seconds", "requests"),
    # Of a slow server the minimum is chosen all the same.
    [(10_000, 96), (400, 96), (399, 64), (201, 32), (199, 32), (1, 32)],
)
def test_the_warm_up_and_whole_waves_fit_into_the_time(seconds: float, requests: int) -> None:
    assert choose(seconds, pace(99.999)) == requests


@pytest.mark.parametrize(("concurrency", "least"), [(1, 8), (3, 8), (24, 32), (128, 32)])
@pytest.mark.parametrize("seconds", [0.5, 50, 5000])
def test_between_the_minimum_and_three_waves_are_measured(concurrency: int, least: int, seconds: float) -> None:
    requests = choose(seconds, pace(10.0, concurrency), least)
    assert max(least, concurrency) <= requests <= 3 * max(least, concurrency)


@contextmanager
def counted(_: str) -> Iterator[Samples]:
    yield Samples([(0.0, dict.fromkeys(NAMES, 0.0)), (100.0, dict.fromkeys(NAMES, 1000.0))])


def test_the_article_is_measured_over_grpc_and_its_warm_up_counts_for_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[tuple[str, int, int]] = []

    def measure(
        url: str, requests: Sequence[Request], concurrency: int, warmup: int, timeout: float
    ) -> tuple[Run, str]:
        """Answer a request in a second, one after the other; the warm-up's prompts have 60 tokens, the others 120."""
        runs.append((url, len(requests), warmup))
        records = tuple(
            Record(number, number, number + 1.0, (), 60 if number < warmup else 120, request.output_tokens, "")
            for number, request in enumerate(requests)
        )
        return Run(Closed(concurrency), records, warmup), "perf_analyzer"

    monkeypatch.setattr("perf.bench.measure.analyzer.measure", measure)
    monkeypatch.setattr("perf.bench.measure.sampled", counted)
    triton: Any = SimpleNamespace(grpc_url="grpc:1", metrics_url="metrics:1")
    served = Served(Target("a", "triton_generate", "http:1", "llama"), "make serve", {}, os.getpid(), 1.0, triton)
    rates = DeviceRates("cpu", 1, {2**20: 1e10}, {"fp32": 1e11, "int8": 1e11})
    one = next(one for one in configurations() if one.key == "inflight_int8")
    run = course(tmp_path / "bench.json")
    found: Any = article_entry(run, one, served, EMBEDDED, "geometric", 1, rates, 6.5, 5)
    assert runs == [("grpc:1", 4, 0), ("grpc:1", 4, 0), ("grpc:1", 6, 1)]
    assert (found["load"]["requests"], found["load"]["prompt_tokens"]) == (5, 110)
    config, sent = LlamaConfig.from_pretrained(EMBEDDED), [*lengths("geometric", 1), *lengths("geometric", 5)]
    bounds = [roofline(config, one.weights, rates, 1, some, PROMPT_TOKENS, steady=True) for some in (sent, sent[1:])]
    with_warmup, without = (bound.beside(found["tokens_per_second"]) for bound in bounds)
    assert found["limit"] == with_warmup != without
    # At a second each, six requests are predicted to take six.
    for seconds, most_s in ((6.5, 5.5), (1.0, 5.5)):
        with pytest.raises(NoTimeError, match="5 requests after 1 take 6 and not the 6 s"):
            article_entry(run, one, served, EMBEDDED, "geometric", 1, rates, seconds, 5, most_s)


@pytest.mark.parametrize(
    ("parser", "line", "message"),
    [
        (parse, "--budget 0", "0 is out of bounds: more than 0"),
        (parse, "--budget nan", "nan is out of bounds: more than 0"),
        (parse, "--only peer", "invalid choice: 'peer'"),
        (parse, "--without vlm", "--without has 'vlm': known are triton_llama_int8, "),
        (parse, "--model no/such", "argument --model: no/such is not a folder with a config.json"),
        (sweep.parse, "inflight_int9", "there is no server 'inflight_int9': known are naive_fp16, "),
    ],
)
def test_a_wrong_option_is_refused_in_a_line(
    parser: Callable[[list[str]], object], line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
