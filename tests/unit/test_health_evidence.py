"""Which evidence proves that a model computes: servers in every state, on real sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from triton_supervisor import health
from triton_supervisor import triton as triton_api
from triton_supervisor.health import Limits, Verdict, healthy
from triton_supervisor.triton import Address
from triton_supervisor.watch import MAX_FAILURES, live_probe
from unit.peers import HOST, hang_up, respond, server, stay_silent
from unit.tritons import DEAD, FULL, Answer, FakeTriton, Instance, fake_triton, refusal

IN_TIME = Limits(timeout=30.0, step_age=30.0)
SOON = Limits(timeout=0.3, step_age=30.0)
DEAD_REASON = f"HTTP 400: {DEAD[1].rstrip('.')}"
OLD = "the last step was long ago"
SECOND = "llama_0_0_gpu1"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A server whose model made its last step 95 s ago."""
    with fake_triton() as one:
        one.step(ago=95.0)
        yield one


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAUSE_S", 0.02)


def _ask(triton: FakeTriton, limits: Limits = IN_TIME) -> Verdict:
    """Return the verdict; the reason without how long ago an old step was exactly."""
    verdict = healthy(triton.endpoint, triton.metrics, limits)
    assert "\n" not in verdict.reason
    return Verdict(verdict.ok, re.sub(r"\b\d{2,} s ago", "long ago", verdict.reason))


def _assert_healthy(triton: FakeTriton, reason: str, limits: Limits = IN_TIME) -> None:
    verdict = _ask(triton, limits)
    assert verdict.ok
    assert verdict.reason.startswith(reason)


def _dead(_: FakeTriton) -> Answer:
    return refusal(*DEAD)


def test_a_recent_step_is_evidence_and_spares_the_model_a_request(triton: FakeTriton) -> None:
    triton.step(ago=0.4)
    _assert_healthy(triton, "a step ")
    assert triton.asked == []


def test_an_idle_server_generates_one_token(triton: FakeTriton) -> None:
    _assert_healthy(triton, "one token in ")
    (request,) = triton.asked
    assert (request["max_tokens"], request["min_tokens"]) == (1, 1)


def test_the_last_values_of_a_dead_process_are_no_evidence(triton: FakeTriton) -> None:
    triton.generate = _dead
    assert _ask(triton) == Verdict(False, f"{DEAD_REASON}, {OLD}")
    triton.step(ago=-3600)
    assert not _ask(triton).ok, "clocks that disagree make no old step a recent one"


@pytest.fixture(params=["queue", "slots"])
def waiting(triton: FakeTriton, request: pytest.FixtureRequest) -> FakeTriton:
    """A server where requests wait for the model."""
    if request.param == "queue":
        triton.queued = 1
    else:
        triton.instances["llama_0_0"].rows = 3
    return triton


def test_a_model_without_a_step_for_waiting_requests_is_unhealthy(waiting: FakeTriton) -> None:
    assert _ask(waiting, SOON) == Verdict(False, f"requests wait, {OLD}")
    assert waiting.asked == []


def test_a_step_for_waiting_requests_is_evidence_in_place_of_a_token(
    waiting: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: waiting.step())
    _assert_healthy(waiting, "requests wait, but a step ")
    assert waiting.asked == []


