"""The verdict of a soak: growth, losses, wrong counts and missing actions fail it; unknown conditions don't pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from triton_llama import SamplingParams

from perf import metrics
from perf.environment import ROOT
from perf.soak.__main__ import sections
from perf.soak.libraries import LIBRARIES
from perf.soak.observed import Course, Life, Sample, Soaked
from perf.soak.picture import MOST_ROWS, columns, picture
from perf.soak.soaking import ROWS_DEPEND
from perf.soak.tally import MOST_MESSAGES, Given, Tally
from perf.soak.users import kinds
from perf.soak.verdict import FIGURES, Outcome, judge, lines, passed

MEMORY = "memory of the model's process"
KINDS = kinds(True, LIBRARIES)

ALL = {"stop": 5, "length": 95, "cancelled": 4, "invalid": 7, "unavailable": 0, "error": 0}


def _readings(**changed: float) -> dict[metrics.Series, float]:
    """The server's counters after the soak: requests by finish reason, and tokens generated, chosen and failed."""
    counts: dict[str, float] = {**ALL, "generated": 4100, "chosen": 4100, "failed": 0, **changed}
    lines = [f'llama_requests_total{{finish_reason="{reason}"}} {counts[reason]}' for reason in ALL]
    names = {"generated": "generated_tokens_total", "chosen": "step_rows_sum", "failed": "step_errors_total"}
    lines += [f"llama_{name} {counts[key]}" for key, name in names.items()]
    return metrics.series("\n".join(lines))


def _life(**changed: float) -> Life:
    """Return a life after which the server's counters, apart from the changed ones, are those of its users."""
    counts = Counter(stop=5, length=93, output_tokens=4000, left=6, left_tokens=1200, refused=7)
    return Life(_readings(**dict.fromkeys([*ALL, "generated", "chosen"], 0)), _readings(**changed), counts)


def _sample(seconds: float, life: int = 0, /, **changed: float | None) -> Sample:
    phase = "rest" if seconds % 60 > 50 else "steady"
    found: dict[str, Any] = {"seconds": seconds, "phase": phase, "life": life, "endpoint_life": life}
    found |= dict.fromkeys((key for _, _, key, _, _ in FIGURES), 60.0)
    found |= dict.fromkeys(("slots_in_use", "pending", "tokens_per_second", "p95_ms"), 60.0)
    return {name: value for name, value in (found | changed).items() if value is not None}


def _sampled(column: str, value: Callable[[float], float | None], seconds: int = 1800) -> list[Sample]:
    """Return samples in which a column has that value at each second."""
    return [_sample(float(second), **{column: value(second)}) for second in range(0, seconds + 1, 5)]


def _soaked(**changed: Any) -> Soaked:  # noqa: ANN401 - fields of several types
    """Return a soak of half an hour that passes, apart from the changed fields, of it or of its tally."""
    tally: dict[str, Any] = {"done": Counter(dict.fromkeys(KINDS, 20)), "same": 20}
    tally |= {name: changed.pop(name) for name in list(changed) if name in Tally.__dataclass_fields__}
    samples, rests = _sampled("vram_mib", lambda _: 9000.0), [(60.0, {"llama_slots_in_use": 0.0})]
    soaked = Soaked(Course(1800.0), KINDS, [_life()], samples=samples, rests=rests, tally=Tally(**tally))
    return replace(soaked, **changed)


def _found(soaked: Soaked, outcome: Outcome) -> list[str]:
    return [finding.name for finding in judge(soaked) if finding.outcome == outcome]


def _failed(soaked: Soaked) -> list[str]:
    assert _found(soaked, "can't be told") == []
    return _found(soaked, "failed")


