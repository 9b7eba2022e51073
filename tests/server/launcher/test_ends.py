"""Shutdown: accepted requests are answered, and nothing is left behind."""

import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import pytest
from programs.supervisor.supervisors import alive, until
from server.launcher.launching import (
    FREE_PORTS,
    SOON_S,
    Launch,
    generate,
    get,
    loading_tritonserver,
    session_of,
    shared_memory_of,
)
from triton_supervisor.process_table import model_processes


def test_sigterm_answers_accepted_requests_and_leaves_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    running = tmp_path / "running"
    launcher = launch(
        *(*FREE_PORTS, "--variant=small", "--model=some/checkpoint"),
        TMPDIR=str(tmp_path / "tmp"),
        TELL_WHEN_RUNNING=str(running),
    )
    facts = launcher.facts()
    pid = int(facts["pid"])
    assert facts["variant"] == "small"
    assert json.loads(get(f"{facts['http']}/v2/models/llama/config"))["max_batch_size"] == 2
    assert "nv_inference_count" in get(f"{facts['metrics']}/metrics")
    grpc_host, grpc_port = facts["grpc"].split(":")
    socket.create_connection((grpc_host, int(grpc_port)), timeout=5).close()

    processes, regions = session_of(pid), shared_memory_of(pid)
    assert len(processes) == 3, "guard, tritonserver, stub"
    assert regions
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "accepted")
        until(running.exists)
        launcher.process.send_signal(signal.SIGTERM)
        assert answer.result() == "accepted"
    output, errors = launcher.process.communicate(timeout=60)

    assert launcher.process.returncode == 0
    for service in ("http", "grpc", "metrics"):
        assert facts[service] in output
    assert "model says LLAMA_MODEL is some/checkpoint" in errors
    assert f"model runs in {sys.prefix}" in errors, "the stub runs in this virtual environment"
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)
    assert not launcher.ready_file.exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_killing_the_launcher_ends_tritonserver_and_its_stub(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS)
    pid = int(launcher.facts()["pid"])
    processes, regions = session_of(pid), shared_memory_of(pid)
    assert len(processes) == 3
    launcher.process.kill()
    until(lambda: not any(alive(process) for process in processes))
    assert not any(region.exists() for region in regions)


def test_a_killed_tritonserver_ends_its_stub_and_its_code_is_returned(launch: Launch) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    launcher = launch(*FREE_PORTS)
    pid = int(launcher.facts()["pid"])
    processes, regions = session_of(pid), shared_memory_of(pid)
    time.sleep(0.5)
    folders = set(Path("/tmp").glob("python_env_*")) - before
    os.kill(pid, signal.SIGKILL)
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 128 + signal.SIGKILL
    assert "tritonserver has ended with code 137" in errors
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)
    # The backend's folder has no mark of its owner: with another Triton starting beside this test there may be several.
    assert len(folders) != 1 or not any(folder.exists() for folder in folders)


def test_a_second_signal_kills_a_draining_server(launch: Launch, tmp_path: Path) -> None:
    running = tmp_path / "running"
    launcher = launch(*FREE_PORTS, TELL_WHEN_RUNNING=str(running), EXECUTE_S="600")
    facts = launcher.facts()
    processes = session_of(int(facts["pid"]))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "never answered")
        until(running.exists)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stdout is not None
        while "again: at once" not in launcher.process.stdout.readline():
            pass
        launcher.process.send_signal(signal.SIGINT)
        launcher.process.communicate(timeout=SOON_S)
        with pytest.raises((ConnectionError, URLError)):
            answer.result()
    assert launcher.process.returncode == 128 + signal.SIGKILL
    assert not any(alive(process) for process in processes)


def test_an_idle_connection_does_not_delay_the_end(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=600")
    facts = launcher.facts()
    host, port = facts["http"].split(":")
    with socket.create_connection((host, int(port))) as open_connection:
        open_connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200" in open_connection.recv(1000)
        launcher.process.send_signal(signal.SIGTERM)
        launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 0


def test_a_dead_model_ends_the_launcher_with_code_70_and_one_line(launch: Launch, tmp_path: Path) -> None:
    running = tmp_path / "running"
    launcher = launch(*FREE_PORTS, TELL_WHEN_RUNNING=str(running), EXECUTE_S="600")
    facts = launcher.facts()
    processes, regions = session_of(int(facts["pid"])), shared_memory_of(int(facts["pid"]))
    (model,) = model_processes(int(facts["pid"]))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "never answered")
        until(running.exists)
        os.kill(model.pid, signal.SIGKILL)
        _, errors = launcher.process.communicate(timeout=SOON_S)
        with pytest.raises((ConnectionError, URLError)):
            answer.result()
    assert launcher.process.returncode == 70
    assert [line for line in errors.splitlines() if line.startswith("triton_local: ")] == [
        f"triton_local: the model process {model.pid} is gone: it crashed, or was killed; the server ends with code 70"
    ]
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)
    assert not launcher.ready_file.exists()


def test_a_signal_while_the_model_loads_aborts_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "never"))
    pid = loading_tritonserver(launcher)
    processes, regions = session_of(pid), shared_memory_of(pid)
    launcher.process.send_signal(signal.SIGTERM)
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 128 + signal.SIGTERM
    assert errors.endswith("triton_local: stopped by signal 15 before the server was ready\n")
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)


def test_a_model_that_hangs_in_finalize_is_killed_in_time(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=1", FINALIZE_S="600")
    processes = session_of(int(launcher.facts()["pid"]))
    launcher.process.send_signal(signal.SIGTERM)
    _, errors = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 1
    assert [line for line in errors.splitlines() if line.startswith("triton_local: ")] == [
        "triton_local: the model isn't unloaded within 11 s; requests that still ran are cut off"
    ]
    assert not any(alive(process) for process in processes)
