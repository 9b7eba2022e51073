"""Starts: refused, retried, shared."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from deploy.launcher.launching import Launch
from end_to_end.servers import ROOT
from triton_local.server import LocalTriton


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
def test_a_refused_start_ends_with_its_reason(
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
        (["--model=./nowhere"], "model './nowhere' is neither an existing folder or GGUF file nor a hub id"),
        (["--grpc-port={taken}"], "port {taken} (grpc) on 127.0.0.1 is in use"),
        (
            ["--openai-port={taken}"],
            "port {taken} (openai) on 127.0.0.1 is in use: choose another with --openai-port, 0 for any free one\n",
        ),
    ],
)
def test_a_refusal_starts_nothing(launch: Launch, arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        code, output, errors = launch(*(word.format(taken=taken) for word in arguments)).ends()
    assert (code, output) == (2, "")
    assert errors.startswith(f"triton_local: {message.format(taken=taken)}")
    assert len(errors.splitlines()) == 1


def test_a_port_that_is_taken_while_the_model_loads_is_named(launch: Launch, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.close()
        launcher = launch(f"--http-port={port}", LOAD_WHEN=str(loaded))
        launcher.loading_tritonserver()
        with socket.create_server(("127.0.0.1", port)):
            loaded.touch()
            code, _, errors = launcher.ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert f"127.0.0.1:{port}" in message
    assert "already in use" in message


def test_the_default_is_config_pbtxt_where_there_is_no_config_streaming(repository: Path) -> None:
    assert LocalTriton(model_repository=repository).variant == "default"
    assert LocalTriton(model_repository=ROOT / "model_repository").variant == "streaming"
