"""Starts that the launcher refuses, or that fail with a reason."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest
from deploy.launcher.conftest import Launch
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


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ((), {"REFUSE": "1"}, "ValueError: slots is 9000: must be in 1 ... 64"),
        (("--", "--no-such-option"), {}, "unrecognized option '--no-such-option'"),
    ],
)
def test_a_refused_start_ends_with_its_reason(
    launch: Launch, arguments: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    code, output, errors = launch(*arguments, **environment).ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert reason in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


def test_a_port_that_is_taken_while_the_model_loads_is_named(launch: Launch, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    launcher = launch(f"--http-port={port}", LOAD_WHEN=str(loaded))
    launcher.wait_until_loading()
    with socket.create_server(("127.0.0.1", port)):
        loaded.touch()
        code, _, errors = launcher.ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert f"127.0.0.1:{port}" in message
    assert "already in use" in message
