"""`--openai-port`: the endpoint starts after the server, is kept running, and ends before it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import alive, until
from server.fleet import copy_repository
from server.launcher.launching import FREE_PORTS, Launch, Launcher, own_lines
from server.servers import HTTP
from triton_supervisor.process_table import children

OPENAI = (*FREE_PORTS, "--openai-port=0")


def _pid(launcher: Launcher) -> int:
    """Return the endpoint's process."""
    (pid,) = (
        child.pid
        for child in children(launcher.process.pid)
        if "triton_llama_openai" in Path(f"/proc/{child.pid}/cmdline").read_text()
    )
    return pid


def _line(launcher: Launcher, text: str) -> str:
    """Return the next line of the launcher's output that has this text."""
    assert launcher.process.stdout is not None
    while text not in (line := launcher.process.stdout.readline()):
        assert line, f"no line with {text!r}"
    return line


def _takes_connections(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_the_endpoint_serves_beside_the_server_and_ends_with_it(launch: Launch, number: signal.Signals) -> None:
    launcher = launch(*OPENAI)
    address = launcher.facts()["openai"]
    pid = _pid(launcher)
    assert _line(launcher, "  openai  ").split()[-1] == f"http://{address}/v1"
    (model,) = HTTP.get(f"http://{address}/v1/models").json()["data"]
    assert model["id"] == "pydoc-llama"
    assert HTTP.get(f"http://{address}/health").status_code == 200
    launcher.process.send_signal(number)
    code, output, _ = launcher.ends(within=60)
    assert code == 0
    assert not alive(pid)
    assert "has ended with code" not in output


@pytest.mark.long
def test_the_command_that_it_prints_is_answered(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*OPENAI, f"--model-repository={copy_repository(tmp_path / 'repository')}", "--host=0.0.0.0")
    launcher.facts()
    command = shlex.split(_line(launcher, "try: ").partition("try: ")[2])
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert '"finish_reason":"' in answer
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.ends(within=60)[0] == 0


@pytest.mark.long
def test_at_the_end_the_endpoint_refuses_first_and_what_it_has_accepted_is_answered(
    launch: Launch, tmp_path: Path
) -> None:
    repository = copy_repository(tmp_path / "repository", "slow_model")
    launcher = launch(*OPENAI, f"--model-repository={repository}", "--variant=streaming", OMP_NUM_THREADS="1")
    facts = launcher.facts()
    asked = {"model": "pydoc-llama", "prompt": "a", "stream": True, "max_tokens": 300, "min_tokens": 300}
    url = f"http://{facts['openai']}/v1/completions"
    with httpx.stream("POST", url, json=asked, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        assert '"text"' in next(lines)
        launcher.process.send_signal(signal.SIGTERM)
        until(lambda: not _takes_connections(facts["openai"]))
        assert HTTP.get(f"http://{facts['http']}/v2/models/llama/ready").status_code == 200
        rest = [line for line in lines if line]
    assert '"finish_reason":"length"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert launcher.ends(within=60)[0] == 0


@pytest.mark.long
def test_killing_the_launcher_ends_the_endpoint(launch: Launch) -> None:
    launcher = launch(*OPENAI)
    launcher.facts()
    pid = _pid(launcher)
    launcher.process.kill()
    until(lambda: launcher.is_gone() and not alive(pid))


def test_an_endpoint_that_ends_by_itself_is_started_again_on_its_port(launch: Launch) -> None:
    launcher = launch(*OPENAI)
    address = launcher.facts()["openai"]
    pid = _pid(launcher)
    os.kill(pid, signal.SIGKILL)
    assert "the OpenAI endpoint has ended with code -9; starting it again" in _line(launcher, "has ended")
    until(lambda: _takes_connections(address))
    assert HTTP.get(f"http://{address}/health").status_code == 200
    assert _pid(launcher) != pid
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.ends(within=60)[0] == 0


@pytest.mark.long
def test_an_endpoint_that_cannot_be_started_again_is_reported_and_triton_goes_on(
    launch: Launch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a key\n")
    launcher = launch(*OPENAI, TRITON_LLAMA_OPENAI_API_KEYS_FILE=str(keys))
    facts = launcher.facts()
    keys.unlink()
    os.kill(_pid(launcher), signal.SIGKILL)
    assert "before it listened; Triton goes on serving without it" in _line(launcher, "ended with code 2")
    assert HTTP.get(f"http://{facts['http']}/v2/health/ready").status_code == 200
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.ends(within=60)[0] == 0


def test_a_dead_model_ends_the_endpoint_too(launch: Launch) -> None:
    launcher = launch(*OPENAI, "--restarts=0")
    pid = int(launcher.facts()["pid"])
    endpoint = _pid(launcher)
    os.kill(pid, signal.SIGKILL)
    assert launcher.ends(within=60)[0] == 128 + signal.SIGKILL
    assert not alive(endpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "port {taken} (openai) on 127.0.0.1 is in use: choose another with --openai-port, 0 for any free one"),
        (("--http-port={taken}",), "port {taken} is set twice: http and openai"),
    ],
)
def test_a_taken_port_is_refused_before_the_start(launch: Launch, arguments: tuple[str, ...], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        if arguments:
            server.close()
        given = [word.format(taken=taken) for word in (*arguments, "--openai-port={taken}")]
        code, output, errors = launch(*FREE_PORTS, *given).ends()
    assert (code, output) == (2, "")
    assert own_lines(errors) == [f"triton_local: {message.format(taken=taken)}"]


@pytest.mark.long
def test_a_setting_that_the_endpoint_refuses_ends_the_start(launch: Launch) -> None:
    code, output, errors = launch(*OPENAI, TRITON_LLAMA_OPENAI_PORTT="9000").ends(within=60)
    assert code == 1
    assert "unknown setting (did you mean 'port'?)" in errors
    assert own_lines(errors) == ["triton_local: the OpenAI endpoint ended with code 2 before it listened"]
    assert "ready" not in output
