"""Peers that don't start, and what is left of those that do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf.checkpoint import EMBEDDED
from perf.environment import ROOT
from perf.load.protocols import Target
from perf.peers import process, vllm_environment
from perf.peers.contestant import NotRunError
from perf.peers.lineup import contestant, lineup
from perf.peers.process import HOST, free_port, running, shown, shown_checkpoint


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "LOGS", tmp_path)


def _tried(*options: str, ready_s: float = 60.0) -> None:
    """Start Python with these options as a peer, and stop it if it gets ready."""
    with free_port() as port:
        command = [sys.executable, *(str(port) if option == "PORT" else option for option in options)]
        with running(Target("test", "fastapi", f"http://{HOST}:{port}", "llama"), command, {}, ready_s):
            pass


def test_a_peer_that_ends_at_once_is_waited_for_and_its_reason_lost() -> None:
    complaint = "import sys; sys.exit('no such checkpoint')"
    with pytest.raises(NotRunError, match=r"test ended with code 1 before it was ready: no such checkpoint \("):
        _tried("-c", complaint)


def test_a_peer_that_never_listens_is_waited_for_without_end() -> None:
    with pytest.raises(NotRunError, match=r"didn't listen within 0\.1 s: it said nothing"):
        _tried("-c", "import time; time.sleep(600)", ready_s=0.1)


def test_a_peer_that_listens_but_completes_nothing_is_ready() -> None:
    with pytest.raises(NotRunError, match="didn't complete a token: HTTP 501"):
        _tried("-m", "http.server", "--bind", HOST, "PORT")


def test_an_environment_that_was_not_made_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_environment, "FOLDER", ROOT / ".work" / "no such folder")
    with pytest.raises(NotRunError, match="vLLM isn't installed: make bench-vllm"):
        contestant("vllm").start(EMBEDDED, 1).__enter__()


def test_two_contestants_have_one_name() -> None:
    keys = [one.key for one in lineup()]
    assert len(set(keys)) == len(keys) == 6
    assert {one.family for one in lineup()[:2]} == {"ours"}
    assert {one.family for one in lineup()[2:]} == {"peer"}
    with pytest.raises(ValueError, match="unknown contestant 'vlm': known are triton_llama_int8, "):
        contestant("vlm")


@pytest.mark.parametrize("absolute", [True, False])
def test_a_command_in_the_results_has_this_machine_s_folders_in_it(tmp_path: Path, absolute: bool) -> None:
    checkpoint = tmp_path / "a llama" if absolute else Path("models/a llama")
    command = [f"{ROOT}/.venv/bin/python", "-m", "x", "--model", str(checkpoint), "--log", f"{ROOT}/log"]
    assert shown(command, checkpoint) == ".venv/bin/python -m x --model 'a llama' --log log"
    assert shown(["make", f"MODEL={checkpoint}"], checkpoint) == "make 'MODEL=a llama'"
    assert shown(["/opt/python/bin/python3", "-m", "x"], checkpoint) == "python3 -m x"
    line = f"settings: model {checkpoint.absolute()}, quantization int8"
    assert shown_checkpoint(line, checkpoint) == "settings: model a llama, quantization int8"
