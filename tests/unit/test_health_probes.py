"""How healthy, alive and ready differ, and the probe's arguments, output and exit codes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_llama import health
from triton_llama.health import Address, Limits, State, Verdict, healthy, live, main, read_state, ready
from unit.peers import DEAD, NOT_LOADED, FakeTriton, fake_triton, refusal

LIMITS = Limits(timeout=30.0)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    for name in ("TRITON_LLAMA_URL", "TRITON_STATE_FILE"):
        monkeypatch.delenv(name, raising=False)
    # The fake has both on one port.
    monkeypatch.setattr(health, "METRICS_PORT", health.HTTP_PORT)
    with fake_triton() as one:
        yield one


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def _write(file: Path, state: str, reason: str = "") -> None:
    file.write_text(json.dumps({"state": state, "reason": reason, "since": time.time() - 12}))


def _verdicts(triton: FakeTriton, state_file: Path | None = None, limits: Limits = LIMITS) -> list[Verdict]:
    """Whether the server is healthy, alive and ready."""
    verdicts = [
        probe(triton.address, triton.address, limits, state_file=state_file) for probe in (healthy, live, ready)
    ]
    assert all("\n" not in verdict.reason for verdict in verdicts)
    return verdicts


def _all(triton: FakeTriton, state_file: Path | None = None, limits: Limits = LIMITS) -> list[bool]:
    return [verdict.ok for verdict in _verdicts(triton, state_file, limits)]


@pytest.mark.parametrize(
    ("state", "model", "verdicts", "reason"),
    [
        ("none", "idle", "healthy alive ready", "one token in .*|a step .*"),
        ("serving", "idle", "healthy alive ready", "one token in .*|a step .*"),
        ("serving", "dead", "", "HTTP 400: .*"),
        ("draining", "unloaded", "alive", r"draining for \d+ s: why"),
        ("draining", "busy", "healthy alive", r"draining for \d+ s: why"),
        ("starting", "busy", "healthy alive", r"starting for \d+ s: why"),
        ("serving, announced", "busy", "healthy alive", r"draining for \d+ s: its end is announced"),
        ("none, announced", "busy", "healthy alive", r"draining for \d+ s: its end is announced"),
        ("failed, announced", "busy", "", r"failed for \d+ s: why"),
    ],
)
def test_state_file_and_evidence_decide_whether_a_server_is_healthy_alive_and_ready(
    triton: FakeTriton, state_file: Path, state: str, model: str, verdicts: str, reason: str
) -> None:
    name, _, announced = state.partition(", ")
    if name != "none":
        _write(state_file, name, "why")
    if announced:
        state_file.with_name("state.json.announced").touch()
    if model == "busy":
        triton.step()
    elif model != "idle":
        triton.generate = lambda _: refusal(*{"dead": DEAD, "unloaded": NOT_LOADED}[model])
    found = dict(zip(("healthy", "alive", "ready"), _verdicts(triton, state_file), strict=True))
    assert [name for name, verdict in found.items() if verdict.ok] == verdicts.split()
    assert re.fullmatch(reason, found["ready"].reason)


def test_a_server_that_does_not_listen_is_alive_only_if_the_state_file_says_that_it_starts(state_file: Path) -> None:
    """Triton doesn't listen before its models are loaded."""
    with fake_triton() as gone:
        pass
    assert _all(gone, state_file) == [False, False, False]
    _write(state_file, "starting", "the model is being loaded")
    assert _all(gone, state_file) == [False, True, False]
    reason = _verdicts(gone, state_file)[0].reason
    assert re.search(r" \(starting for \d+ s: the model is being loaded\)$", reason)


@pytest.mark.parametrize(
    "refused",
    [
        NOT_LOADED,
        (404, NOT_LOADED[1]),
        (400, "Request for unknown model: 'llama' is not found"),
        (503, "Request for unknown model: 'llama' version 1 is not at ready state"),
        (400, "the server is stopping"),
        (503, "Server is stopping, scheduler for model has stopped accepting new inference requests"),
    ],
)
def test_a_listening_server_without_its_model_is_alive(triton: FakeTriton, refused: tuple[int, str]) -> None:
    triton.generate = lambda _: refusal(*refused)
    triton.ready["/v2/models/llama/ready"] = 400
    assert _all(triton) == [False, True, False]
    assert len(triton.asked) == 2, "one request for each probe that needs a token"


