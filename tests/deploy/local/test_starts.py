"""Starts that the launcher refuses, or that fail with a reason."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
from deploy.local.conftest import Launch
from end_to_end.servers import until


def test_a_model_that_is_not_ready_in_time_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    until(lambda: bool(psutil.Process(launcher.process.pid).children()), lambda: "the supervisor runs")
    # On a slow machine the stub starts later than that: the launcher's time passes while it is stopped.
    launcher.process.send_signal(signal.SIGSTOP)
    launcher.wait_until_loading()
    launcher.process.send_signal(signal.SIGCONT)
    code, _, errors = launcher.ends()
    assert code == 1
    assert "not ready within 2 s" in errors


def test_a_refused_start_ends_with_its_reason(launch: Launch) -> None:
    code, output, errors = launch(REFUSE="1").ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert "ValueError: slots is 9000: must be in 1 ... 64" in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output
