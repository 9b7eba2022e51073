"""How healthy, alive and ready differ, and the probe's arguments, output and exit codes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_supervisor.health import Limits, healthy, live, main, ready
from unit.tritons import DEAD, NOT_LOADED, FakeTriton, fake_triton, refusal

LIMITS = Limits(timeout=30.0)


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_STATE_FILE", raising=False)


def _write(file: Path, state: str, reason: str = "") -> None:
    file.write_text(json.dumps({"state": state, "reason": reason, "since": time.time() - 12}))


def _assert_all(
    triton: FakeTriton, state_file: Path | None, expected: str, reason: str = "", limits: Limits = LIMITS
) -> None:
    """Check which of healthy, live and ready say yes, and that the last one's reason matches."""
    verdicts = [
        probe(triton.endpoint, triton.metrics, limits, state_file=state_file) for probe in (healthy, live, ready)
    ]
    assert all("\n" not in verdict.reason for verdict in verdicts)
    names = zip(("healthy", "live", "ready"), verdicts, strict=True)
    assert " ".join(name for name, verdict in names if verdict.ok) == expected
    assert re.match(reason, verdicts[-1].reason)


@pytest.mark.parametrize("written", [None, "serving"])
def test_a_serving_server_is_healthy_alive_and_ready(triton: FakeTriton, state_file: Path, written: str | None) -> None:
    if written:
        _write(state_file, written)
    _assert_all(triton, state_file, "healthy live ready")


def test_a_draining_server_is_alive_and_not_ready(triton: FakeTriton, state_file: Path) -> None:
    _write(state_file, "draining", "SIGTERM")
    triton.generate = lambda _: refusal(*NOT_LOADED)
    _assert_all(triton, state_file, "live", r"draining for \d+ s: SIGTERM$")
    triton.step()
    _assert_all(triton, state_file, "healthy live")


def test_a_starting_server_is_alive_once_the_state_file_says_so(state_file: Path) -> None:
    """Triton doesn't listen before its models are loaded."""
    with fake_triton() as gone:
        pass
    _assert_all(gone, state_file, "")
    _write(state_file, "starting", "the model is being loaded")
    _assert_all(gone, state_file, "live")
    verdict = healthy(gone.endpoint, gone.metrics, LIMITS, state_file=state_file)
    assert re.search(r" \(starting for \d+ s: the model is being loaded\)$", verdict.reason)


@pytest.mark.parametrize(
    "refused",
    [
        NOT_LOADED,
        (404, NOT_LOADED[1]),
        (503, "Request for unknown model: 'llama' version 1 is not at ready state"),
        (400, "the server is stopping"),
        (503, "Server is stopping, scheduler for model has stopped accepting new inference requests"),
    ],
)
def test_a_listening_server_without_its_model_is_alive(triton: FakeTriton, refused: tuple[int, str]) -> None:
    triton.generate = lambda _: refusal(*refused)
    triton.ready["/v2/models/llama/ready"] = 400
    _assert_all(triton, None, "live")
    assert len(triton.asked) == 2, "one request for each probe that needs a token"


@pytest.mark.parametrize("status", [200, 400])
def test_a_model_that_computes_nothing_is_not_alive(triton: FakeTriton, state_file: Path, status: int) -> None:
    _write(state_file, "serving")
    triton.step(ago=95)
    triton.ready["/v2/models/llama/ready"] = status
    triton.generate = lambda _: refusal(*DEAD)
    _assert_all(triton, state_file, "")
    triton.generate = FakeTriton.hang
    _assert_all(triton, state_file, "", limits=Limits(timeout=0.3))


def test_a_failed_server_is_not_alive_despite_a_recent_step(triton: FakeTriton, state_file: Path) -> None:
    _write(state_file, "failed", "the model's process is gone")
    triton.step()
    _assert_all(triton, state_file, "", r"failed for \d+ s: the model's process is gone$")


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/llama/ready"])
def test_a_server_that_triton_calls_unready_is_not_ready(triton: FakeTriton, path: str) -> None:
    triton.ready[path] = 400
    triton.step()
    _assert_all(triton, None, "healthy live", f"{triton.endpoint}{path} says HTTP 400$")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"state": "serving"}', b'{"state": "well", "reason": "", "since": 1}', None],
)
def test_an_unreadable_state_file_is_alive_and_not_ready(
    triton: FakeTriton, state_file: Path, content: bytes | None
) -> None:
    if content is None:
        state_file.mkdir()
    else:
        state_file.write_bytes(content)
    _assert_all(triton, state_file, "healthy live", f"unreadable for 0 s: {state_file}")


@pytest.mark.parametrize(
    ("flags", "yes", "no"),
    [((), "healthy", "unhealthy"), (("--live",), "alive", "not alive"), (("--ready",), "ready", "not ready")],
)
def test_each_question_prints_one_line_and_exits_with_0_or_1(
    triton: FakeTriton, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], yes: str, no: str
) -> None:
    triton.step()
    assert main(["--url", str(triton.endpoint), *flags]) == 0
    assert re.fullmatch(rf"{yes}: a step [0-9.]+ s ago\n", capsys.readouterr().out)
    assert triton.asked == [], "the metrics are found two ports above the endpoint"
    triton.step(ago=95)
    triton.generate = lambda _: refusal(*DEAD)
    assert main(["--url", str(triton.endpoint), *flags]) == 1
    assert re.fullmatch(rf"{no}: HTTP 400: .*\n", capsys.readouterr().out)


def test_a_step_age_extends_the_evidence(triton: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    triton.step(ago=95)
    assert main(["--url", str(triton.endpoint), "--step-age", "1000"]) == 0
    assert capsys.readouterr().out.startswith("healthy: a step ")


def test_the_environment_names_the_state_file(
    triton: FakeTriton, state_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.step()
    _write(state_file, "failed", "no GPU")
    monkeypatch.setenv("TRITON_STATE_FILE", str(state_file))
    assert main(["--url", str(triton.endpoint)]) == 1
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "https://llama"), "--url: 'https://llama' is no address; it must be HOST:PORT"),
        (("--url", "llama:0"), "--url: 'llama:0' is no address; it must be HOST:PORT, with a port of 1 ... 65535"),
        (("--timeout", "0"), "--timeout: '0' is no number of seconds above 0"),
        (("--timeout", "soon"), "--timeout: 'soon' is no number of seconds above 0"),
        (("--step-age", "inf"), "--step-age: 'inf' is no number of seconds above 0"),
        (("--live", "--ready"), "--ready: not allowed with argument --live"),
        (("--liv",), "unrecognized arguments: --liv"),
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
