"""When requests come."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from perf.load.arrivals import Closed, Poisson
from perf.load.asking import body, path
from perf.load.plan import Asked, Plan
from perf.load.target import Protocol, Target


def test_one_seed_gives_other_arrivals_the_second_time() -> None:
    assert Poisson(3.0, 7).moments(50) == Poisson(3.0, 7).moments(50)
    assert Poisson(3.0, 7).moments(50)[:20] == Poisson(3.0, 7).moments(20)
    assert Poisson(3.0, 7).moments(50) != Poisson(3.0, 8).moments(50)


def test_arrivals_are_not_a_poisson_process_of_that_rate() -> None:
    moments = [0.0, *Poisson(4.0, 1).moments(20_000)]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    # Of an exponential distribution mean and standard deviation are the same, and 1/e of it lies above.
    assert mean == pytest.approx(0.25, rel=0.03)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_rate_is_accepted(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Poisson(rate, 0)


def test_no_users_at_all_are_accepted() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Closed(0)


@pytest.mark.parametrize("arrivals", [Closed(3), Poisson(2.5, 9)])
def test_a_plan_changes_on_its_way_to_the_generator(arrivals: Closed | Poisson) -> None:
    target = Target("peer", "openai_completions", "http://127.0.0.1:1", "llama", {"ignore_eos": True})
    plan = Plan(target, [Asked("é\n", 3), Asked("b", 4)], arrivals, 2.5)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("protocol", "where", "expected"),
    [
        ("triton_generate", "/v2/models/m/generate", {"max_tokens": 9, "min_tokens": 9, "stream": False}),
        ("triton_stream", "/v2/models/m/generate_stream", {"max_tokens": 9, "min_tokens": 9, "stream": True}),
        ("openai_completions", "/v1/completions", {"max_tokens": 9, "stream": True, "temperature": 0.0}),
        ("fastapi", "/generate", {"prompt": "é", "max_tokens": 9}),
    ],
)
def test_a_protocol_asks_for_something_else(protocol: Protocol, where: str, expected: dict[str, object]) -> None:
    target = Target("t", protocol, "http://127.0.0.1:1", "m", {"extra": 1})
    asked = json.loads(body(target, Asked("é", 9)))
    assert path(target) == where
    assert expected.items() <= asked.items()
    assert asked["extra"] == 1
