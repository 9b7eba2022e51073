"""Starts: refused, retried, shared."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from server.launcher.launching import Launch, generate
from server.servers import HTTP, ROOT
from triton_local import command
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

CRASH = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"

# Counts its starts; the first ones crash as tritonserver rarely does, the next one is tritonserver.
CRASHING = """#!/bin/bash
echo >>{starts}
if [ "$(wc -l <{starts})" -le {crashes} ]; then
  echo "{message}" >&2
  kill -ABRT $$
fi
exec {tritonserver} "$@"
"""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, crashes: int) -> Path:
    """Replace tritonserver by a program that crashes; the file in which it counts its starts."""
    starts, program = tmp_path / "starts", tmp_path / "tritonserver"
    real: Callable[..., Sequence[str]] = command.server_arguments

    def crashing(*given: object) -> Sequence[str]:
        tritonserver, *arguments = real(*given)
        program.write_text(CRASHING.format(starts=starts, crashes=crashes, message=CRASH, tritonserver=tritonserver))
        program.chmod(0o755)
        return [str(program), *arguments]

    monkeypatch.setattr("triton_local.server.server_arguments", crashing)
    return starts


@pytest.mark.parametrize("crashes", [1])
def test_a_crash_at_startup_is_tried_again(repository: Path, starts: Path) -> None:
    with LocalTriton(model_repository=repository) as server:
        assert "died of SIGABRT before it was ready; it is started again once" in server.log_text()
    assert len(starts.read_text().splitlines()) == 2


@pytest.mark.parametrize("crashes", [1000])
def test_a_start_that_always_crashes_is_tried_twice(repository: Path, starts: Path) -> None:
    with pytest.raises(StartFailedError, match=r"ended with code 134 before it was ready: (?s:.*)lock_exception"):
        LocalTriton(model_repository=repository).start()
    assert len(starts.read_text().splitlines()) == 2


def test_a_model_that_is_not_ready_in_time_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    launcher.loading_tritonserver()
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
def test_a_refusal_of_the_model_or_tritonserver_ends_the_start_with_its_reason(
    launch: Launch, arguments: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    code, output, errors = launch(*arguments, **environment).ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert reason in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=./nowhere"], "model './nowhere' is neither an existing folder nor a hub id"),
        (["--", "--http-port=1"], "--http-port can't go to tritonserver directly"),
        (["--grpc-port={taken}"], "port {taken} (grpc) on 127.0.0.1 is in use"),
        (
            ["--openai-port={taken}"],
            "port {taken} (openai) on 127.0.0.1 is in use: choose another with --openai-port, 0 for any free one\n",
        ),
        (["--http-port={taken}", "--openai-port={taken}"], "port {taken} is set twice: http and openai"),
    ],
)
def test_a_refusal_is_one_line_and_starts_nothing(launch: Launch, arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        if "twice" in message:
            server.close()
        code, output, errors = launch(*(word.format(taken=taken) for word in arguments)).ends()
    assert (code, output) == (2, "")
    assert errors.startswith(f"triton_local: {message.format(taken=taken)}")
    assert len(errors.splitlines()) == 1


def test_a_second_server_shares_the_runtime_and_has_its_own_arguments(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log.txt"
    monkeypatch.setenv("TRITON_LLAMA_CACHE", str(cache))
    first = LocalTriton(model_repository=repository)
    first.start()
    try:
        (runtime,) = cache.iterdir()
        before = runtime.stat()
        with LocalTriton(
            model_repository=repository, model=str(tmp_path), extra_args=("--id=the-second",), log_file=log
        ) as second:
            assert [*cache.iterdir()] == [runtime]
            assert (runtime.stat().st_ino, runtime.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
            names = [HTTP.get(f"http://{server.http_url}/v2").json()["name"] for server in (first, second)]
            assert names == ["triton", "the-second"]
            assert generate(second.http_url, "über") == "über"
        assert f"LLAMA_MODEL is {tmp_path}" in log.read_text()
        assert second.log_text() + "\n" == log.read_text()
        assert second.exit_code == 0
        assert generate(first.http_url, "still there") == "still there"
    finally:
        first.kill()
        first.stop()


def test_the_default_is_config_pbtxt_where_there_is_no_config_streaming(repository: Path) -> None:
    assert LocalTriton(model_repository=repository).variant == "default"
    assert LocalTriton(model_repository=ROOT / "model_repository").variant == "streaming"
