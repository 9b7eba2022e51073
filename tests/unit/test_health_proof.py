"""What proves that a model computes, and what only looks like it: servers in every state, on real sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from triton_llama.health import Address, Limits, Verdict, healthy, live, proof, pulse, ready
from triton_supervisor.liveness import Pace, live_question
from unit.peers import hang_up, respond, server, stay_silent
from unit.tritons import DEAD, FULL, FakeTriton, Instance, fake_triton, refusal

IN_TIME = Limits(timeout=30.0, step_age=30.0)
SOON = Limits(timeout=0.5, step_age=30.0)
"""For servers that give no token however long one waits."""

SLOW = Limits(timeout=1.5, step_age=30.0)
"""For servers that give none, but do something else meanwhile."""


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PAUSE_SECONDS", 0.02)


def _ask(triton: FakeTriton, limits: Limits = IN_TIME) -> Verdict:
    verdict = healthy(triton.endpoint, triton.metrics, limits)
    assert "\n" not in verdict.reason
    return verdict


def _timeless(verdict: Verdict) -> str:
    """The reason, without how long ago it was exactly."""
    return re.sub(r"\b\d{2,} s ago", "long ago", verdict.reason)


def test_a_busy_server_is_burdened_with_a_request(triton: FakeTriton) -> None:
    triton.step(ago=0.4)
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith("a step ")
    assert triton.asked == []


@pytest.mark.parametrize("ago", [None, 95.0])
def test_an_idle_server_counts_as_healthy_without_computing(triton: FakeTriton, ago: float | None) -> None:
    if ago is not None:
        triton.step(ago=ago)
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith("one token in ")
    (request,) = triton.asked
    assert (request["max_tokens"], request["min_tokens"]) == (1, 1)


def test_the_last_values_of_a_dead_process_count_as_life(triton: FakeTriton) -> None:
    triton.step(ago=95.0)
    triton.instances["llama_0_0"].rows = 3
    triton.generate = lambda _: refusal(*DEAD)
    verdict = _ask(triton)
    assert not verdict.ok
    assert _timeless(verdict) == f"HTTP 400: {DEAD[1].rstrip('.')}, the last step was long ago"


def test_a_model_that_never_steps_counts_as_slow(triton: FakeTriton) -> None:
    triton.step(ago=95.0)
    triton.generate = FakeTriton.hang
    verdict = _ask(triton, SOON)
    assert not verdict.ok
    assert _timeless(verdict) == "no token within 0.5 s, the last step was long ago"


def test_a_model_that_has_never_made_a_step_is_said_to_have(triton: FakeTriton) -> None:
    triton.generate = FakeTriton.hang
    assert _ask(triton, SOON) == (False, "no token within 0.5 s, no step yet")


def test_a_token_that_waits_behind_others_means_death(triton: FakeTriton) -> None:
    """The step before took longer than a step may be old; since we asked, there was one."""

    def step_and_hang(triton: FakeTriton) -> tuple[int, dict[str, object]]:
        triton.step()
        return triton.hang()

    triton.step(ago=95.0)
    triton.generate = step_and_hang
    verdict = _ask(triton, SLOW)
    assert verdict.ok
    assert verdict.reason.startswith("no token within 1.5 s, but a step ")


def test_steps_count_only_by_a_clock_that_agrees(triton: FakeTriton) -> None:
    """The server's clock is an hour behind, and it doesn't say: that there is a new step shows all the same."""

    def step_and_hang(triton: FakeTriton) -> tuple[int, dict[str, object]]:
        triton.step(ago=3600.0)
        return triton.hang()

    triton.step(ago=3700.0)
    triton.generate = step_and_hang
    assert _ask(triton, SLOW).ok


@pytest.mark.parametrize("refused", [FULL, (400, FULL[1]), (503, "the upstream is busy")])
def test_a_full_queue_means_death_though_steps_are_made(triton: FakeTriton, refused: tuple[int, str]) -> None:
    def refuse_and_step(triton: FakeTriton) -> tuple[int, dict[str, object]]:
        # The step doesn't come while we are being refused, but a moment later.
        if len(triton.asked) > 2:
            triton.step()
        return refusal(*refused)

    triton.step(ago=95.0)
    triton.generate = refuse_and_step
    verdict = _ask(triton)
    assert verdict.ok
    words = refused[1].removeprefix("[request id: health] ")
    assert verdict.reason.startswith(f"HTTP {refused[0]}: {words}, but a step ")


def test_a_full_queue_counts_as_life_though_no_step_is_made(triton: FakeTriton) -> None:
    def refuse_and_hang(triton: FakeTriton) -> tuple[int, dict[str, object]]:
        return refusal(*FULL) if len(triton.asked) < 3 else triton.hang()

    triton.step(ago=95.0)
    triton.generate = refuse_and_hang
    verdict = _ask(triton, SLOW)
    assert not verdict.ok
    assert _timeless(verdict) == "HTTP 503: Exceeds maximum queue size, the last step was long ago"
    assert len(triton.asked) > 1, "a queue that is full may have room a moment later"


def test_a_queue_with_room_again_counts_as_full(triton: FakeTriton) -> None:
    triton.generate = lambda triton: refusal(*FULL) if len(triton.asked) < 3 else triton.token()
    assert _ask(triton).reason.startswith("one token in ")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal(400, "decoding failed; the server's log has the reason"), "HTTP 400: decoding failed; the "),
        ((500, {"error": "two\nlines \ud800"}), "HTTP 500: two lines ?"),
        ((200, {"text_output": ""}), 'the answer has no num_output_tokens: {"text_output": ""}'),
        ((200, {"num_output_tokens": 0}), "num_output_tokens is 0, where one token was asked for"),
        ((404, {}), "HTTP 404: {}"),
    ],
)
def test_an_answer_without_a_token_counts_as_one(
    triton: FakeTriton, answer: tuple[int, dict[str, object]], reason: str
) -> None:
    triton.generate = lambda _: answer
    verdict = _ask(triton)
    assert not verdict.ok
    assert verdict.reason.startswith(reason)
    assert len(triton.asked) == 1, "asked again what is certain"


def test_metrics_are_not_found_beside_the_endpoint(triton: FakeTriton) -> None:
    triton.step()
    assert healthy(triton.endpoint, triton.endpoint.metrics, IN_TIME).ok
    assert triton.asked == []


@pytest.mark.parametrize("probe", [healthy, live, ready])
def test_a_server_without_metrics_is_believed_a_strangers(triton: FakeTriton, probe: Callable[..., Verdict]) -> None:
    """Two ports above it somebody else's page says that its model of the same name has just made a step."""
    triton.step()
    triton.generate = lambda _: refusal(*DEAD)
    assert probe(triton.endpoint, None, IN_TIME) == (
        False,
        f"HTTP 400: {DEAD[1].rstrip('.')}, no metrics (switched off)",
    )
    triton.generate = lambda triton: triton.token()
    verdict = probe(triton.endpoint, None, IN_TIME)
    assert verdict.ok
    assert re.fullmatch(r"one token in [0-9.]+ s \(no metrics \(switched off\)\)", verdict.reason)