def test_a_hanging_model_is_not_alive(triton: FakeTriton) -> None:
    triton.step(ago=95)
    triton.generate = FakeTriton.hang
    assert _all(triton, limits=Limits(timeout=0.3)) == [False, False, False]


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/llama/ready"])
def test_a_server_that_triton_calls_unready_is_not_ready(triton: FakeTriton, path: str) -> None:
    triton.ready[path] = 400
    triton.step()
    assert _all(triton) == [True, True, False]
    assert _verdicts(triton)[2].reason == f"{triton.address}{path} says HTTP 400"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b'{"state": "serving"}', b'{"state": "well", "since": 1}', b'"serving"', None],
)
def test_an_unreadable_state_file_is_alive_and_not_ready(
    triton: FakeTriton, state_file: Path, content: bytes | None
) -> None:
    if content is None:
        state_file.mkdir()
    else:
        state_file.write_bytes(content)
    assert _all(triton, state_file) == [True, True, False]
    assert _verdicts(triton, state_file)[2].reason.startswith(f"unreadable for 0 s: {state_file}")


def test_a_state_says_since_when_and_a_missing_file_is_no_state(state_file: Path) -> None:
    assert read_state(state_file) is read_state(None) is None
    assert State("failed", "", time.time() - 12).describe() == "failed for 12 s"


@pytest.mark.parametrize(
    ("flags", "yes", "no"),
    [((), "healthy", "unhealthy"), (("--live",), "alive", "not alive"), (("--ready",), "ready", "not ready")],
)
def test_each_question_prints_one_line_and_exits_with_0_or_1(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], yes: str, no: str
) -> None:
    triton.step()
    assert main(["--url", str(triton.address), *flags]) == 0
    assert re.fullmatch(rf"{yes}: a step [0-9.]+ s ago\n", capsys.readouterr().out)
    assert triton.asked == [], "the metrics are found by the endpoint"
    triton.step(ago=95)
    triton.generate = lambda _: refusal(*DEAD)
    assert main(["--url", str(triton.address), *flags]) == 1
    assert re.fullmatch(rf"{no}: HTTP 400: .*\n", capsys.readouterr().out)


def test_no_metrics_asks_for_a_token_and_step_age_extends_the_evidence(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.step()
    assert main(["--url", str(triton.address), "--no-metrics"]) == 0
    assert capsys.readouterr().out.startswith("healthy: one token ")
    triton.step(ago=95)
    assert main(["--url", str(triton.address), f"--metrics-url={triton.address}", "--step-age", "1000"]) == 0
    assert capsys.readouterr().out.startswith("healthy: a step ")


def test_options_override_the_environment(
    triton: FakeTriton, state_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.step()
    _write(state_file, "failed", "no GPU")
    monkeypatch.setenv("TRITON_LLAMA_URL", str(triton.address))
    monkeypatch.setenv("TRITON_STATE_FILE", str(state_file))
    assert main([]) == 1
    assert "no GPU" in capsys.readouterr().out
    monkeypatch.setenv("TRITON_LLAMA_URL", "grpc://x")
    assert main(["--url", str(triton.address), "--state-file", str(state_file.with_name("none"))]) == 0
    monkeypatch.setenv("TRITON_STATE_FILE", "")
    assert main(["--url", str(triton.address)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "https://llama"), "--url: 'https://llama' is no address; it must be HOST:PORT"),
        (("--url", "llama:0"), "--url: 'llama:0' has the port 0; it must be from 1 to 65535"),
        (("--metrics-url", "a b"), "--metrics-url: 'a b' is no address"),
        (("--timeout", "0"), "--timeout: '0' is no number of seconds above 0"),
        (("--step-age", "inf"), "--step-age: 'inf' is no number of seconds above 0"),
        (("--live", "--ready"), "--ready: not allowed with argument --live"),
        (("--metrics-url=a", "--no-metrics"), "--no-metrics: not allowed with argument --metrics-url"),
        (("--liv",), "unrecognized arguments: --liv"),
        (("llama:8000",), "unrecognized arguments: llama:8000"),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama", Address("llama", 8000)),
        ("llama:9000", Address("llama", 9000)),
        ("http://llama:9000/", Address("llama", 9000)),
        ("[::1]:80", Address("::1", 80)),
        ("[::1]", Address("::1", 8000)),
    ],
)
def test_an_address_is_parsed_and_written_back(text: str, expected: Address) -> None:
    assert Address.parse(text, 8000) == expected
    assert Address.parse(str(expected), 1) == expected
    assert expected.metrics == Address(expected.host, expected.port + 2)


@pytest.mark.parametrize("text", ["", ":80", "http://", "a:b", "a:99999", "::1", "a/b:80", "grpc://a", "a:1:2", "a:-1"])
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Address.parse(text, 8000)
