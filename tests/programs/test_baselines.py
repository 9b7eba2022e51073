"""Baselines that fail to start, vLLM's INT8 checkpoint, and commands in results."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from perf import checkpoint
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


def test_vllm_without_its_environment_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_environment, "FOLDER", ROOT / ".work" / "no such folder")
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    for one in servers()[-2:]:
        with pytest.raises(NotRunError, match="vLLM isn't installed: make bench-vllm"):
            one.start(EMBEDDED, 1).__enter__()


def test_w8a8_weights_are_those_of_the_checkpoint_to_half_a_step_of_their_row_and_converted_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path / "made")
    llama = Path(shutil.copytree(EMBEDDED, tmp_path / "llama"))
    made = checkpoint.w8a8(llama)
    before, after = load_file(llama / "model.safetensors"), load_file(made / "model.safetensors")
    linears = [name for name in before if name.endswith("_proj.weight")]
    assert len(linears) == 7 * 6
    for name in linears:
        assert after[name].dtype == torch.int8
        scale = after[f"{name}_scale"]
        assert scale.shape == (len(before[name]), 1)
        assert after[name].abs().amax(1).eq(127).all(), "every row uses all of its range"
        assert bool(((after[name] * scale - before[name].float()).abs() <= 0.501 * scale).all())
    assert all(torch.equal(after[name], before[name]) for name in before if name not in linears)
    assert LlamaConfig.from_pretrained(made).quantization_config["quant_method"] == "compressed-tensors"
    # Its memory has the embedding and the head in the floats of this machine's baselines.
    monkeypatch.setattr(checkpoint, "fastest", lambda: "bf16")
    widths = {name: 1 if name in linears else 4 if name.endswith("_scale") else 2 for name in after}
    size = sum(tensor.numel() * widths[name] for name, tensor in after.items())
    assert checkpoint.mebibytes(llama, "int8") == pytest.approx(size / 2**20)
    assert checkpoint.w8a8(llama) == made
    os.utime(llama / "model.safetensors", ns=(0, 0))
    assert checkpoint.w8a8(llama) != made


@pytest.mark.parametrize("absolute", [True, False])
def test_a_command_in_the_results_has_no_folder_of_this_machine(tmp_path: Path, absolute: bool) -> None:
    folder = tmp_path / "a llama" if absolute else Path("models/a llama")
    command = [f"{ROOT}/.venv/bin/python", "-m", "x", "--model", str(folder), "--log", f"{ROOT}/log"]
    assert shown(command, folder) == ".venv/bin/python -m x --model 'a llama' --log log"
    assert shown(["make", f"MODEL={folder}"], folder) == "make 'MODEL=a llama'"
    assert shown(["/opt/python/bin/python3", "-m", "x"], folder) == "python3 -m x"
