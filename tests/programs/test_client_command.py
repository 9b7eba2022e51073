"""The command line as a process: no server, Ctrl-C, stdin, and what the package imports."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

MAIN = "from triton_llama.cli import main; main()"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", MAIN, *arguments]


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), input=stdin, capture_output=True, timeout=120, check=False)


def assert_refused(result: subprocess.CompletedProcess[bytes], code: int, message: str) -> None:
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines), result.stdout) == (code, 1, b"")
    assert message in lines[0]


@pytest.fixture
def dead_url() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("protocol", "arguments"),
    [
        ("http", ("generate", "a")),
        ("grpc", ("generate", "a", "--stream")),
        ("grpc", ("status",)),
    ],
)
def test_without_a_server_a_command_is_one_line_and_exit_code_3(
    protocol: str, arguments: tuple[str, ...], dead_url: str
) -> None:
    result = run(*arguments, "--url", dead_url, "--protocol", protocol, stdin=b"a")
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines)) == (3, 1)
    assert f"no connection to {protocol}://{dead_url}" in lines[0]


def test_debug_shows_the_traceback(dead_url: str) -> None:
    assert b"Traceback" in run("--debug", "status", "--url", dead_url).stderr


def test_stdin_that_is_not_utf_8_is_refused_with_its_byte() -> None:
    assert_refused(run("generate", stdin=b"ab\xff"), 2, "stdin is not UTF-8 at byte 2")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("arguments", [("generate", "a"), ("generate", "a", "--stream")])
def test_ctrl_c_ends_a_waiting_command_without_a_traceback(arguments: tuple[str, ...], protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            command(*arguments, "--url", url, "--protocol", protocol, "--connect-timeout", "50"),
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
    assert (process.returncode, stdout, stderr.strip()) == (130, b"", b"")


def test_importing_the_package_imports_no_client_library() -> None:
    program = "import sys, triton_llama; print({'tritonclient', 'httpx', 'grpc'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], encoding="utf-8").strip() == "set()"
