"""Shutdown: accepted requests are answered, and nothing is left behind."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import alive, until
from server.launcher.launching import Launch, Launcher, own_lines
from server.servers import HTTP
from server.servers import until as patiently
from triton_local.cli import SAME_REQUEST_S
from triton_supervisor.process_table import model_processes, read_process
from triton_supervisor.shared_memory import SHARED_MEMORY, remove_orphaned

AT_ONCE = "again: at once"
"""In the line about the first signal."""


@pytest.mark.parametrize("options", [(), ("--unsupervised",)])
def test_sigterm_answers_accepted_requests_and_leaves_nothing_behind(
    launch: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "tmp").mkdir()
    launcher = launch("--variant=small", "--model=some/checkpoint", *options, TMPDIR=str(tmp_path / "tmp"), BUSY="1")
    facts = launcher.facts()
    assert facts["variant"] == "small"
    assert HTTP.get(f"http://{facts['http']}/v2/models/llama/config").json()["max_batch_size"] == 2
    assert "nv_inference_count" in HTTP.get(f"http://{facts['metrics']}/metrics").text
    grpc_host, grpc_port = facts["grpc"].split(":")
    socket.create_connection((grpc_host, int(grpc_port)), timeout=5).close()
    for service in ("http", "grpc", "metrics"):
        assert facts[service] in launcher.line(f"  {service} ")
    with launcher.asked(facts["http"]) as answer:
        launcher.process.send_signal(signal.SIGTERM)
        launcher.line(AT_ONCE)
        launcher.answer.touch()
        assert answer.result() == "accepted"
    code, _, errors = launcher.ends()
    assert code == 0
    assert "model says LLAMA_MODEL is some/checkpoint" in errors
    assert f"model runs in {sys.prefix}" in errors, "the stub runs in this virtual environment"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_sigterm_to_every_process_is_one_and_waits_for_no_idle_connection(launch: Launch) -> None:
    """make passes the process group's on, and systemd sends it to every process of the control group."""
    launcher = launch("--", "--exit-timeout-secs=600", BUSY="1")
    address = launcher.facts()["http"]
    with httpx.Client(trust_env=False) as idle, launcher.asked(address) as answer:
        assert idle.get(f"http://{address}/v2/health/live").is_success
        for pid in launcher.processes:
            os.kill(pid, signal.SIGTERM)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.line(AT_ONCE)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.answer.touch()
        assert answer.result() == "accepted"
        assert launcher.ends()[0] == 0


def test_killing_the_launcher_ends_the_server_and_the_endpoint(launch: Launch) -> None:
    launcher = launch("--openai-port=0")
    launcher.facts()
    endpoint = launcher.endpoint()
    launcher.process.kill()
    patiently(lambda: launcher.is_gone() and not alive(endpoint), lambda: "the server and the endpoint end")


def test_a_killed_guard_ends_the_server_and_what_it_leaves_goes_with_the_launcher_or_when_another_starts(
    launch: Launch,
) -> None:
    both_killed = launch()
    guard, left = _guard_and_a_file_of_the_model(both_killed)
    # It would notice that the launcher is gone.
    os.kill(guard, signal.SIGSTOP)
    for pid in (both_killed.process.pid, guard):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(alive, both_killed.processes)))
    both_killed.ready_file.unlink()
    launcher = launch()
    guard, own = _guard_and_a_file_of_the_model(launcher)
    assert _files_of(left) == []
    remove_orphaned(print)
    assert own.exists(), "its owner lives"
    os.kill(guard, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGKILL
    assert own_lines(errors)[-1] == "triton_local: the guard died of SIGKILL, and tritonserver with it; code 137"
    assert _files_of(own) == []


def _guard_and_a_file_of_the_model(launcher: Launcher) -> tuple[int, Path]:
    """Return the guard's pid once the server is ready, and a file as a model writes it there."""
    server = read_process(int(launcher.facts()["pid"]))
    assert server is not None
    region = next(iter(launcher.regions))
    file = region.with_name(f"{_prefix(region)}requests-llama-1")
    file.touch()
    return server.parent, file


def _files_of(file: Path) -> list[Path]:
    """Return what shared memory has of the server that this file is of."""
    return list(SHARED_MEMORY.glob(f"*{_prefix(file)}*"))


def _prefix(file: Path) -> str:
    return "_".join(file.name.split("_")[:6]) + "_"


def test_a_killed_tritonserver_ends_its_stub_and_the_endpoint_and_its_code_is_returned(launch: Launch) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    launcher = launch("--openai-port=0", "--restarts=0")
    pid, endpoint = int(launcher.facts()["pid"]), launcher.endpoint()
    folders = set(Path("/tmp").glob("python_env_*")) - before
    assert folders, "the backend has made its folder"
    os.kill(pid, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGKILL
    assert own_lines(errors) == ["triton_local: tritonserver died of SIGKILL; the server ends with code 137"]
    assert not alive(endpoint)
    # It has no mark of its owner: of several, because another Triton starts beside this test, the others stay.
    assert len(folders) > 1 or not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_second_signal_kills_a_draining_server(launch: Launch, number: signal.Signals) -> None:
    launcher = launch(BUSY="1")
    with launcher.asked(launcher.facts()["http"]) as answer:
        launcher.process.send_signal(number)
        launcher.line(AT_ONCE)
        if number == signal.SIGTERM:
            time.sleep(SAME_REQUEST_S)
        launcher.process.send_signal(number)
        assert launcher.ends()[0] == 128 + signal.SIGKILL
        assert isinstance(answer.exception(), httpx.TransportError)


def test_a_dead_model_ends_the_launcher_with_code_70_and_one_line(launch: Launch) -> None:
    launcher = launch("--restarts=0", BUSY="1")
    facts = launcher.facts()
    with launcher.asked(facts["http"]) as answer:
        (model,) = model_processes(int(facts["pid"]))
        os.kill(model.pid, signal.SIGKILL)
        code, _, errors = launcher.ends()
        assert isinstance(answer.exception(), httpx.TransportError)
    assert code == 70
    assert own_lines(errors) == [
        f"triton_local: the model process {model.pid} is gone: it crashed, or was killed; the server ends with code 70"
    ]


def test_a_signal_while_the_model_loads_aborts_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(LOAD_WHEN=str(tmp_path / "never"))
    launcher.loading_tritonserver()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGTERM
    assert errors.endswith("triton_local: stopped by signal 15 before the server was ready\n")


@pytest.mark.long
def test_a_model_that_hangs_in_finalize_is_killed_in_time(launch: Launch) -> None:
    launcher = launch("--", "--exit-timeout-secs=1", FINALIZE_S="600")
    launcher.facts()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 1
    assert own_lines(errors) == [
        "triton_local: the model isn't unloaded within 11 s; requests that still ran are cut off"
    ]
