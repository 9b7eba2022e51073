"""A soak's verdict: what grows, is lost, is counted otherwise, changes or never happened fails it.

And what can't be told doesn't pass.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from perf.environment import ROOT
from perf.soak.cli import said, sections
from perf.soak.course import Course
from perf.soak.observations import MOST_ROWS, Rest, Sample, Soaked, rows
from perf.soak.picture import picture
from perf.soak.readings import Readings
from perf.soak.soaking import ROWS_DEPEND
from perf.soak.tally import MOST_MESSAGES, Tally
from perf.soak.trend import Trend
from perf.soak.users import kinds
from perf.soak.verdict import FIGURES, Outcome, judge, passed
from perf.soak.vitals import ProcessVitals, ServerVitals

MEMORY = "memory of the model's process"

COUNTED = """\
llama_requests_total{{finish_reason="stop",model="llama",version="1"}} {stop}
llama_requests_total{{finish_reason="length",model="llama",version="1"}} {length}
llama_requests_total{{finish_reason="cancelled",model="llama",version="1"}} {cancelled}
llama_requests_total{{finish_reason="invalid",model="llama",version="1"}} {invalid}
llama_requests_total{{finish_reason="unavailable",model="llama",version="1"}} {unavailable}
llama_requests_total{{finish_reason="error",model="llama",version="1"}} {error}
llama_generated_tokens_total{{model="llama",version="1"}} {generated}
llama_step_rows_sum{{model="llama",version="1"}} {chosen}
llama_step_errors_total{{model="llama",version="1"}} {failed}
llama_slots_in_use{{model="llama",model_instance="llama_0_0",version="1"}} 0
llama_waiting_rows{{model="llama",model_instance="llama_0_0",version="1"}} 0
nv_inference_pending_request_count{{model="llama",version="1"}} 0
"""
ALL = {"stop": 5, "length": 95, "cancelled": 4, "invalid": 7, "unavailable": 0, "error": 0}


def _readings(**changed: float) -> Readings:
    counts: dict[str, float] = {**ALL, "generated": 4100, "chosen": 4100, "failed": 0}
    return Readings.parse(COUNTED.format(**(counts | changed)))


def _sample(seconds: float, model_mib: float = 500.0, descriptors: int = 60, vram_mib: float | None = 9000.0) -> Sample:
    triton, model = ProcessVitals(150.0, 140.0, descriptors, 40), ProcessVitals(model_mib, 450.0, 20, 9)
    vitals = ServerVitals(triton, model, 2.0, vram_mib)
    return Sample(seconds, "rest" if seconds % 60 > 50 else "steady", vitals, 8, 0, 1, 300.0, 20, 900.0)


def _samples(of: Callable[[float], Sample] = _sample, seconds: int = 1800) -> list[Sample]:
    return [of(float(second)) for second in range(0, seconds + 1, 5)]


def _soaked(**changed: object) -> Soaked:
    """Return a soak of half an hour in which all went well, but for what is changed."""
    tally = Tally(
        done=Counter(dict.fromkeys(kinds(streams=True), 20)),
        completed=Counter(stop=5, length=93),
        output_tokens=4000,
        left=6,
        left_tokens=1200,
        refused=7,
        same=20,
    )
    soaked = Soaked(
        course=Course(1800.0),
        streams=True,
        seconds=1800.0,
        samples=_samples(),
        rests=[Rest(60.0, {"llama_slots_in_use": 0.0})],
        tally=tally,
        before=_readings(**dict.fromkeys([*ALL, "generated", "chosen"], 0)),
        after=_readings(),
        fixed_text="text",
        same_processes=True,
    )
    return replace(soaked, **changed)  # type: ignore[arg-type]  # fields by name


def _lasting(seconds: int, model_mib: Callable[[float], float]) -> Soaked:
    """Return a soak in which the model's process takes that much after so many seconds."""
    samples = _samples(lambda second: _sample(second, model_mib(second)), seconds)
    return _soaked(samples=samples, seconds=float(seconds))


def _found(soaked: Soaked, outcome: Outcome) -> list[str]:
    return [finding.name for finding in judge(soaked) if finding.outcome == outcome]


def _failed(soaked: Soaked) -> list[str]:
    assert _found(soaked, "can't be told") == []
    return _found(soaked, "failed")


