"""How healthy, alive and ready differ: while a server loads, drains, fails, or has said nothing yet."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_llama.health import Limits, healthy, live, ready
from unit.tritons import DEAD, NOT_LOADED, FakeTriton, fake_triton, refusal

LIMITS = Limits(timeout=30.0)
SOON = Limits(timeout=0.3)


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def _write(file: Path, state: str, reason: str = "") -> None:
    file.write_text(json.dumps({"state": state, "reason": reason, "since": time.time() - 12}))


def _all(triton: FakeTriton, state_file: Path | None, limits: Limits = LIMITS) -> dict[str, bool]:
    """What each of the three says; each in one line."""
    verdicts = {
        probe.__name__: probe(triton.endpoint, triton.metrics, limits, state_file=state_file)
        for probe in (healthy, live, ready)
    }
    assert all("\n" not in verdict.reason for verdict in verdicts.values())
    return {name: verdict.ok for name, verdict in verdicts.items()}


@pytest.mark.parametrize("written", [None, "serving"])
def test_a_server_that_serves_is_refused_anything(triton: FakeTriton, state_file: Path, written: str | None) -> None:
    if written:
        _write(state_file, written)
    assert _all(triton, state_file) == {"healthy": True, "live": True, "ready": True}


def test_a_draining_server_is_started_anew_or_gets_requests(triton: FakeTriton, state_file: Path) -> None:
    """Its model is unloaded already, and the last rows are still on their way."""
    _write(state_file, "draining", "SIGTERM")
    triton.generate = lambda _: refusal(*NOT_LOADED)
    assert _all(triton, state_file) == {"healthy": False, "live": True, "ready": False}
    verdict = ready(triton.endpoint, triton.metrics, LIMITS, state_file=state_file)
    assert re.fullmatch(r"draining for \d+ s: SIGTERM", verdict.reason)
    triton.step()
    assert _all(triton, state_file) == {"healthy": True, "live": True, "ready": False}


def test_an_announced_end_does_not_keep_requests_away(triton: FakeTriton, state_file: Path) -> None:
    _write(state_file, "serving")
    announcement = state_file.with_name("state.json.announced")
    announcement.touch()
    assert _all(triton, state_file) == {"healthy": True, "live": True, "ready": False}
    verdict = ready(triton.endpoint, triton.metrics, LIMITS, state_file=state_file)
    assert re.fullmatch(r"draining for \d+ s: its end is announced", verdict.reason)
    announcement.unlink()
    assert _all(triton, state_file)["ready"]
    state_file.unlink()
    announcement.touch()
    assert not _all(triton, state_file)["ready"], "no state, but an end"


def test_a_server_that_starts_is_started_anew(state_file: Path) -> None:
    """Triton doesn't listen before its models are loaded."""
    with fake_triton() as gone:
        pass
    assert _all(gone, state_file) == {"healthy": False, "live": False, "ready": False}, "nobody says that it starts"
    _write(state_file, "starting", "the model is being loaded")
    assert _all(gone, state_file) == {"healthy": False, "live": True, "ready": False}
    verdict = healthy(gone.endpoint, gone.metrics, LIMITS, state_file=state_file)
    assert re.search(r" \(starting for \d+ s: the model is being loaded\)$", verdict.reason)


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
def test_a_server_without_its_model_is_started_anew(triton: FakeTriton, refused: tuple[int, str]) -> None:
    """It loads, or is being unloaded, and nobody has written down why."""
    triton.generate = lambda _: refusal(*refused)
    triton.ready["/v2/models/llama/ready"] = 400
    assert _all(triton, None) == {"healthy": False, "live": True, "ready": False}
    assert len(triton.asked) == 2, "asked again what is certain"


def test_a_dead_model_counts_as_one_that_loads(triton: FakeTriton, state_file: Path) -> None:
    """A Triton that notices says that the model isn't ready, as it does of one that loads."""
    _write(state_file, "serving")
    triton.step(ago=95)
    triton.generate = lambda _: refusal(*DEAD)
    for status in (200, 400):
        triton.ready["/v2/models/llama/ready"] = status
        assert _all(triton, state_file) == {"healthy": False, "live": False, "ready": False}


def test_a_model_that_hangs_is_alive_or_ready(triton: FakeTriton) -> None:
    triton.step(ago=95)
    triton.generate = FakeTriton.hang
    assert _all(triton, None, SOON) == {"healthy": False, "live": False, "ready": False}


def test_a_failed_server_is_alive_because_of_its_last_step(triton: FakeTriton, state_file: Path) -> None:
    _write(state_file, "failed", "the model's process is gone")
    state_file.with_name("state.json.announced").touch()
    triton.step()
    assert _all(triton, state_file) == {"healthy": False, "live": False, "ready": False}
    verdict = live(triton.endpoint, triton.metrics, LIMITS, state_file=state_file)
    assert re.fullmatch(r"failed for \d+ s: the model's process is gone", verdict.reason)


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/llama/ready"])
def test_triton_is_not_believed_that_it_is_not_ready(triton: FakeTriton, path: str) -> None:
    triton.ready[path] = 400
    triton.step()
    assert _all(triton, None) == {"healthy": True, "live": True, "ready": False}
    verdict = ready(triton.endpoint, triton.metrics, LIMITS)
    assert verdict.reason == f"{triton.endpoint}{path} says HTTP 400"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b'{"state": "serving"}', b'{"state": "well", "since": 1}', b'"serving"'],
)
def test_a_state_that_cannot_be_read_kills_a_server_or_counts_as_serving(
    triton: FakeTriton, state_file: Path, content: bytes
) -> None:
    state_file.write_bytes(content)
    assert _all(triton, state_file) == {"healthy": True, "live": True, "ready": False}
    reason = ready(triton.endpoint, triton.metrics, LIMITS, state_file=state_file).reason
    assert reason.startswith(f"unreadable for 0 s: {state_file} holds ")


def test_a_state_file_that_is_a_folder_raises(triton: FakeTriton, state_file: Path) -> None:
    state_file.mkdir()
    assert _all(triton, state_file) == {"healthy": True, "live": True, "ready": False}
