"""Starts that fail with a reason, and shutdown: accepted requests are answered, and nothing is left behind.

The OpenAI endpoint of `--openai-port` starts after the server and ends before it; its death ends both.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from client.peers import HOST, receive_request, server
from deploy.local.conftest import Launch, own_lines
from deploy.supervisor.supervisors import alive
from end_to_end.plans import copy_repository
from end_to_end.servers import HTTP, until
from triton_local.openai_endpoint import example_command

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


def test_a_model_that_is_not_ready_in_time_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    until(lambda: bool(psutil.Process(launcher.process.pid).children()), lambda: "the supervisor runs")
    # On a slow machine the stub starts later than that: the launcher's time passes while it is stopped.
    launcher.process.send_signal(signal.SIGSTOP)
    launcher.wait_until_loading()
    launcher.process.send_signal(signal.SIGCONT)
    code, _, errors = launcher.ends()
    assert code == 1
    assert "not ready within 2 s" in errors


def test_a_refused_start_ends_with_its_reason(launch: Launch) -> None:
    code, output, errors = launch(REFUSE="1").ends()
    assert code == 1
    message = errors[errors.index("triton_local: ") :]
    assert "ValueError: slots is 9000: must be in 1 ... 64" in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


OPENAI = "--openai-port=0"


def _takes_connections(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_endpoints_death_ends_the_server_with_code_70(launch: Launch) -> None:
    launcher = launch(OPENAI)
    address = launcher.facts()["openai"]
    assert launcher.line("  openai  ").split()[-1] == f"http://{address}/v1"
    assert HTTP.get(f"http://{address}/health/live").status_code == 200
    os.kill(launcher.endpoint(), signal.SIGKILL)
    code, _, errors = launcher.ends()
    assert code == 70
    assert errors.endswith("triton_local: the OpenAI endpoint has ended with code -9\n")


@pytest.mark.long
def test_a_chat_is_streamed_to_its_end_in_the_drain(launch: Launch, tmp_path: Path) -> None:
    """With the product's repository, and the command that is printed."""
    repository = copy_repository(tmp_path / "repository", "slow_model")
    launcher = launch(OPENAI, f"--model-repository={repository}", "--host=0.0.0.0", OMP_NUM_THREADS="1")
    facts = launcher.facts()
    assert facts["variant"] == "streaming"
    command = shlex.split(launcher.line("try: ").partition("try: ")[2])
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert '"finish_reason":"' in said
    messages = [{"role": "user", "content": "What is a list?"}]
    chat = {"model": "pydoc-llama", "messages": messages, "stream": True, "max_tokens": 300, "min_tokens": 300}
    url = f"http://{facts['openai']}/v1/chat/completions"
    with httpx.stream("POST", url, json=chat, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        assert '"role":"assistant"' in next(lines)
        launcher.process.send_signal(signal.SIGTERM)
        until(lambda: not _takes_connections(facts["openai"]), lambda: "the endpoint takes no more connections")
        assert HTTP.get(f"http://{facts['http']}/v2/models/llama/ready").status_code == 200
        rest = [line for line in lines if line]
    assert '"finish_reason":"length"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert launcher.ends()[0] == 0


def test_the_printed_command_for_a_base_model_asks_for_an_embedding() -> None:
    models = b'{"data": [{"tasks": ["embed"]}]}'
    requests = []

    def behave(connection: socket.socket) -> None:
        requests.append(receive_request(connection))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
        connection.shutdown(socket.SHUT_RDWR)

    with server(behave) as port:
        command = shlex.split(example_command(f"{HOST}:{port}", "base"))
        subprocess.run(command, capture_output=True, timeout=60, check=True)
    head, _, body = requests[-1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings ")
    assert json.loads(body) == {"model": "base", "input": "What is the capital of France?"}


@pytest.mark.long
def test_a_setting_that_the_endpoint_refuses_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    launcher = launch(OPENAI, TRITON_LLAMA_OPENAI_PORTT="9000", LOAD_WHEN=str(loaded))
    launcher.wait_until_loading()
    loaded.touch()
    code, output, errors = launcher.ends()
    assert code == 1
    assert "ready" not in output
    assert own_lines(errors) == ["triton_local: the OpenAI endpoint ended with code 2 before it listened"]
