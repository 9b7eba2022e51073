"""Baselines that fail to start, their list, and their commands in results."""

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


def test_the_eight_servers_have_different_keys_and_the_article_s_servers_floats_of_their_own() -> None:
    keys = [one.key for one in servers()]
    assert len(set(keys)) == len(keys) == 8
    assert [one.weights for one in servers() if one.family == "ours"] == ["int8", "fp32", "bf16"]
    peers = {one.key: one.weights for one in servers() if one.family == "peer"}
    assert peers.pop("vllm_int8") == "int8"
    assert {peers.pop(f"{name}_fastapi") for name in ("naive", "batching")} == {checkpoint.unquantized()}
    assert set(peers.values()) == {checkpoint.fastest()}
    assert {one.key: one.floats for one in servers() if one.floats} == {"vllm_int8": checkpoint.fastest()}


@pytest.mark.parametrize("floats", ["fp32", "bf16"])
def test_the_memory_of_w8a8_has_the_embedding_and_the_head_in_floats(
    floats: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    monkeypatch.setattr(checkpoint, "fastest", lambda: floats)
    saved = load_file(checkpoint.w8a8(EMBEDDED) / "model.safetensors")
    width = {"fp32": 4, "bf16": 2}[floats]
    size = sum(
        tensor.numel() * (1 if tensor.dtype == torch.int8 else 4 if name.endswith("_scale") else width)
        for name, tensor in saved.items()
    )
    assert checkpoint.mebibytes(EMBEDDED, "int8") == pytest.approx(size / 2**20)
    assert checkpoint.mebibytes(EMBEDDED, "fp32") > checkpoint.mebibytes(EMBEDDED, "int8")


def test_changed_weights_are_converted_to_w8a8_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path / "made")
    weights = shutil.copytree(EMBEDDED, tmp_path / "llama") / "model.safetensors"
    before = checkpoint.w8a8(weights.parent)
    os.utime(weights, ns=(0, 0))
    after = checkpoint.w8a8(weights.parent)
    assert before != after
    assert {before.parent, after.parent} == {tmp_path / "made"}


def test_w8a8_weights_are_those_of_the_checkpoint_to_half_a_step_of_their_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    made = checkpoint.w8a8(EMBEDDED)
    before, after = load_file(EMBEDDED / "model.safetensors"), load_file(made / "model.safetensors")
    linears = [name for name in before if name.endswith("_proj.weight")]
    assert len(linears) == 7 * 6
    for name in linears:
        assert after[name].dtype == torch.int8
        scale = after[f"{name}_scale"]
        assert scale.shape == (len(before[name]), 1)
        assert after[name].abs().amax(1).eq(127).all(), "every row uses all of its range"
        assert bool(((after[name] * scale - before[name].float()).abs() <= 0.501 * scale).all())
    assert all(torch.equal(after[name], before[name]) for name in before if name not in linears)
    assert checkpoint.w8a8(EMBEDDED) == made
    config = LlamaConfig.from_pretrained(made)
    assert config.quantization_config["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_command_in_the_results_has_no_folder_of_this_machine(tmp_path: Path, absolute: bool) -> None:
    folder = tmp_path / "a llama" if absolute else Path("models/a llama")
    command = [f"{ROOT}/.venv/bin/python", "-m", "x", "--model", str(folder), "--log", f"{ROOT}/log"]
    assert shown(command, folder) == ".venv/bin/python -m x --model 'a llama' --log log"
    assert shown(["make", f"MODEL={folder}"], folder) == "make 'MODEL=a llama'"
    assert shown(["/opt/python/bin/python3", "-m", "x"], folder) == "python3 -m x"