def test_a_token_is_generated_once_no_request_waits(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were cancelled, or refused."""
    triton.queued = 1
    monkeypatch.setattr(time, "sleep", lambda _: setattr(triton, "queued", 0))
    _assert_healthy(triton, "one token in ")
    assert len(triton.asked) == 1


@pytest.mark.parametrize(("ever", "words"), [(True, OLD), (False, "no step yet")])
def test_a_model_without_token_or_step_is_unhealthy_after_the_timeout(
    triton: FakeTriton, ever: bool, words: str
) -> None:
    triton.instances["llama_0_0"].last_step *= ever
    triton.generate = FakeTriton.hang
    assert _ask(triton, SOON) == Verdict(False, f"no token within 0.3 s, {words}")


def test_a_step_made_while_a_token_is_awaited_is_evidence(triton: FakeTriton) -> None:
    def step_and_hang(triton: FakeTriton) -> Answer:
        triton.step()
        return triton.hang()

    triton.generate = step_and_hang
    _assert_healthy(triton, "no token within 0.3 s, but a step ", SOON)


@pytest.mark.parametrize("refused", [FULL, (400, FULL[1]), (503, "the upstream is busy")])
def test_a_full_queue_is_healthy_if_steps_are_made(triton: FakeTriton, refused: tuple[int, str]) -> None:
    def refuse_and_step(triton: FakeTriton) -> Answer:
        # The step comes after the refusal, a moment later.
        if len(triton.asked) > 2:
            triton.step()
        return refusal(*refused)

    triton.generate = refuse_and_step
    words = refused[1].removeprefix("[request id: health] ")
    _assert_healthy(triton, f"HTTP {refused[0]}: {words}, but a step ")


def test_a_full_queue_is_tried_until_it_has_room(triton: FakeTriton) -> None:
    triton.generate = lambda triton: refusal(*FULL) if len(triton.asked) < 3 else triton.token()
    _assert_healthy(triton, "one token in ")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal(400, "decoding failed; the server's log has the reason"), "HTTP 400: decoding failed; the "),
        ((500, {"error": "two\nlines \ud800"}), "HTTP 500: two lines ?"),
        ((200, {"num_output_tokens": 0}), 'HTTP 200: {"num_output_tokens": 0}'),
        ((404, {}), "HTTP 404: {}"),
    ],
)
def test_an_answer_without_one_token_is_unhealthy_at_once(triton: FakeTriton, answer: Answer, reason: str) -> None:
    triton.generate = lambda _: answer
    verdict = _ask(triton)
    assert not verdict.ok
    assert verdict.reason.startswith(reason)
    assert len(triton.asked) == 1


@pytest.mark.parametrize("seconds", [10.0, 120.0, 3600.0])
def test_a_stuck_model_is_declared_dead_in_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    limits: list[Limits] = []
    monkeypatch.setattr("triton_supervisor.watch.live", lambda http, metrics, limit: limits.append(limit))
    probe, pause = live_probe(Address(HOST, 1), None, seconds)
    probe()
    assert limits[0].step_age + MAX_FAILURES * (limits[0].timeout + pause) <= seconds


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n"
        + b'llama_last_step_timestamp_seconds{model="llama"} 1.2.3\n'.ljust(60),
        b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nhalf",
        b"what?",
        None,
    ],
    ids=["404", "number", "half", "babble", "silence"],
)
def test_a_page_that_cannot_be_read_leaves_the_token_as_evidence(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(triton_api, "METRICS_S", 0.2 if answer is None else 20.0)
    with server(stay_silent if answer is None else respond(answer)) as port:
        verdict = healthy(triton.endpoint, Address(HOST, port), IN_TIME)
    assert verdict.ok
    assert f"(no metrics (127.0.0.1:{port}" in verdict.reason
    assert ("doesn't answer within 0.2 s" in verdict.reason) == (answer is None)


def test_every_instance_needs_a_recent_step(triton: FakeTriton) -> None:
    triton.instances[SECOND] = Instance()
    triton.step(ago=1)
    _assert_healthy(triton, "one token in ")
    triton.step(SECOND, ago=20)
    _assert_healthy(triton, "a step ")


def test_an_unreachable_server_is_unhealthy_and_named(triton: FakeTriton) -> None:
    with server(hang_up) as port:
        for address in (Address("no-such-host.invalid", port), Address(HOST, port)):
            verdict = healthy(address, triton.metrics, IN_TIME)
            assert not verdict.ok
            assert f"{address} can't be asked: " in verdict.reason
