"""Shutdown: accepted requests are answered, and nothing is left behind."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
from deploy.local.conftest import Launch, own_lines
from deploy.supervisor.supervisors import alive
from end_to_end.servers import HTTP, until

DRAINS = "SIGQUIT: at once"
"""In the line about the first signal."""
ANSWERED = "triton_local: ended: Triton has answered every request that it accepted\n"


def test_the_launcher_serves_what_its_ready_file_says(launch: Launch) -> None:
    launcher = launch("--variant=small", "--model=some/checkpoint")
    facts = launcher.facts()
    assert facts["variant"] == "small"
    assert HTTP.get(f"http://{facts['http']}/v2/models/llama/config").json()["max_batch_size"] == 2
    assert "nv_inference_count" in HTTP.get(f"http://{facts['metrics']}/metrics").text
    grpc_host, grpc_port = facts["grpc"].split(":")
    socket.create_connection((grpc_host, int(grpc_port)), timeout=5).close()
    for service in ("http", "grpc", "metrics"):
        assert facts[service] in launcher.line(f"  {service} ")
    launcher.process.send_signal(signal.SIGTERM)
    code, output, errors = launcher.ends()
    assert code == 0
    assert output.endswith(ANSWERED)
    assert "model says LLAMA_MODEL is some/checkpoint" in errors
    assert f"model runs in {sys.prefix}" in errors, "the stub runs in this virtual environment"


def test_an_accepted_request_is_answered_before_the_end(launch: Launch) -> None:
    """Ctrl-C starts the drain, further signals change nothing, and systemd signals every process of a control group."""
    launcher = launch("--openai-port=0", BUSY="1", TRITON_GRACE_SECONDS="600")
    address, endpoint = launcher.facts()["http"], launcher.endpoint()
    # An idle connection delays nothing.
    with httpx.Client(trust_env=False) as idle, launcher.asked(address) as answer:
        assert idle.get(f"http://{address}/v2/health/live").is_success
        for pid in launcher.processes:
            os.kill(pid, signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            launcher.process.send_signal(number)
            time.sleep(0.2)
        launcher.line(DRAINS)
        launcher.answer.touch()
        assert answer.result() == "accepted"
        assert launcher.ends()[0] == 0
    assert not alive(endpoint)


def test_killing_the_launcher_ends_the_server_and_the_endpoint(launch: Launch) -> None:
    launcher = launch("--openai-port=0")
    launcher.facts()
    endpoint = launcher.endpoint()
    launcher.process.kill()
    until(lambda: launcher.is_gone() and not alive(endpoint), lambda: "the server and the endpoint end")


def test_a_killed_tritonserver_ends_its_stub_and_the_endpoint(launch: Launch) -> None:
    launcher = launch("--openai-port=0")
    pid, endpoint = int(launcher.facts()["pid"]), launcher.endpoint()
    os.kill(pid, signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 70
    assert own_lines(errors) == ["triton_supervisor: tritonserver died of SIGKILL; the server ends with code 70"]
    assert not alive(endpoint)


def test_sigquit_kills_a_draining_server(launch: Launch) -> None:
    launcher = launch(BUSY="1")
    with launcher.asked(launcher.facts()["http"]) as answer:
        launcher.process.send_signal(signal.SIGTERM)
        launcher.line(DRAINS)
        launcher.process.send_signal(signal.SIGQUIT)
        code, output, _ = launcher.ends()
        assert code == 128 + signal.SIGKILL
        assert ANSWERED not in output
        assert isinstance(answer.exception(), httpx.TransportError)


def test_a_signal_while_the_model_loads_aborts_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(LOAD_WHEN=str(tmp_path / "never"))
    launcher.wait_until_loading()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 128 + signal.SIGTERM
    assert errors.endswith("triton_local: stopped by signal 15 before the server was ready\n")