def test_a_soak_without_fault_passes_and_the_counts_of_all_lives_are_compared() -> None:
    for lives in ([_life()], [_life(), _life()]):
        findings = judge(_soaked(lives=lives))
        assert {finding.outcome for finding in findings} == {"ok"}
        assert lines(findings).splitlines()[-1] == "passed"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"lives": [_life(length=92)]}, "rows"),  # fewer than the users saw
        ({"lives": [_life(), _life(length=101)]}, "rows"),  # more than were sent
        ({"lives": [_life(stop=4, length=96)]}, "rows"),
        ({"lives": [_life(invalid=6)]}, "refusals"),
        ({"lives": [_life(unavailable=1)]}, "refusals"),
        ({"lives": [_life(error=1)]}, "refusals"),
        ({"lives": [_life(generated=3999, chosen=3999)]}, "tokens"),
        ({"lives": [_life(generated=5201, chosen=5201)]}, "tokens"),
        ({"lives": [_life(chosen=4099)]}, "tokens"),
        ({"lives": [_life(failed=1)]}, "computations"),
        ({"errors": Counter(["a request timed out"])}, "errors"),
        ({"different": 1}, "the fixed request"),
        ({"same": 0}, "the fixed request"),
        ({"done": Counter(complete=100)}, "everything was done"),
        ({"rests": [(60.0, {"llama_slots_in_use": 1.0})]}, "rests"),
        ({"rests": []}, "rests"),
        ({"same_processes": False}, "processes"),
        ({"samples": _sampled("vram_mib", lambda second: 9000 + second / 40)}, "memory of the GPU"),
        ({"samples": _sampled("triton_descriptors", lambda second: 60 + second // 40)}, "descriptors of tritonserver"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_counts_that_differ_from_the_users_errors_growth_and_missing_actions_fail(
    changed: dict[str, object], found: str
) -> None:
    assert _failed(_soaked(**changed)) == [found]


Curve = Callable[[float, Callable[[float, float], float]], float]
GROWTH: dict[str, tuple[int, Curve, list[str]]] = {
    "a warm-up, then a fluctuation": (30, lambda at, noise: 500 + min(at, 800) * 0.4 + noise(-4, 4), []),
    # At 15 requests per second.
    "a kilobyte per request under noise": (30, lambda at, noise: 500 + at * 15 / 1024 + noise(0, 20), [MEMORY]),
    "40 MiB an hour of 8 GiB, shortest": (20, lambda at, _: 8192 + at * 40 / 3600, [MEMORY]),
    "3 MiB an hour, overnight": (480, lambda at, _: 500 + at * 3 / 3600, [MEMORY]),
    "every seventh sample an outlier": (30, lambda at, _: 500 + 500 * (at % 35 == 0), []),
    # Most pairs of samples lie before it, so the slope is 0.
    "a jump at the end": (30, lambda at, _: 500 + 20 * (at >= 1700), [MEMORY]),
}
"""The minutes, the memory of the model's process in MiB at each second, and what fails."""


@pytest.mark.parametrize(("minutes", "mib", "found"), GROWTH.values(), ids=GROWTH)
def test_memory_that_grows_or_jumps_fails_and_a_warm_up_passes(minutes: int, mib: Curve, found: list[str]) -> None:
    noise = random.Random(3).uniform
    samples = _sampled("model_rss_mib", lambda second: mib(second, noise), 60 * minutes)
    assert _failed(_soaked(samples=samples)) == found


def _in_lives(value: Callable[[int, float], float], *minutes: int) -> list[Sample]:
    """Return samples of lives of these minutes. value: of the model's memory, by life and its seconds."""
    samples: list[Sample] = []
    began = 0
    for life, length in enumerate(minutes):
        ats = range(0, 60 * length, 5)
        samples += [_sample(float(began + at), life, vram_mib=9.0, model_rss_mib=value(life, at)) for at in ats]
        began += 60 * length
    return samples


def test_memory_is_judged_in_each_life_of_the_server() -> None:
    # Each warms up anew, and the last one, of five minutes, proves nothing.
    restarted = _soaked(samples=_in_lives(lambda _, at: 400 + min(at, 500) * 0.4, 25, 30, 5))
    assert _failed(restarted) == []
    said = next(one.said for one in judge(restarted) if one.name == MEMORY)
    assert said.endswith("; the worst of 2 lives, 1 too short")
    # A restart of the endpoint alone begins no life of the server.
    endpoint_alone = judge(replace(restarted, samples=[{**one, "life": 0} for one in restarted.samples]))
    ends = [one.said.endswith("2 lives, 1 too short") for one in endpoint_alone if "OpenAI endpoint" in one.name]
    assert ends == [True] * 3
    leaking = _soaked(samples=_in_lives(lambda life, at: 400 + at / 80 * (life == 1), 25, 30, 25))
    assert _failed(leaking) == [MEMORY]


RESTART = {
    "part": "server", "running": 10, "answered": 10, "knocks": 30, "turned_away": 28, "closed": 1, "code": 0,
    "regions": 0, "end_seconds": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"answered": 9}, ["restarts"]),
        ({"code": 1}, ["restarts"]),
        ({"regions": 1}, ["restarts"]),
        ({"closed": 2}, ["restarts"]),
        ({"running": 0, "answered": 0}, ["restarts"]),
        (None, ["restarts"]),
    ],
    ids=["all answered", "a lost request", "an exit code", "shared memory left", "two closed", "none running", "none"],
)
def test_a_restart_answers_what_runs_ends_with_0_and_leaves_no_shared_memory(
    changed: dict[str, int] | None, found: list[str]
) -> None:
    course = Course(1800.0, restart_seconds=900.0)
    restarts = [] if changed is None else [{**RESTART, **changed}]
    assert _failed(_soaked(restarts=restarts, course=course)) == found