def test_a_soak_in_which_all_went_well_fails() -> None:
    assert {finding.outcome for finding in judge(_soaked())} == {"ok"}
    assert said(judge(_soaked())).splitlines()[-1] == "passed"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"length": 92}, "rows"),  # fewer than its users have seen
        ({"length": 101}, "rows"),  # more than were asked for
        ({"stop": 4, "length": 96}, "rows"),
        ({"invalid": 6}, "refusals"),
        ({"invalid": 8}, "refusals"),
        ({"unavailable": 1}, "refusals"),
        ({"error": 1}, "refusals"),
        ({"generated": 3999, "chosen": 3999}, "tokens"),
        ({"generated": 5201, "chosen": 5201}, "tokens"),
        ({"chosen": 4099}, "tokens"),
        ({"failed": 1}, "computations"),
    ],
    ids=str,
)
def test_a_server_that_counts_otherwise_passes(changed: dict[str, float], found: str) -> None:
    assert _failed(_soaked(after=_readings(**changed))) == [found]


def _told(**changed: object) -> Soaked:
    return _soaked(tally=replace(_soaked().tally, **changed))  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("soaked", "found"),
    [
        (_told(errors=Counter(["a request timed out"])), "errors"),
        (_told(different=1), "the fixed request"),
        (_told(same=0), "the fixed request"),
        (_told(done=Counter(complete=100)), "everything was done"),
        (_soaked(rests=[Rest(60.0, {"llama_slots_in_use": 1.0})]), "rests"),
        (_soaked(rests=[]), "rests"),
        (_soaked(same_processes=False), "processes"),
        (_lasting(1800, lambda seconds: 500 + seconds / 80), MEMORY),
        (
            _soaked(samples=_samples(lambda seconds: _sample(seconds, vram_mib=9000 + seconds / 40))),
            "memory of the GPU",
        ),
        (_soaked(samples=_samples(lambda seconds: _sample(seconds, descriptors=60 + int(seconds / 40)))), None),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, str) else "",
)
def test_what_goes_wrong_passes(soaked: Soaked, found: str | None) -> None:
    assert _failed(soaked) == [found or "descriptors of tritonserver"]


def test_a_process_that_warms_up_or_is_restless_fails() -> None:
    """It takes 300 MiB in the first half of the time, and then goes up and down by a few with the load."""
    randomness = random.Random(3)
    flat = _lasting(1800, lambda seconds: 500 + min(seconds, 800) * 0.4 + randomness.uniform(-4, 4))
    assert _failed(flat) == []


def test_a_leak_hides_in_restlessness() -> None:
    """A kilobyte for each of 15 requests a second, under a load that makes the memory go up and down by 20 MiB."""
    randomness = random.Random(4)
    leak = _lasting(1800, lambda seconds: 500 + seconds * 15 / 1024 + randomness.uniform(0, 20))
    assert _failed(leak) == [MEMORY]


@pytest.mark.parametrize("minutes", [20, 60, 480])
def test_a_leak_hides_behind_the_weights_or_in_the_time(minutes: int) -> None:
    """40 MiB an hour, in a process of 8 GiB."""
    assert _failed(_lasting(60 * minutes, lambda seconds: 8192 + seconds * 40 / 3600)) == [MEMORY]


def test_a_slow_leak_hides_in_a_night() -> None:
    """3 MiB an hour."""
    assert _failed(_lasting(8 * 3600, lambda seconds: 500 + seconds * 3 / 3600)) == [MEMORY]


@pytest.mark.parametrize("at", [1000, 1500, 1700])
def test_memory_that_jumps_late_is_flat(at: int) -> None:
    """Most pairs of looks lie before it, so that the trend is none."""
    assert _failed(_lasting(1800, lambda seconds: 500.0 if seconds < at else 520.0)) == [MEMORY]


@pytest.mark.parametrize("an_hour", [0, 470])
@pytest.mark.parametrize("seconds", [45, 120, 900])
def test_a_soak_too_short_to_tell_passes(seconds: int, an_hour: int) -> None:
    """Flat or leaking: 470 MiB an hour are 8 MiB in the second half of two minutes."""
    short = _lasting(seconds, lambda second: 500 + second * an_hour / 3600)
    assert _found(short, "can't be told") == [figure.name for figure in FIGURES]
    assert _found(short, "failed") == []
    assert not passed(judge(short))
    last = said(judge(short)).splitlines()[-1]
    assert last == "NOT PASSED: 8 of 17 can't be told and aren't counted, none of the others failed"
    worse = judge(replace(short, same_processes=False))
    assert said(worse).splitlines()[-1] == "FAILED: 1 of 17; 8 can't be told and aren't counted"


