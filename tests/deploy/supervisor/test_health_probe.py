"""Which evidence proves that a model computes, and the probe's arguments, output and exit codes: on real sockets."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from client.peers import HOST, hang_up, respond, server, stay_silent
from deploy.supervisor.tritons import DEAD, FULL, Answer, FakeTriton, Instance, fake_triton, refusal
from triton_supervisor import triton as triton_api
from triton_supervisor.health import Limits, Verdict, healthy, main
from triton_supervisor.triton import Address

IN_TIME = Limits(timeout=30.0, step_age=30.0)
SOON = Limits(timeout=0.3, step_age=30.0)
DEAD_REASON = f"HTTP 400: {DEAD[1].rstrip('.')}"
OLD = "(the last step was long ago)"
SECOND = "llama_0_0_gpu1"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A server whose model made its last step 95 s ago."""
    with fake_triton() as one:
        one.step(ago=95.0)
        yield one


def _ask(triton: FakeTriton, limits: Limits = IN_TIME) -> Verdict:
    """Return the verdict; the reason without how long ago an old step was exactly."""
    verdict = healthy(triton.endpoint, triton.metrics, limits)
    assert "\n" not in verdict.reason
    return Verdict(verdict.ok, re.sub(r"\b\d{2,} s ago", "long ago", verdict.reason))


def _assert_healthy(triton: FakeTriton, reason: str) -> None:
    verdict = _ask(triton)
    assert verdict.ok
    assert verdict.reason.startswith(reason)


def test_a_recent_step_is_evidence_and_spares_the_model_a_request(triton: FakeTriton) -> None:
    triton.step(ago=0.4)
    _assert_healthy(triton, "a step ")
    assert triton.asked == []


def test_an_idle_server_generates_one_token(triton: FakeTriton) -> None:
    _assert_healthy(triton, "one token in ")
    (request,) = triton.asked
    assert (request["max_tokens"], request["min_tokens"]) == (1, 1)


def test_the_last_values_of_a_dead_process_are_no_evidence(triton: FakeTriton) -> None:
    triton.generate = lambda _: refusal(*DEAD)
    assert _ask(triton) == Verdict(False, f"{DEAD_REASON} {OLD}")
    triton.step(ago=-3600)
    assert not _ask(triton).ok, "clocks that disagree make no old step a recent one"


@pytest.mark.parametrize(("ever", "words"), [(True, OLD), (False, "(no step yet)")])
def test_a_model_without_token_or_step_is_unhealthy_after_the_timeout(
    triton: FakeTriton, ever: bool, words: str
) -> None:
    triton.instances["llama_0_0"].last_step *= ever
    triton.generate = FakeTriton.hang
    assert _ask(triton, SOON) == Verdict(False, f"no token within 0.3 s {words}")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal(*FULL), "HTTP 503: Exceeds maximum queue size"),
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
    assert f"(no metrics: 127.0.0.1:{port}" in verdict.reason
    assert ("doesn't answer within 0.2 s" in verdict.reason) == (answer is None)


def test_a_server_without_metrics_is_healthy_by_a_token_alone(triton: FakeTriton) -> None:
    verdict = healthy(triton.endpoint, None, IN_TIME)
    assert verdict.ok
    assert verdict.reason.endswith(" s (no metrics)")


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


def test_the_probe_prints_one_line_and_exits_with_0_or_1(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.step()
    assert main(["--url", str(triton.endpoint)]) == 0
    assert re.fullmatch(r"healthy: a step [0-9.]+ s ago\n", capsys.readouterr().out)
    assert triton.asked == [], "the metrics are found two ports above the endpoint"
    triton.step(ago=95)
    triton.generate = lambda _: refusal(*DEAD)
    assert main(["--url", str(triton.endpoint)]) == 1
    assert re.fullmatch(r"unhealthy: HTTP 400: .*\n", capsys.readouterr().out)


def test_a_step_age_extends_the_evidence(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", str(triton.endpoint), "--step-age", "1000"]) == 0
    assert capsys.readouterr().out.startswith("healthy: a step ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "https://llama"), "--url: 'https://llama' is no address; it must be HOST:PORT"),
        (("--url", "llama:0"), "--url: 'llama:0' is no address; it must be HOST:PORT, with a port of 1 ... 65535"),
        (("--timeout", "0"), "--timeout: '0' is no number of seconds above 0"),
        (("--timeout", "soon"), "--timeout: 'soon' is no number of seconds above 0"),
        (("--step-age", "inf"), "--step-age: 'inf' is no number of seconds above 0"),
        (("--time",), "unrecognized arguments: --time"),
    ],
)
def test_wrong_use_is_one_line_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    written = capsys.readouterr()
    assert (end.value.code, written.out, len(written.err.splitlines())) == (2, "", 1)
    assert message in written.err
