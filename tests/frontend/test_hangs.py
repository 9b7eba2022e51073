"""Models that hang, and streams that are silent for another reason."""

from __future__ import annotations

import time

import pytest
from frontend.pairs import Pair, homed, in_front_of, resumptions_of, text_of


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that give up soon."""
    monkeypatch.setattr("triton_llama_openai.triton.replica._PROBE_S", 0.5)


@pytest.mark.usefixtures("impatient")
def test_a_hanging_models_requests_move(pair: Pair) -> None:
    with homed(pair, hang_timeout=0.3) as (served, home, _):
        home.hold_after, home.probes_hang = 2, True
        assert text_of(served.complete()) == " Hello, world."
        home.wait_for(lambda fake: any(name != "probe" for name in fake.cancelled))


def test_a_silent_stream_of_a_model_that_answers_goes_on(pair: Pair) -> None:
    with homed(pair, hang_timeout=0.2) as (served, home, _):
        home.hold_after = 2
        with served.begin_request("/v1/completions", prompt="Return a list"):
            home.wait_for(lambda fake: fake.probes > 2)
            assert not home.cancelled
        home.wait_for(lambda fake: not fake.running)
        assert resumptions_of(served) == {}


@pytest.mark.usefixtures("impatient")
def test_a_hung_model_that_is_ready_gets_no_requests(pair: Pair) -> None:
    with homed(pair, hang_timeout=0.3) as (served, home, _):
        home.hold_after, home.probes_hang = 1, True
        served.complete()
        home.hold_after = 0
        home.wait_for(lambda fake: fake.probes > 0)
        assert text_of(served.complete()) == " Hello, world."
        assert len(home.requests) == 1


@pytest.mark.long
def test_a_triton_that_answers_nothing_loses_its_requests(pair: Pair) -> None:
    with homed(pair) as (served, home, _):
        home.hold_after, home.silent = 1, True
        assert text_of(served.complete()) == " Hello, world."


def test_a_client_that_reads_slowly_is_no_hanging_model(pair: Pair) -> None:
    for triton in pair:
        # More than the buffers of both sockets hold.
        triton.tokens = ["a" * (1 << 20)] * 32
    with in_front_of(*pair, hang_timeout=0.2) as served:
        with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 32}) as r:
            pair[0].wait_for(lambda _: any(triton.running for triton in pair))
            # Longer than hang_timeout, and than it takes to look at the replica.
            time.sleep(1.5)
            assert sum(len(line) for line in r.iter_lines()) > 32 << 20
        assert resumptions_of(served) == {}