def test_a_machine_without_a_gpu_fails() -> None:
    without = _soaked(samples=_samples(lambda seconds: _sample(seconds, vram_mib=None)))
    assert _found(without, "left out") == ["memory of the GPU"]
    assert passed(judge(without))
    assert "memory of the GPU" not in sections(without, judge(without))["trends_per_hour"]
    assert "<!-- GPU, in use" not in picture(rows(without.samples), "")


def test_rows_that_depend_on_their_batch_fail_the_fixed_request() -> None:
    depending = replace(_told(different=3), rows_depend=True)
    assert _found(depending, "left out") == ["the fixed request"]
    assert passed(judge(depending))
    # What it goes by is what the model says.
    assert ROWS_DEPEND in (ROOT / "model_repository/llama/1/model.py").read_text()


def test_a_soak_whose_server_died_says_nothing() -> None:
    died = _soaked(after=None, same_processes=False, cut_short="the server is gone; code 70")
    found = {finding.name: finding for finding in judge(died)}
    assert (found["processes"].outcome, found["processes"].said) == ("failed", "the server is gone; code 70")
    assert _found(died, "can't be told") == ["rows", "refusals", "tokens", "computations"]
    assert found[MEMORY].outcome == "ok"
    assert sections(died, judge(died))["passed"] is False
    at_once = replace(died, samples=[], rests=[], tally=Tally(), seconds=0.0)
    assert _found(at_once, "failed") == ["processes"]
    assert sections(at_once, judge(at_once))["looks"]["seconds"] == []


def test_the_trend_follows_wild_points() -> None:
    seconds = [float(index) for index in range(100)]
    values = [100.0 + index / 10 + (500.0 if index % 7 == 0 else 0.0) for index in range(100)]
    trend = Trend.of(seconds, values)
    assert trend.slope == pytest.approx(360.0, rel=0.2)
    assert trend.low <= trend.slope <= trend.high
    flat = Trend.of(seconds, [5.0] * 100)
    assert (flat.high, flat.change) == (0, 0)
    assert trend.change == pytest.approx(9, abs=1)
    with pytest.raises(ValueError, match="7 points are too few"):
        Trend.of(seconds[:7], values[:7])


def test_a_long_soak_makes_a_long_file_or_no_picture() -> None:
    columns = rows([_sample(5.0 * index) for index in range(10 * MOST_ROWS + 3)])
    assert {len(column) for column in columns.values()} == {-(-(10 * MOST_ROWS + 3) // 11)}
    drawn = picture(columns, "half a day")
    assert drawn == picture(columns, "half a day")
    assert "<!-- half a day" in drawn
    assert "<!-- tritonserver" in drawn
    with pytest.raises(ValueError, match="1 looks can't be drawn"):
        picture(rows([_sample(0.0)]), "")


def test_errors_of_many_kinds_take_ever_more_room_or_get_lost() -> None:
    tally = Tally()
    for number in range(3 * MOST_MESSAGES):
        tally.fail(f"error number {number}\n" + "x" * 1000)
    assert tally.errors.total() == 3 * MOST_MESSAGES
    assert len(tally.errors) == MOST_MESSAGES + 1
    assert all("\n" not in message and len(message) <= 300 for message in tally.errors)


def test_latencies_are_told_twice() -> None:
    tally = Tally()
    tally.complete("stop", 3, 0.5)
    tally.complete("length", 4, 1.5)
    assert (tally.take_latencies(), tally.take_latencies()) == ([0.5, 1.5], [])
    assert (tally.completed, tally.output_tokens) == (Counter(stop=1, length=1), 7)


@pytest.mark.parametrize(("name", "value"), [("seconds", 0.0), ("users", 0), ("sample_seconds", -1.0)])
def test_a_course_that_does_not_run_is_taken(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}, must be above 0"):
        Course(**{"seconds": 1.0, name: value})  # type: ignore[arg-type]  # fields by name
