"""`--openai-port`: the endpoint starts after the server, and ends before it; its death ends both."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from client.peers import HOST, receive_request, server
from deploy.local.conftest import Launch, own_lines
from end_to_end.plans import copy_repository
from end_to_end.servers import HTTP, until
from triton_local.example_command import example_command

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
