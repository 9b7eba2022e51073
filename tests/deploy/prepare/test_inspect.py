"""Inspecting a checkpoint tells what loading it gives, its sizes to the byte, or its refusal, before it is read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deploy.prepare.conftest import MODEL, WEIGHTS, Hub
from engine.checkpoints import save_small
from engine.engines import load, needs_compiled_kernels
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.hub import resolve_folder
from llama_engine.engine.memory_plan import plan_memory
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import LoadedModel, describe_checkpoint
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from triton_prepare.inspect import main

from models import gguf_checkpoints, quantized_checkpoints

LINES = ["model", "saved", "served", "ends", "chats", "defaults", "memory"]
CPU = torch.device("cpu")
SAVED: dict[str, dict[str, object]] = {
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "int8 with a threshold": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_DEVICE", "cpu")
    monkeypatch.setenv("LLAMA_QUANTIZATION", "checkpoint")


def _describe(folder: Path, settings: Settings) -> LoadedModel:
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


BIASED = {"attention_bias": True, "head_dim": 24}


@pytest.mark.parametrize(
    ("changed", "quantization", "parameters"),
    [
        ({"tie_word_embeddings": True}, "none", {"dtype": "bfloat16"}),
        ({"tie_word_embeddings": True}, "int8", {}),
        (BIASED, "none", {}),
        (BIASED, "int8", {}),
        (BIASED, "int8", {"kernels": "stock", "dtype": "float16"}),
        (BIASED, "int8", {"int8_threshold": "6"}),
        (BIASED, "nf4", {}),
    ],
    ids=str,
)
def test_floats_are_described_as_they_are_loaded(
    tmp_path: Path, tokenizer: Tokenizer, changed: dict[str, object], quantization: str, parameters: dict[str, str]
) -> None:
    _assert_same(save_small(tmp_path, tokenizer, **changed), quantization, **parameters)


@pytest.fixture(scope="module")
def wide(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its widths are those of every format's groups and blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return save_small(tmp_path_factory.mktemp("wide") / "wide", tokenizer, **sizes)


@pytest.mark.parametrize("name", [*SAVED, *quantized_checkpoints.FORMATS, *gguf_checkpoints.TYPES])
def test_a_quantized_checkpoint_is_described_as_it_is_loaded(
    wide: Path, tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    if name in gguf_checkpoints.TYPES:
        path = gguf_checkpoints.write(wide, name, tmp_path / "model.gguf")
    elif name in quantized_checkpoints.FORMATS:
        path = quantized_checkpoints.write(wide, name, tmp_path / name)
    else:
        path = tmp_path / name
        config = BitsAndBytesConfig(**SAVED[name])
        AutoModelForCausalLM.from_pretrained(wide, quantization_config=config).save_pretrained(path)
        tokenizer.pretrained.save_pretrained(path)
    _assert_same(path, "checkpoint")


def test_the_contents_of_weights_are_not_read(out: Path) -> None:
    expected = load("int8", model=str(out)).info
    size, length = (out / WEIGHTS).stat().st_size, int.from_bytes((out / WEIGHTS).read_bytes()[:8], "little")
    with (out / WEIGHTS).open("r+b") as file:
        file.truncate(8 + length)
        file.truncate(size)
    assert _describe(out, Settings()).info == expected


def test_the_lines_name_model_precision_and_memory(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "changed"))
    (folder / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "bos_token_id": 1}')
    assert main([str(folder)]) == 0
    model, saved, served, ends, chats, defaults, ignored, memory = capsys.readouterr().out.splitlines()
    assert model == (
        f"model    {folder}: llama, 2 layers, hidden 64, 4 heads (2 KV) of 16, vocabulary 3,072, context 128"
    )
    assert saved == "saved    floats; F32 1.8 MiB"
    assert served == (
        "served   float32 weights: not batch-invariant; linear layers 15 in float32, everything else float32"
    )
    assert ends == "ends     a completion ends at 2 '</s>' (config)"
    assert chats == "chats    default"
    assert defaults.startswith("defaults max_tokens=128 min_tokens=0 temperature=")
    assert ignored == "ignored  of the generation config: no_repeat_ngram_size 3"
    assert memory.startswith("memory   on cpu: weights 2 MiB + cache 2 MiB (4,096 tokens x 512 B: 32 sequences of 128 ")


def test_the_settings_are_those_of_the_environment(
    original: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_compiled_kernels()
    for name, value in {"QUANTIZATION": "int8", "SLOTS": "3", "POOLING": "mean"}.items():
        monkeypatch.setenv(f"LLAMA_{name}", value)
    assert main([str(original)]) == 0
    printed = capsys.readouterr().out
    assert "\nembeds   mean of all hidden states, L2 norm 1\n" in printed
    assert "linear layers 15 in int8, everything else float32; quantized at each start\n" in printed
    assert "3 sequences of 128 tokens" in printed


@pytest.mark.parametrize(
    ("setting", "value", "known"),
    [
        ("LLAMA_QUANTIZATION", "nf4", ["model", "saved", "refused"]),
        ("LLAMA_MEMORY_FRACTION", "2", ["refused"]),
        ("LLAMA_KV_CACHE_TOKENS", str(1 << 30), [*LINES, "refused"]),
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


def test_a_refusal_is_that_of_loading(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "changed"))
    (folder / "config.json").write_bytes((original / "config.json").read_bytes().replace(b"128,", b"256,"))
    assert main([str(folder)]) == 1
    with pytest.raises(CheckpointError) as refused:
        load("checkpoint", model=str(folder))
    assert capsys.readouterr().out.splitlines()[-1] == f"refused  {refused.value}"


def test_more_inputs_than_int32_sums_hold_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save_small(tmp_path, tokenizer, hidden_size=16, num_hidden_layers=1, intermediate_size=133_000)
    with pytest.raises(CheckpointError, match="a linear layer has 133000 inputs"):
        _describe(folder, Settings(quantization="int8"))


def test_a_hub_id_is_described_once_it_is_downloaded(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MODEL, "--revision", "v1"]) == 1
    model, refused = capsys.readouterr().out.splitlines()
    assert model.startswith(f"model    {MODEL}: llama, 2 layers, ")
    assert refused.startswith(f"refused  1 files of weights aren't downloaded, first {WEIGHTS}; `hf download {MODEL}`")
    assert hub.downloads(WEIGHTS) == []
    resolve_folder(MODEL, "v1")
    assert main([MODEL, "--revision", "v1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == LINES