def test_the_supervisor_believes_a_strangers_metrics(triton: FakeTriton) -> None:
    triton.step()
    triton.generate = lambda _: refusal(*DEAD)
    pace = Pace.for_verdict_within(60)
    assert live_question(triton.endpoint, triton.metrics, pace)().ok
    assert not live_question(triton.endpoint, None, pace)().ok


def test_the_metrics_of_another_model_count_or_are_missed_in_silence(triton: FakeTriton) -> None:
    triton.model = "other"
    triton.step()
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith("one token in ")
    assert f"{triton.metrics} has no llama_last_step_timestamp_seconds of the model llama" in verdict.reason
    assert len(triton.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n<html/>     ",
        b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nllama_last_step_timestamp_seconds{model="llama"} 1.2.3\n'.ljust(
            90
        ),
        b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nhalf",
        b"what?",
    ],
    ids=["404", "page", "number", "half", "babble"],
)
def test_a_page_that_is_no_metrics_page_ends_the_probe(triton: FakeTriton, answer: bytes) -> None:
    with server(respond(answer)) as port:
        verdict = healthy(triton.endpoint, Address("127.0.0.1", port), IN_TIME)
    assert verdict.ok
    assert f"(no metrics (127.0.0.1:{port}" in verdict.reason


def test_metrics_that_never_come_end_the_probe(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.2)
    with server(stay_silent) as port:
        verdict = healthy(triton.endpoint, Address("127.0.0.1", port), IN_TIME)
    assert verdict.ok
    assert f"127.0.0.1:{port} doesn't answer within 0.2 s" in verdict.reason


def test_the_servers_own_clock_is_not_believed(triton: FakeTriton) -> None:
    """It is an hour ahead of ours, and says so."""
    triton.clock = time.time() + 3600
    triton.step(ago=-3600)
    assert _ask(triton).reason.startswith("a step ")
    assert triton.asked == []
    triton.step(ago=-3600 + 95)
    assert _ask(triton).reason.startswith("one token in ")


def test_a_step_in_the_future_counts_as_young(triton: FakeTriton) -> None:
    """Clocks that disagree, and nobody says by how much: a dead process's last step would be young for an hour."""
    triton.step(ago=-3600)
    triton.generate = lambda _: refusal(*DEAD)
    assert not _ask(triton).ok


def test_one_instance_speaks_for_another(triton: FakeTriton) -> None:
    triton.instances["llama_0_0_gpu1"] = Instance()
    triton.step(ago=1)
    assert _ask(triton).reason.startswith("one token in "), "idle, so far"
    triton.step("llama_0_0_gpu1", ago=20)
    asked = len(triton.asked)
    assert _ask(triton).reason.startswith("a step ")
    assert len(triton.asked) == asked, "both have made steps"


def test_an_instance_that_hangs_hides_behind_another_that_answers(triton: FakeTriton) -> None:
    triton.instances["llama_0_0_gpu1"] = Instance(rows=2)
    triton.step("llama_0_0_gpu1", ago=95)
    verdict = _ask(triton, SLOW)
    assert not verdict.ok
    assert verdict.reason.startswith("one token in ")
    assert _timeless(verdict).endswith(", and rows hang in llama_0_0_gpu1, the last step was long ago")


def test_an_instance_with_a_long_step_counts_as_hanging(triton: FakeTriton) -> None:
    triton.instances["llama_0_0_gpu1"] = Instance(rows=2)
    triton.step("llama_0_0_gpu1", ago=95)

    def step_elsewhere(triton: FakeTriton) -> tuple[int, dict[str, object]]:
        triton.step("llama_0_0_gpu1")
        return triton.token()

    triton.generate = step_elsewhere
    assert _ask(triton).ok


def test_a_server_that_is_not_there_raises_or_is_waited_for(triton: FakeTriton) -> None:
    for address in (triton.endpoint._replace(host="no-such-host.invalid"), triton.endpoint._replace(port=65535)):
        verdict = healthy(address, triton.metrics, IN_TIME)
        assert not verdict.ok
        assert f"{address} can't be asked: " in verdict.reason


def test_a_connection_that_breaks_raises(triton: FakeTriton) -> None:
    with server(hang_up) as port:
        verdict = healthy(Address("127.0.0.1", port), triton.metrics, IN_TIME)
    assert not verdict.ok
    assert f"127.0.0.1:{port} can't be asked: " in verdict.reason
