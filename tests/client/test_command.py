"""The command line as a process: no server, Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-W", "error", "-c", "from triton_llama.cli import main; main()")


@pytest.mark.parametrize("arguments", [("generate", "a"), ("generate", "a", "--stream"), ("status",)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_server_a_command_is_one_line_and_exit_code_3(protocol: str, arguments: tuple[str, ...]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"{protocol}://127.0.0.1:{bound.getsockname()[1]}"
        result = subprocess.run(
            [*COMMAND, *arguments, "--url", url], capture_output=True, encoding="utf-8", timeout=120, check=False
        )
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)
    assert f"no connection to {url}" in result.stderr


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("arguments", [("generate", "a"), ("generate", "a", "--stream")])
def test_ctrl_c_ends_a_waiting_command_without_a_traceback(arguments: tuple[str, ...], protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"{protocol}://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--url", url, "--connect-timeout", "50"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell's background job would hand down an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr.strip()) == (1, b"", b"Aborted!")
