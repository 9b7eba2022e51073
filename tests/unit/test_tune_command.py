"""`python -m perf.tune`: its options, its result file and its recommendation."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from unit.tuning import DEFAULT, measurement, point

from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed, Poisson
from perf.tune.__main__ import main, read
from perf.tune.config import Subject, knobs_of, parsed
from perf.tune.findings import Findings, conclusion, table
from perf.tune.measuring import Demand
from perf.tune.points import Noise, Point
from perf.workload import lengths

SLOTS_64 = replace(DEFAULT, slots=64)
DEMAND = Demand("uniform", Closed(4), requests=8, warmup=2, output_tokens=10, timeout=60.0)


def _findings(points: list[Point], slo_p95_ms: float = 1000) -> Findings:
    subject = Subject.of("default", "anything", threads=1)
    return Findings(subject, None, DEMAND, slo_p95_ms, "a device", points, Noise.of(points))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--slo-p95-ms 2000", "make tune SLO_P95_MS=2000 BUDGET=30"),
        ("--slo-p95-ms=2000 --budget=0.5 --resume", "make tune SLO_P95_MS=2000 BUDGET=0.5"),
        (
            "--slo-p95-ms 2000 --budget 15 --model org/llama --mix geometric --rate 2 --output /a/b/c.json",
            "make tune SLO_P95_MS=2000 BUDGET=15 MODEL=org/llama 'TUNE=--mix geometric --rate 2.0 --output c.json'",
        ),
    ],
)
def test_the_command_repeats_the_run(arguments: str, expected: str) -> None:
    assert read(arguments.split(), {}).command == expected


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        ("--slo-p95-ms 0", "", "--slo-p95-ms: must be a number from 1 to 3600000, got '0'"),
        ("--slo-p95-ms nan", "", "--slo-p95-ms: must be a number from 1 to 3600000, got 'nan'"),
        ("--slo-p95-ms fast", "", "--slo-p95-ms: must be a number from 1 to 3600000, got 'fast'"),
        ("--slo-p95-ms 9 --concurrency 0", "", "--concurrency: must be a whole number from 1 to 1024, got '0'"),
        ("--slo-p95-ms 9 --rate -1", "", "--rate"),
        ("--slo-p95-ms 9 --rate 1 --concurrency 2", "", "not allowed with argument"),
        ("--slo-p95-ms 9 --budget inf", "", "--budget: must be a number from 0.1 to 1440, got 'inf'"),
        ("--slo-p95-ms 9 --mix mixed", "", "invalid choice: 'mixed'"),
        ("--mix uniform", "", "the following arguments are required: --slo-p95-ms"),
        ("--slo-p95-ms 9", "LLAMA_SLOTS", "the environment variable LLAMA_SLOTS"),
        ("--slo-p95-ms 9", "LLAMA_MODEL", "the environment variable LLAMA_MODEL"),
        ("--slo-p95-ms 9", "OMP_NUM_THREADS", "the environment variable OMP_NUM_THREADS"),
    ],
)
def test_a_value_out_of_bounds_or_a_variable_that_overrides_the_config_is_refused(
    arguments: str, variable: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(arguments.split(), {variable: "many"} if variable else {})
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_load_is_closed_unless_a_rate_is_given() -> None:
    closed = read(["--slo-p95-ms", "9", "--concurrency", "5"], {"OMP_NUM_THREADS": "3"})
    assert closed.demand == Demand("uniform", Closed(5), requests=20, warmup=5, output_tokens=200, timeout=1800.0)
    assert closed.threads == 3
    opened = read(["--slo-p95-ms", "9", "--rate", "2.5", "--requests", "7"], {})
    assert opened.demand.arrivals == Poisson(2.5, seed=0)
    assert (opened.demand.requests, opened.demand.most_at_once) == (7, None)


@pytest.mark.parametrize("wrong", [["--variant", "batched"], ["--model", "models/typo"]])
def test_an_unknown_variant_or_model_is_one_line_on_stderr(
    wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EMBEDDED.parents[1])
    assert main(["--slo-p95-ms", "9", "--model", str(EMBEDDED), *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: ")
    assert wrong[1] in line


def test_the_warm_up_leaves_the_measured_lengths_unchanged() -> None:
    sent = DEMAND.sent(EMBEDDED)
    assert [request.output_tokens for request in sent[2:]] == lengths("uniform", 8, 10)
    assert [request.output_tokens for request in replace(DEMAND, warmup=0).sent(EMBEDDED)] == lengths("uniform", 8, 10)


def test_the_findings_have_every_point_and_the_recommendation_with_its_config() -> None:
    failed = point(9, 9, 1024, errors=1)
    findings = _findings([point(100, 500, runs=2), point(300, 600, 64, runs=3), point(400, 1600), failed])
    sections = json.loads(json.dumps(findings.sections(), allow_nan=False))
    default, best, late, broken = sections["points"]
    assert (default["repeats"], default["pareto"], default["meets_slo"]) == (2, True, True)
    assert best["key"] == "delay10000/preferred4-8-16-32/slots64/prefill512/run1"
    assert (best["tokens_per_second"], best["p95_ms"], best["repeats"]) == (300.0, 600.0, 3)
    assert (late["pareto"], late["meets_slo"]) == (True, False)
    assert (broken["tokens_per_second"], broken["pareto"], broken["meets_slo"]) == (None, False, False)
    settings = {**asdict(SLOTS_64), "preferred_batch_size": [4, 8, 16, 32]}
    assert sections["recommended"] == {
        "settings": settings, "config": findings.config, "command": "make serve VARIANT=tuned"
    }  # fmt: skip
    assert findings.config is not None
    assert knobs_of(parsed(findings.config)) == SLOTS_64
    assert "p95 of at most 1000 ms" in findings.config.splitlines()[0]
    assert "# Without a kind: one instance per GPU" in findings.config
    rows = table(findings).splitlines()
    assert rows[-3].endswith("recommended")
    assert rows[-2].endswith("present config")
    assert "Recommended: delay 10000 us, preferred 4 8 16 32, slots 64, prefill 512: 300.0" in conclusion(findings)
    assert "The present config: 100.0 tokens/s at a p95 of 500 ms" in conclusion(findings)


def test_an_unknown_noise_is_null_in_the_json() -> None:
    assert _findings([point(100, 500)]).sections()["noise"] is None


def test_within_the_noise_the_present_config_is_recommended() -> None:
    noisy = Point(DEFAULT, [measurement(100, 500), measurement(120, 500)])
    said = conclusion(_findings([noisy, point(115, 500, 64, runs=2)]))
    assert "Recommended: the present config" in said
    assert "Nothing is better by more than the noise." in said


def test_an_unmet_bound_is_reported_with_the_lowest_latency() -> None:
    findings = _findings([point(100, 500, runs=2), point(300, 600, 64)], slo_p95_ms=400)
    assert findings.config is None
    assert findings.sections()["recommended"] is None
    assert "Nothing is recommended: no point has a p95 of at most 400 ms" in conclusion(findings)
    assert "The lowest p95: 100.0 tokens/s at a p95 of 500 ms" in conclusion(findings)


def test_a_search_without_a_working_point_recommends_nothing() -> None:
    findings = _findings([Point(DEFAULT, [{"not_run": "does not fit"}])])
    assert "no point could be measured without errors" in conclusion(findings)
    assert table(findings).splitlines()[-1].endswith("does not fit, present config")
    assert "no point could be measured" in conclusion(_findings([]))
