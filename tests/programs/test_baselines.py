"""Baselines that fail to start, their list, and their commands in results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf.baselines import vllm_environment
from perf.checkpoint import EMBEDDED
from perf.environment import ROOT
from perf.load.protocols import Target
from perf.servers.baselines import servers
from perf.servers.running import HOST, NotRunError, held_port, running, shown


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("perf.servers.running.LOGS", tmp_path)


def _started(*options: str, ready_s: float = 60.0) -> None:
    """Start Python with these options as a baseline, and stop it if it gets ready."""
    with held_port() as port:
        command = [sys.executable, *(str(port) if option == "PORT" else option for option in options)]
        with running(Target("test", "fastapi", f"http://{HOST}:{port}", "llama"), command, {}, ready_s):
            pass


def test_a_server_that_ends_at_once_is_reported_with_its_reason() -> None:
    complaint = "import sys; sys.exit('no such checkpoint')"
    with pytest.raises(NotRunError, match=r"test ended with code 1 before it was ready: no such checkpoint \("):
        _started("-c", complaint)


def test_a_server_that_never_listens_times_out() -> None:
    with pytest.raises(NotRunError, match=r"didn't listen within 0\.1 s: its log is empty"):
        _started("-c", "import time; time.sleep(600)", ready_s=0.1)


def test_a_server_that_completes_no_token_is_not_ready() -> None:
    with pytest.raises(NotRunError, match="didn't complete a token: HTTP 501"):
        _started("-m", "http.server", "--bind", HOST, "PORT")


def test_vllm_without_its_environment_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_environment, "FOLDER", ROOT / ".work" / "no such folder")
    with pytest.raises(NotRunError, match="vLLM isn't installed: make bench-vllm"):
        servers()[-1].start(EMBEDDED, 1).__enter__()


def test_the_six_servers_have_different_keys() -> None:
    keys = [one.key for one in servers()]
    assert len(set(keys)) == len(keys) == 6
    assert {one.family for one in servers()[:2]} == {"ours"}
    assert {one.family for one in servers()[2:]} == {"peer"}


@pytest.mark.parametrize("absolute", [True, False])
def test_a_command_in_the_results_has_no_folder_of_this_machine(tmp_path: Path, absolute: bool) -> None:
    checkpoint = tmp_path / "a llama" if absolute else Path("models/a llama")
    command = [f"{ROOT}/.venv/bin/python", "-m", "x", "--model", str(checkpoint), "--log", f"{ROOT}/log"]
    assert shown(command, checkpoint) == ".venv/bin/python -m x --model 'a llama' --log log"
    assert shown(["make", f"MODEL={checkpoint}"], checkpoint) == "make 'MODEL=a llama'"
    assert shown(["/opt/python/bin/python3", "-m", "x"], checkpoint) == "python3 -m x"
