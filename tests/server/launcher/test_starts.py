"""Starts: refused, retried, shared."""

import json
import socket
from pathlib import Path

import pytest
from programs.supervisor.supervisors import alive
from server.launcher.launching import FREE_PORTS, SOON_S, Launch, generate, get, loading_tritonserver, session_of
from triton_local.errors import StartFailedError
from triton_local.ports import HeldPorts
from triton_local.server import LocalTriton


def test_a_model_that_is_not_ready_in_time_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, "--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    processes = session_of(loading_tritonserver(launcher))
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    assert "not ready within 2 s" in errors
    assert not any(alive(process) for process in processes)


def test_a_free_port_taken_while_the_model_loads_is_replaced(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "go"))
    command = Path(f"/proc/{loading_tritonserver(launcher)}/cmdline").read_text().split("\0")
    chosen = next(int(option.split("=")[1]) for option in command if option.startswith("--metrics-port="))
    with socket.create_server(("127.0.0.1", chosen)):
        (tmp_path / "go").touch()
        facts = launcher.facts()
        assert int(facts["metrics"].split(":")[1]) != chosen
        assert generate(facts["http"], "answered") == "answered"


def test_a_model_that_refuses_to_load_ends_the_start_with_its_reason(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, REFUSE="1")
    output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    message = errors[errors.index("triton_local: ") :]
    assert "ValueError: slots is 9000: must be in 1 ... 64" in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


def test_a_refusal_of_tritonserver_is_one_line(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--no-such-option")
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    assert "unrecognized option '--no-such-option'" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant=huge"], "unknown variant 'huge': known are default, small"),
        (["--model=./nowhere"], "model './nowhere' is neither an existing folder nor a hub id"),
        (["--", "--http-port=1"], "--http-port can't go to tritonserver directly"),
        (["--", "--exit-timeout-secs=inf"], "--exit-timeout-secs is 'inf'; it must be a whole number, 0 ... 3600"),
    ],
)
def test_a_refusal_is_one_line_and_starts_nothing(launch: Launch, arguments: list[str], message: str) -> None:
    launcher = launch(*FREE_PORTS, *arguments)
    output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert output == ""


def test_a_taken_port_is_refused_before_the_start(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch("--http-port=0", f"--grpc-port={port}", "--metrics-port=0")
        output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 2
    assert errors == (
        f"triton_local: port {port} (grpc) on 127.0.0.1 is in use: "
        "choose another with --grpc-port, 0 for any free one\n"
    )
    assert output == ""


def test_a_second_server_shares_the_runtime_and_has_its_own_arguments(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    with LocalTriton(model_repository=repository) as first:
        with HeldPorts("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}) as free:
            asked = free.numbers
        before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}
        with LocalTriton(
            model_repository=repository,
            model=str(tmp_path),
            environment={"SOMETHING": "else"},
            extra_args=("--id=the-second",),
            log_file=tmp_path / "log.txt",
            http_port=asked["http"],
            grpc_port=asked["grpc"],
            metrics_port=asked["metrics"],
        ) as second:
            assert before == {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}
            assert len(before) == 1
            ports = {first.http_url, first.grpc_url, first.metrics_url}
            ports |= {second.http_url, second.grpc_url, second.metrics_url}
            assert len(ports) == 6
            assert second.urls == {name: f"127.0.0.1:{port}" for name, port in asked.items()}
            assert json.loads(get(f"{second.http_url}/v2"))["name"] == "the-second"
            assert json.loads(get(f"{first.http_url}/v2"))["name"] == "triton"
            assert generate(first.http_url, "über") == "über"
            assert generate(second.http_url, "two") == "two"
        assert f"LLAMA_MODEL is {tmp_path}" in (tmp_path / "log.txt").read_text()
        assert second.log_text() + "\n" == (tmp_path / "log.txt").read_text()
        assert second.exit_code == 0
        assert generate(first.http_url, "still there") == "still there"
    assert first.exit_code == 0


def test_a_failed_start_raises_an_error_with_the_reason(repository: Path) -> None:
    server = LocalTriton(model_repository=repository, environment={"REFUSE": "1"})
    with pytest.raises(StartFailedError, match="slots is 9000"):
        server.start()
    assert server.exit_code == 1
