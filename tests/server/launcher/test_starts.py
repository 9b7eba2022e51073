"""Starts: refused, retried, shared."""

import json
import socket
from pathlib import Path

import pytest
from server.launcher.launching import FREE_PORTS, Launch, generate, get
from triton_local.errors import StartFailedError
from triton_local.ports import HeldPorts
from triton_local.server import LocalTriton


def test_a_model_that_is_not_ready_in_time_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, "--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    launcher.loading_tritonserver()
    code, _, errors = launcher.ends()
    assert code == 1
    assert "not ready within 2 s" in errors


def test_a_free_port_taken_while_the_model_loads_is_replaced(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "go"))
    command = Path(f"/proc/{launcher.loading_tritonserver()}/cmdline").read_text().split("\0")
    chosen = next(int(option.split("=")[1]) for option in command if option.startswith("--metrics-port="))
    launcher.processes.clear()
    with socket.create_server(("127.0.0.1", chosen)):
        (tmp_path / "go").touch()
        facts = launcher.facts()
        assert int(facts["metrics"].split(":")[1]) != chosen
        assert generate(facts["http"], "answered") == "answered"


def test_a_model_that_refuses_to_load_ends_the_start_with_its_reason(launch: Launch) -> None:
    code, output, errors = launch(*FREE_PORTS, REFUSE="1").ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert "ValueError: slots is 9000: must be in 1 ... 64" in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


def test_a_refusal_of_tritonserver_is_one_line(launch: Launch) -> None:
    code, _, errors = launch(*FREE_PORTS, "--", "--no-such-option").ends()
    assert code == 1
    assert "unrecognized option '--no-such-option'" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant=huge"], "unknown variant 'huge': known are default, small"),
        (["--model=./nowhere"], "model './nowhere' is neither an existing folder nor a hub id"),
        (["--", "--http-port=1"], "--http-port can't go to tritonserver directly"),
        (["--", "--exit-timeout-secs=inf"], "--exit-timeout-secs is 'inf'; it must be a whole number, 0 ... 3600"),
        (
            ["--grpc-port={taken}"],
            "port {taken} (grpc) on 127.0.0.1 is in use: choose another with --grpc-port, 0 for any free one\n",
        ),
    ],
)
def test_a_refusal_is_one_line_and_starts_nothing(launch: Launch, arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        code, output, errors = launch(*FREE_PORTS, *(word.format(taken=taken) for word in arguments)).ends()
    assert (code, output) == (2, "")
    assert errors.startswith(f"triton_local: {message.format(taken=taken)}")
    assert len(errors.splitlines()) == 1


def test_a_second_server_shares_the_runtime_and_has_its_own_arguments(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    with LocalTriton(model_repository=repository) as first:
        with HeldPorts("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}) as free:
            asked = free.numbers

        def runtimes() -> dict[str, tuple[int, int]]:
            return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}

        before = runtimes()
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
            assert runtimes() == before
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
