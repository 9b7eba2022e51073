"""Which evidence proves that a model computes: servers in every state, on real sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from triton_llama import health
from triton_llama.health import Address, Limits, Verdict, healthy, live, ready
from triton_supervisor.liveness import Pace, live_probe
from unit.peers import (
    DEAD,
    FULL,
    HOST,
    Answer,
    FakeTriton,
    Instance,
    fake_triton,
    hang_up,
    http_answer,
    refusal,
    respond,
    server,
    stay_silent,
)

IN_TIME = Limits(timeout=30.0, step_age=30.0)
SOON = Limits(timeout=0.3, step_age=30.0)
DEAD_REASON = f"HTTP 400: {DEAD[1].rstrip('.')}"
SECOND = "llama_0_0_gpu1"

Generate = Callable[[FakeTriton], Answer]


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0.02)
    with fake_triton() as one:
        yield one


def _ask(triton: FakeTriton, limits: Limits = IN_TIME) -> Verdict:
    """Return the verdict; the reason without how long ago an old step was exactly."""
    verdict = healthy(triton.address, triton.address, limits)
    assert "\n" not in verdict.reason
    return verdict._replace(reason=re.sub(r"\b\d{2,} s ago", "long ago", verdict.reason))


def _answering(status: int, answer: dict[str, object]) -> Generate:
    return lambda _: (status, answer)


def _at_first(refused: tuple[int, str], then: Generate) -> Generate:
    """Refuse two requests, and then do something else."""
    return lambda triton: refusal(*refused) if len(triton.asked) < 3 else then(triton)


def _stepping(then: Generate, ago: float = 0.0) -> Generate:
    """Make a step, and then do something else."""

    def generate(triton: FakeTriton) -> Answer:
        triton.step(ago=ago)
        return then(triton)

    return generate


_dead, _full, _busy = (_answering(*refusal(*refused)) for refused in (DEAD, FULL, (503, "busy")))
FULL_AS_400 = (400, FULL[1])
IS_FULL = "HTTP 503: Exceeds maximum queue size"
NO_TOKEN = "no token within 0.3 s"
LONG_AGO = "the last step was long ago"


def test_a_recent_step_is_evidence_and_spares_the_model_a_request(triton: FakeTriton) -> None:
    triton.step(ago=0.4)
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith("a step ")
    assert triton.asked == []


@pytest.mark.parametrize(
    ("ago", "generate", "limits", "verdict"),
    [
        pytest.param(None, FakeTriton.token, IN_TIME, (True, "one token in "), id="a token"),
        pytest.param(95, FakeTriton.token, IN_TIME, (True, "one token in "), id="a token after a pause"),
        pytest.param(95, _dead, IN_TIME, (False, f"{DEAD_REASON}, {LONG_AGO}"), id="a dead process"),
        # The clocks disagree by an unknown amount: a dead process's last step would look recent for an hour.
        pytest.param(-3600, _dead, IN_TIME, (False, f"{DEAD_REASON}, the last step was 0.0 s ago"), id="a future step"),
        pytest.param(95, FakeTriton.hang, SOON, (False, f"{NO_TOKEN}, {LONG_AGO}"), id="a hanging process"),
        pytest.param(None, FakeTriton.hang, SOON, (False, f"{NO_TOKEN}, no step yet"), id="hanging from the start"),
        pytest.param(95, _stepping(FakeTriton.hang), SOON, (True, f"{NO_TOKEN}, but a step "), id="slow"),
        pytest.param(
            3700, _stepping(FakeTriton.hang, 3600), SOON, (True, f"{NO_TOKEN}, but a step "), id="slow, a clock late"
        ),
        pytest.param(95, _stepping(_full), IN_TIME, (True, f"{IS_FULL}, but a step "), id="a full queue"),
        pytest.param(95, _stepping(_busy), IN_TIME, (True, "HTTP 503: busy, but a step "), id="a busy proxy"),
        pytest.param(95, _at_first(FULL, FakeTriton.hang), SOON, (False, f"{IS_FULL}, {LONG_AGO}"), id="full, hanging"),
        pytest.param(None, _at_first(FULL_AS_400, FakeTriton.token), IN_TIME, (True, "one token in "), id="full once"),
    ],
)
def test_the_verdict_and_its_reason_follow_from_token_and_steps(
    triton: FakeTriton, ago: float | None, generate: Generate, limits: Limits, verdict: tuple[bool, str]
) -> None:
    if ago is not None:
        triton.step(ago=ago)
    triton.generate = generate
    ok, reason = _ask(triton, limits)
    assert (ok, reason[: len(verdict[1])]) == verdict
    assert (triton.asked[0]["max_tokens"], triton.asked[0]["min_tokens"]) == (1, 1)


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
def test_an_answer_without_one_token_is_unhealthy_at_once(triton: FakeTriton, answer: Answer, reason: str) -> None:
    triton.generate = _answering(*answer)
    verdict = _ask(triton)
    assert not verdict.ok
    assert verdict.reason.startswith(reason)
    assert len(triton.asked) == 1


@pytest.mark.parametrize("probe", [healthy, live, ready])
def test_with_metrics_switched_off_another_servers_page_is_ignored(
    triton: FakeTriton, probe: Callable[..., Verdict]
) -> None:
    triton.step()
    triton.generate = _dead
    assert probe(triton.address, None, IN_TIME) == (False, f"{DEAD_REASON}, no metrics (switched off)")
    triton.generate = FakeTriton.token
    verdict = probe(triton.address, None, IN_TIME)
    assert verdict.ok
    assert re.fullmatch(r"one token in [0-9.]+ s \(no metrics \(switched off\)\)", verdict.reason)


def test_the_supervisor_ignores_another_servers_page_too(triton: FakeTriton) -> None:
    triton.step()
    triton.generate = _dead
    pace = Pace.for_verdict_within(60)
    assert live_probe(triton.address, triton.address, pace)().ok
    assert not live_probe(triton.address, None, pace)().ok


def test_the_metrics_of_another_model_are_no_evidence(triton: FakeTriton) -> None:
    triton.model = "other"
    triton.step()
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith("one token in ")
    assert f"{triton.address} has no llama_last_step_timestamp_seconds of the model llama" in verdict.reason


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        http_answer(b"<html/>"),
        http_answer(b'llama_last_step_timestamp_seconds{model="llama"} 1.2.3\n'),
        b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nhalf",
        b"what?",
        None,
    ],
    ids=["404", "page", "number", "half", "babble", "silence"],
)
def test_a_page_that_cannot_be_read_leaves_the_token_as_evidence(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(health, "METRICS_SECONDS", 0.2 if answer is None else 20.0)
    with server(stay_silent if answer is None else respond(answer)) as port:
        verdict = healthy(triton.address, Address(HOST, port), IN_TIME)
    assert verdict.ok
    assert f"(no metrics (127.0.0.1:{port}" in verdict.reason
    assert ("doesn't answer within 0.2 s" in verdict.reason) == (answer is None)


def test_a_steps_age_is_taken_by_the_servers_own_clock(triton: FakeTriton) -> None:
    triton.clock = time.time() + 3600
    triton.step(ago=-3600)
    assert _ask(triton).reason.startswith("a step ")
    assert triton.asked == []
    triton.step(ago=-3600 + 95)
    assert _ask(triton).reason.startswith("one token in ")


def test_every_instance_needs_a_recent_step(triton: FakeTriton) -> None:
    triton.instances[SECOND] = Instance()
    triton.step(ago=1)
    assert _ask(triton).reason.startswith("one token in ")
    triton.step(SECOND, ago=20)
    asked = len(triton.asked)
    assert _ask(triton).reason.startswith("a step ")
    assert len(triton.asked) == asked


def test_an_instance_that_hangs_is_unhealthy_though_another_one_answers_until_its_step_ends(triton: FakeTriton) -> None:
    triton.instances[SECOND] = Instance(rows=2)
    triton.step(SECOND, ago=95)
    verdict = _ask(triton, SOON)
    assert not verdict.ok
    assert verdict.reason.startswith("one token in ")
    assert verdict.reason.endswith(f", and rows hang in {SECOND}, the last step was long ago")

    def step_elsewhere(triton: FakeTriton) -> Answer:
        triton.step(SECOND)
        return triton.token()

    triton.step(ago=95)
    triton.generate = step_elsewhere
    assert _ask(triton).ok


@pytest.mark.parametrize("fault", ["unknown host", "refused", "hangs up"])
def test_an_unreachable_server_is_unhealthy_and_named(triton: FakeTriton, fault: str) -> None:
    with server(hang_up) as port:
        address = {
            "unknown host": Address("no-such-host.invalid", port),
            "refused": Address(HOST, 65535),
            "hangs up": Address(HOST, port),
        }[fault]
        verdict = healthy(address, triton.address, IN_TIME)
    assert not verdict.ok
    assert f"{address} can't be asked: " in verdict.reason
