"""Inspecting a checkpoint tells what loading it gives, its sizes to the byte, or its refusal, from headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from engine.checkpoints import save_small
from engine.engines import load
from llama_engine.errors import CheckpointError
from llama_engine.model.checkpoint_headers import read_checkpoint_headers
from llama_engine.model.loader import Checkpoint, describe_checkpoint
from llama_engine.model.memory_plan import plan_memory
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from programs.prepare.conftest import MODEL, WEIGHTS, Hub
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from triton_llama.cli import main as client
from triton_prepare.inspect import main

from models import gguf_checkpoints, quantized_checkpoints

CPU = torch.device("cpu")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SAVED: dict[str, dict[str, object]] = {
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "int8 with a threshold": {"load_in_8bit": True},
    "nf4": NF4,
    "nf4 with quantized scales": {**NF4, "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_DEVICE", "cpu")
    monkeypatch.setenv("LLAMA_QUANTIZATION", "checkpoint")


def _describe(folder: Path, settings: Settings) -> Checkpoint:
    return describe_checkpoint(str(folder), read_checkpoint_headers(folder, str(folder)), settings, CPU)


def _assert_same(folder: Path, quantization: str, **parameters: str) -> None:
    """Compare with a loaded checkpoint: info, and the plan of everything else."""
    loaded = load(quantization, model=str(folder), **parameters)
    settings = Settings.parse({"quantization": quantization, **parameters}, {})
    described = _describe(folder, settings)
    assert described.info == loaded.info
    plans = [replace(plan_memory(checkpoint, settings, 4), free=0) for checkpoint in (loaded, described)]
    assert plans[0] == plans[1]
    assert described.tokenizer.vocabulary.token_bytes == loaded.tokenizer.vocabulary.token_bytes


@pytest.mark.parametrize(
    "changed", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "head_dim": 24}], ids=str
)
@pytest.mark.parametrize(
    ("quantization", "parameters"),
    [
        ("none", {}),
        ("none", {"dtype": "bfloat16"}),
        ("int8", {}),
        ("int8", {"kernels": "stock", "dtype": "float16"}),
        ("int8", {"int8_threshold": "6"}),
        ("nf4", {}),
    ],
    ids=str,
)
def test_floats_are_described_as_they_are_loaded(
    tmp_path: Path, tokenizer: Tokenizer, changed: dict[str, object], quantization: str, parameters: dict[str, str]
) -> None:
    _assert_same(save_small(tmp_path, tokenizer, **changed), quantization, **parameters)


@pytest.mark.parametrize("saved", SAVED)
def test_a_quantized_checkpoint_is_described_as_it_is_loaded(
    original: Path, tmp_path: Path, tokenizer: Tokenizer, saved: str
) -> None:
    config = BitsAndBytesConfig(**SAVED[saved])
    AutoModelForCausalLM.from_pretrained(original, quantization_config=config).save_pretrained(tmp_path)
    tokenizer.pretrained.save_pretrained(tmp_path)
    _assert_same(tmp_path, "checkpoint")


@pytest.fixture(scope="module")
def wide(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its widths are those of every format's groups and blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return save_small(tmp_path_factory.mktemp("wide") / "wide", tokenizer, **sizes)


@pytest.mark.parametrize("name", quantized_checkpoints.FORMATS)
def test_every_format_is_described_as_it_is_loaded(wide: Path, tmp_path: Path, name: str) -> None:
    _assert_same(quantized_checkpoints.write(wide, name, tmp_path / name), "checkpoint")


@pytest.mark.parametrize("name", gguf_checkpoints.TYPES)
def test_a_gguf_file_is_described_as_it_is_loaded(wide: Path, tmp_path: Path, name: str) -> None:
    _assert_same(gguf_checkpoints.write(wide, name, tmp_path / "model.gguf"), "checkpoint")


def test_the_contents_of_weights_are_not_read(out: Path) -> None:
    (out / "manifest.json").unlink()
    expected = load("int8", model=str(out)).info
    size, length = (out / WEIGHTS).stat().st_size, int.from_bytes((out / WEIGHTS).read_bytes()[:8], "little")
    with (out / WEIGHTS).open("r+b") as file:
        file.truncate(8 + length)
        file.truncate(size)
    assert _describe(out, Settings()).info == expected


def test_the_lines_name_model_precision_and_memory(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(original)]) == 0
    model, context, saved, served, chat, memory = capsys.readouterr().out.splitlines()
    assert model == f"model    {original}: llama, 2 layers, hidden 64, 4 heads (2 KV) of 16, vocabulary 3,072"
    assert context == "context  128 tokens (RoPE default)"
    assert saved == "saved    floats; F32 1.8 MiB in 1 file"
    assert served == (
        "served   float32 weights: bits depend on the batch; linear layers 15 in float32, everything else float32; "
        "1.8 MiB of weights on cpu"
    )
    assert chat == "chat     template; end tokens 2"
    assert memory.startswith("memory   on cpu: weights 2 MiB + cache 2 MiB (4,096 tokens x 512 B: 32 sequences of 128 ")


def test_the_settings_are_those_of_the_environment(
    original: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_QUANTIZATION", "int8")
    monkeypatch.setenv("LLAMA_SLOTS", "3")
    assert main([str(original), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert "linear layers 15 in int8, everything else float32; quantized at each start; " in lines["served"]
    assert "3 sequences of 128 tokens" in lines["memory"]


def test_model_and_revision_can_come_from_the_environment(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_MODEL", MODEL)
    monkeypatch.setenv("LLAMA_REVISION", "v9")
    assert main([]) == 1
    assert f"refused  can't read {MODEL}: RevisionNotFoundError" in capsys.readouterr().out
    assert main(["--revision", "v1"]) == 0
    assert f"model    {MODEL}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "value", "known"),
    [
        ("LLAMA_QUANTIZATION", "nf4", ["model", "context", "saved", "refused"]),
        ("LLAMA_MEMORY_FRACTION", "2", ["refused"]),
        ("LLAMA_KV_CACHE_TOKENS", str(1 << 30), ["model", "context", "saved", "served", "chat", "memory", "refused"]),
    ],
)
def test_a_refusal_is_the_last_line_and_exit_code_1(
    finished: Path, setting: str, value: str, known: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(setting, value)
    assert main([str(finished)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == known


def test_a_refusal_is_that_of_loading(original: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / WEIGHTS).write_bytes((original / WEIGHTS).read_bytes())
    (out / "manifest.json").unlink()
    (out / "config.json").write_bytes((original / "config.json").read_bytes().replace(b"128,", b"256,"))
    assert main([str(out)]) == 1
    with pytest.raises(CheckpointError) as refused:
        load("checkpoint", model=str(out))
    assert capsys.readouterr().out.splitlines()[-1] == f"refused  {refused.value}"


def test_more_inputs_than_int32_sums_hold_are_refused_as_by_loading(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save_small(tmp_path, tokenizer, hidden_size=16, num_hidden_layers=1, intermediate_size=133_000)
    with pytest.raises(CheckpointError, match="a linear layer has 133000 inputs") as refused:
        load("int8", model=str(folder))
    with pytest.raises(CheckpointError) as described:
        _describe(folder, Settings(quantization="int8"))
    assert str(described.value) == str(refused.value)


def test_of_a_hub_id_only_headers_are_fetched(
    hub: Hub, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([MODEL, "--revision", "v1"]) == 0
    from_hub = capsys.readouterr().out
    assert [request.headers["range"] for request in hub.downloads(WEIGHTS)] == ["bytes=0-100000"]
    assert not [*(tmp_path / "cache").rglob(WEIGHTS)]
    main([str(original)])
    # Only the free memory differs.
    expected = capsys.readouterr().out.replace(str(original), MODEL)
    assert from_hub.split(" MiB of ")[0] == expected.split(" MiB of ")[0]


def test_a_hub_that_is_out_of_reach_is_one_line(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.is_reachable = False
    assert main([MODEL]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"refused  can't read {MODEL}: ")


def test_the_client_command_inspects(original: Path) -> None:
    result = CliRunner().invoke(client, ["inspect", str(original), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["context"] == "128 tokens (RoPE default)"


def test_a_client_without_the_servers_packages_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from triton_llama.cli import main; main()"
    command = [sys.executable, "-c", program, str(tmp_path), "inspect", "a"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: no torch here; inspect needs the model repository and its packages: run `make inspect MODEL=...` in a "
        "checkout\n"
    )
