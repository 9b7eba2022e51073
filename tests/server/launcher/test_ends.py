"""Shutdown: accepted requests are answered, and nothing is left behind."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import alive, until
from server.launcher.launching import FREE_PORTS, Launch, Launcher, generate, own_lines
from server.servers import HTTP
from triton_local.cli import SAME_REQUEST_S
from triton_supervisor.process_table import model_processes, read_process
from triton_supervisor.shared_memory import SHARED_MEMORY, remove_orphaned


@pytest.mark.parametrize("options", [(), ("--unsupervised",)])
def test_sigterm_answers_accepted_requests_and_leaves_nothing_behind(
    launch: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "tmp").mkdir()
    running = tmp_path / "running"
    launcher = launch(
        *(*FREE_PORTS, "--variant=small", "--model=some/checkpoint", *options),
        TMPDIR=str(tmp_path / "tmp"),
        TELL_WHEN_RUNNING=str(running),
    )
    facts = launcher.facts()
    assert facts["variant"] == "small"
    assert HTTP.get(f"http://{facts['http']}/v2/models/llama/config").json()["max_batch_size"] == 2
    assert "nv_inference_count" in HTTP.get(f"http://{facts['metrics']}/metrics").text
    grpc_host, grpc_port = facts["grpc"].split(":")
    socket.create_connection((grpc_host, int(grpc_port)), timeout=5).close()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "accepted")
        until(running.exists)
        launcher.process.send_signal(signal.SIGTERM)
        assert answer.result() == "accepted"
    code, output, errors = launcher.ends(within=60)
    assert code == 0
    assert all(facts[service] in output for service in ("http", "grpc", "metrics"))
    assert "model says LLAMA_MODEL is some/checkpoint" in errors
    assert f"model runs in {sys.prefix}" in errors, "the stub runs in this virtual environment"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("everyone", [False, True], ids=["twice", "control-group"])
def test_a_sigterm_that_comes_in_several_ways_is_one(launch: Launch, tmp_path: Path, everyone: bool) -> None:
    """make passes the process group's on, and systemd sends it to every process of the control group."""
    running = tmp_path / "running"
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=600", TELL_WHEN_RUNNING=str(running))
    address = launcher.facts()["http"]
    with httpx.Client(trust_env=False) as idle, ThreadPoolExecutor() as pool:
        assert idle.get(f"http://{address}/v2/health/live").is_success
        answer = pool.submit(generate, address, "accepted")
        until(running.exists)
        for pid in launcher.processes if everyone else ():
            os.kill(pid, signal.SIGTERM)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.stdout is not None
        while "again: at once" not in launcher.process.stdout.readline():
            pass
        launcher.process.send_signal(signal.SIGTERM)
        assert answer.result() == "accepted"
        assert launcher.ends(within=60)[0] == 0


def test_killing_the_launcher_ends_tritonserver_and_its_stub(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS)
    launcher.facts()
    launcher.process.kill()
    until(launcher.is_gone)


def test_a_killed_guard_ends_the_server_and_the_launcher_says_so(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS)
    guard, left = _guard_and_a_file_of_the_model(launcher)
    os.kill(guard, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGKILL
    assert own_lines(errors) == ["triton_local: the guard died of SIGKILL, and tritonserver with it; code 137"]
    assert not left.exists()
    assert list(SHARED_MEMORY.glob(f"*{_prefix(left)}*")) == []


def test_what_a_guard_that_is_killed_with_its_launcher_leaves_goes_when_another_starts(launch: Launch) -> None:
    killed = launch(*FREE_PORTS)
    guard, left = _guard_and_a_file_of_the_model(killed)
    # It would notice that the launcher is gone.
    os.kill(guard, signal.SIGSTOP)
    for pid in (killed.process.pid, guard):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(alive, killed.processes)))
    killed.ready_file.unlink()
    living = launch(*FREE_PORTS)
    _, own = _guard_and_a_file_of_the_model(living)
    assert list(SHARED_MEMORY.glob(f"*{_prefix(left)}*")) == []
    remove_orphaned(print)
    assert own.exists(), "its owner lives"
    living.process.send_signal(signal.SIGTERM)
    assert living.ends(within=60)[0] == 0


def _guard_and_a_file_of_the_model(launcher: Launcher) -> tuple[int, Path]:
    """Return the guard's pid once the server is ready, and a file as a model writes it there."""
    server = read_process(int(launcher.facts()["pid"]))
    assert server is not None
    region = next(iter(launcher.regions))
    file = region.with_name(f"{_prefix(region)}requests-llama-1")
    file.touch()
    return server.parent, file


def _prefix(file: Path) -> str:
    return "_".join(file.name.split("_")[:6]) + "_"


def test_a_killed_tritonserver_ends_its_stub_and_its_code_is_returned(launch: Launch) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    launcher = launch(*FREE_PORTS, "--restarts=0")
    pid = int(launcher.facts()["pid"])
    folders = set(Path("/tmp").glob("python_env_*")) - before
    assert folders, "the backend has made its folder"
    os.kill(pid, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGKILL
    assert own_lines(errors) == ["triton_local: tritonserver died of SIGKILL; the server ends with code 137"]
    # It has no mark of its owner: of several, because another Triton starts beside this test, the others stay.
    assert len(folders) > 1 or not any(folder.exists() for folder in folders)


@pytest.fixture
def busy(launch: Launch, tmp_path: Path) -> Iterator[tuple[Launcher, int]]:
    """A launcher whose model works on a request that never gets an answer, and the pid of its tritonserver."""
    running = tmp_path / "running"
    launcher = launch(*FREE_PORTS, "--restarts=0", TELL_WHEN_RUNNING=str(running), EXECUTE_S="600")
    facts = launcher.facts()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "never answered")
        until(running.exists)
        yield launcher, int(facts["pid"])
        with pytest.raises(httpx.TransportError):
            answer.result()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_second_signal_kills_a_draining_server(busy: tuple[Launcher, int], number: signal.Signals) -> None:
    launcher, _ = busy
    launcher.process.send_signal(number)
    assert launcher.process.stdout is not None
    while "again: at once" not in launcher.process.stdout.readline():
        pass
    if number == signal.SIGTERM:
        time.sleep(SAME_REQUEST_S)
    launcher.process.send_signal(number)
    assert launcher.ends()[0] == 128 + signal.SIGKILL


def test_a_dead_model_ends_the_launcher_with_code_70_and_one_line(busy: tuple[Launcher, int]) -> None:
    launcher, tritonserver = busy
    (model,) = model_processes(tritonserver)
    os.kill(model.pid, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 70
    assert own_lines(errors) == [
        f"triton_local: the model process {model.pid} is gone: it crashed, or was killed; the server ends with code 70"
    ]


def test_an_idle_connection_does_not_delay_the_end(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=600")
    with httpx.Client(trust_env=False) as idle:
        assert idle.get(f"http://{launcher.facts()['http']}/v2/health/live").is_success
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.ends(within=60)[0] == 0


def test_a_signal_while_the_model_loads_aborts_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "never"))
    launcher.loading_tritonserver()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGTERM
    assert errors.endswith("triton_local: stopped by signal 15 before the server was ready\n")


@pytest.mark.long
def test_a_model_that_hangs_in_finalize_is_killed_in_time(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=1", FINALIZE_S="600")
    launcher.facts()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends(within=60)
    assert code == 1
    assert own_lines(errors) == [
        "triton_local: the model isn't unloaded within 11 s; requests that still ran are cut off"
    ]