@pytest.mark.parametrize("seconds", [30, 900])
def test_a_soak_that_is_too_short_proves_nothing_about_growth(seconds: int) -> None:
    # 470 MiB an hour.
    short = _soaked(samples=_sampled("model_rss_mib", lambda second: 500 + second * 470 / 3600, seconds))
    assert _found(short, "can't be told") == [name for name, *_ in FIGURES]
    assert _found(short, "failed") == []
    assert not passed(judge(short))
    last = lines(judge(short)).splitlines()[-1]
    assert last == "NOT PASSED: 11 of 20 can't be told and aren't counted, none of the others failed"
    worse = judge(replace(short, same_processes=False))
    assert lines(worse).splitlines()[-1] == "FAILED: 1 of 20; 11 can't be told and aren't counted"


def test_without_a_gpu_its_memory_is_left_out() -> None:
    without = _soaked(samples=_sampled("vram_mib", lambda _: None))
    assert _found(without, "left out") == ["memory of the GPU"]
    assert passed(judge(without))
    # Nor is there a latency without an answer.
    drawn = picture([_sample(5.0 * index, vram_mib=None, p95_ms=None) for index in range(9)], "")
    assert "<!-- GPU, in use" not in drawn
    assert "<!-- latency" not in drawn


def test_with_an_outlier_threshold_the_fixed_request_is_left_out() -> None:
    depending = _soaked(different=3, rows_depend=True)
    assert _found(depending, "left out") == ["the fixed request"]
    assert passed(judge(depending))
    # The model's own log line decides.
    assert ROWS_DEPEND in (ROOT / "model_repository/llama/1/model.py").read_text()


def test_a_soak_whose_server_died_keeps_its_observations_and_fails() -> None:
    last = replace(_life(), after=None)
    died = _soaked(lives=[_life(), last], cut_short="the server is gone; code 70")
    found = {finding.name: finding for finding in judge(died)}
    assert (found["processes"].outcome, found["processes"].said) == ("failed", "the server is gone; code 70")
    assert _found(died, "can't be told") == ["rows", "refusals", "tokens", "computations"]
    assert found[MEMORY].outcome == "ok"
    at_once = replace(died, samples=[], rests=[], tally=Tally())
    assert _found(at_once, "failed") == ["processes"]
    written = sections(at_once, judge(at_once))
    assert (written["passed"], written["looks"]) == (False, {})


def test_a_long_soak_is_thinned_out_for_its_file_and_picture() -> None:
    samples = [_sample(5.0 * index) for index in range(10 * MOST_ROWS + 3)]
    assert {len(column) for column in columns(samples).values()} == {-(-(10 * MOST_ROWS + 3) // 11)}
    drawn = picture(samples, "half a day")
    assert drawn == picture(samples, "half a day")
    assert "<!-- half a day" in drawn
    assert "<!-- tritonserver" in drawn


def test_a_tally_bounds_its_messages_takes_latencies_once_and_checks_an_answers_length() -> None:
    tally = Tally()
    asked = SamplingParams(min_tokens=1, max_tokens=3)
    tally.complete(Given("a", "stop", 3), asked, 0.5)
    tally.complete(Given("a", "length", 4), asked, 1.5)
    assert (tally.take_latencies(), tally.take_latencies()) == ([0.5, 1.5], [])
    assert tally.counts == Counter(stop=1, length=1, output_tokens=7)
    assert list(tally.errors) == ["4 tokens came, 1 to 3 were asked for"]
    for number in range(3 * MOST_MESSAGES):
        tally.fail(f"error number {number}\n" + "x" * 1000)
    assert tally.errors.total() == 3 * MOST_MESSAGES + 1
    assert len(tally.errors) == MOST_MESSAGES + 1
    assert all("\n" not in message and len(message) <= 300 for message in tally.errors)
