"""Which evidence proves that a model computes, and the probe's exit codes; end_to_end has a real Triton."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress

import pytest
from client.peers import HOST, hang_up, respond, server, stay_silent
from llama_engine.observability.metrics import METRICS
from triton_llama import SamplingParams
from triton_llama.tensors import prepare, prepare_embeddings
from triton_supervisor import triton
from triton_supervisor.health import EMBEDDING_REQUEST, REQUEST, Limits, healthy, main
from triton_supervisor.triton import Address, AnswerError, RepositoryApi

IN_TIME = Limits(timeout=20.0, step_age=30.0)
DEAD = "Stub process 'llama_0_0' is not healthy."
OLD, RECENT = 95.0, 1.0
"""Seconds since a last step, at the probe."""


def _answer(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()


TOKEN = _answer(200, '{"text_output": " a", "num_output_tokens": 1}')


def _page(*ages: float) -> bytes:
    """The metrics page of instances whose last steps were that many seconds ago."""
    lines = [
        f'{triton.LAST_STEP}{{model="llama",model_instance="llama_{number}_0"}} {time.time() - age:.16g}\n'
        for number, age in enumerate(ages)
    ]
    return _answer(200, "".join([f"# TYPE {triton.LAST_STEP} gauge\n", *lines]))


@pytest.mark.parametrize(
    ("page", "answer", "ok", "reason"),
    [
        # A recent step is enough, and no token is asked for.
        ((RECENT,), b"", True, r"a step \d+\.\d s ago"),
        ((OLD,), TOKEN, True, r"one token in .* s \(the last step was \d+ s ago\)"),
        ((RECENT, OLD), TOKEN, True, "one token in .*"),
        # A process that died leaves its last value on the page.
        ((OLD,), _answer(400, f'{{"error": "{DEAD}"}}'), False, r"HTTP 400: Stub .* healthy \(the last step .*"),
        # Clocks that disagree make no old step a recent one.
        ((-3600,), _answer(400, f'{{"error": "{DEAD}"}}'), False, "HTTP 400: .*"),
        ((OLD,), _answer(503, '{"error": "[request id: health] Exceeds maximum"}'), False, "HTTP 503: Exceeds .*"),
        ((OLD,), _answer(200, '{"num_output_tokens": 0}'), False, "HTTP 200: .*"),
        ((OLD,), _answer(500, json.dumps({"error": "two\nlines \ud800"})), False, r"HTTP 500: two lines \? .*"),
        # A page that can't be read leaves the token as evidence.
        (b"what?", TOKEN, True, r"one token in .* s \(no metrics: .*\)"),
    ],
)
def test_evidence_is_a_recent_step_of_every_instance_or_one_token(
    page: tuple[float, ...] | bytes, answer: bytes, ok: bool, reason: str
) -> None:
    content = page if isinstance(page, bytes) else _page(*page)
    with server(respond(content)) as metrics, server(respond(answer)) as http:
        verdict = healthy(Address(HOST, http), Address(HOST, metrics), IN_TIME)
    assert verdict.ok == ok
    assert re.fullmatch(reason, verdict.reason), verdict.reason


def test_a_model_without_a_token_is_unhealthy_after_the_timeout() -> None:
    with server(respond(_page(time.time()))) as metrics, server(stay_silent) as http:
        verdict = healthy(Address(HOST, http), Address(HOST, metrics), Limits(timeout=0.3, step_age=30.0))
    assert verdict == (False, "no token within 0.3 s (no step yet)")


def test_an_unreachable_server_is_unhealthy_and_named() -> None:
    with server(hang_up) as port:
        verdict = healthy(Address(HOST, port), None, IN_TIME)
        assert not verdict.ok
        assert verdict.reason.startswith(f"{HOST}:{port} can't be asked: ")


@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [(TOKEN, 0, "healthy: one token in .*"), (_answer(400, '{"error": "no"}'), 1, r"unhealthy: HTTP 400: no .*")],
)
def test_the_probe_prints_one_line_and_exits_with_0_or_1(
    answer: bytes, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(respond(answer)) as port:
        assert main(["--url", f"{HOST}:{port}"]) == code
    assert re.fullmatch(f"{line}\n", capsys.readouterr().out)


def test_the_probe_reads_the_metrics_two_ports_above_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        # That port may be in use.
        with suppress(OSError), server(respond(b"")) as port, server(respond(_page(OLD)), port + 2):
            assert main(["--url", f"{HOST}:{port}", "--step-age", "1000"]) == 0
            break
    assert capsys.readouterr().out.startswith("healthy: a step ")


def test_the_probe_reads_the_metrics_at_the_given_address(capsys: pytest.CaptureFixture[str]) -> None:
    with server(respond(b"")) as http, server(respond(_page(OLD))) as metrics:
        addresses = ["--url", f"{HOST}:{http}", "--metrics", f"{HOST}:{metrics}"]
        assert main([*addresses, "--step-age", "1000"]) == 0
    assert capsys.readouterr().out.startswith("healthy: a step ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "llama:0"), "--url: 'llama:0' is no address; it must be HOST:PORT, with a port of 1 ... 65535"),
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


def test_the_probes_requests_have_the_client_librarys_inputs() -> None:
    """Triton batches only requests with the same set of inputs: another set would split a batch."""
    assert set(REQUEST) == {tensor.name for tensor in prepare("a", SamplingParams(seed=1)).tensors}
    assert set(EMBEDDING_REQUEST) == {tensor.name for tensor in prepare_embeddings(["a"], "")[0].tensors}


def test_the_probe_reads_metrics_that_exist() -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert {kinds[name] for name in (triton.LAST_STEP, triton.SLOTS_IN_USE, triton.WAITING)} == {"gauge"}


def test_an_unexpected_answer_does_not_count_as_unloaded() -> None:
    with server(respond(_answer(200, "[{}]"))) as port, pytest.raises(AnswerError, match="HTTP 200: "):
        RepositoryApi(Address(HOST, port), {}).is_loaded("llama")
