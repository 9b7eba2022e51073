"""A server serves a prepared checkpoint with the bits of the original, and its folder is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params
from deploy.prepare.conftest import COMMIT, INDEX, MODEL, WEIGHTS, Hub, files_of_at_most
from engine.checkpoints import small_config
from engine.engines import load
from engine.gguf_files import small_model, write_model
from engine.logits import logits_of
from engine.lora_adapters import save_adapter
from gguf import GGMLQuantizationType as Kind
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.pooling import Pooling
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import LoadedModel
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from triton_prepare import inspect
from triton_prepare.__main__ import main
from triton_prepare.prepare import prepare


def _assert_same(loaded: LoadedModel, expected: LoadedModel) -> None:
    """Compare the info, the embedding and the bits of the logits, on which every other weight has a part."""
    assert loaded.info == expected.info
    assert torch.equal(_embedding(loaded), _embedding(expected))
    tokens = expected.tokenizer.encode("The with statement is used to wrap the execution of a block")
    assert loaded.tokenizer.encode("The with statement is used to wrap the execution of a block") == tokens
    assert torch.equal(logits_of(loaded, tokens), logits_of(expected, tokens))


def _embedding(loaded: LoadedModel) -> torch.Tensor:
    embedding = loaded.model.embedding
    return embedding if isinstance(embedding, torch.Tensor) else embedding.rows


def test_a_merged_adapter_is_that_of_peft(original: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    merged = tmp_path / "merged"
    model = save_adapter(original, tmp_path / "adapter", {"r": 4, "rank_pattern": {"o_proj": 2}})
    model.merge_and_unload().save_pretrained(merged)
    tokenizer.pretrained.save_pretrained(merged)
    prepare(str(original), None, tmp_path / "ours", adapter=str(tmp_path / "adapter"))
    prepare(str(merged), None, tmp_path / "expected")
    ours, expected, unmerged = (
        logits_of(load("int8", model=str(folder)), [1, 5, 6, 7])
        for folder in (tmp_path / "ours", tmp_path / "expected", original)
    )
    assert (ours - expected).abs().max() <= 1e-3
    assert (ours - unmerged).abs().max() > 0.1


def test_an_adapter_is_not_merged_into_a_quantized_checkpoint(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"adapter is 'a/b', but {finished} is quantized; floats are needed"):
        prepare(str(finished), None, tmp_path / "out", adapter="a/b")


def test_a_damaged_adapter_is_one_line(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    assert main([str(original), "--adapter", "adapter"]) == 1
    assert capsys.readouterr().err == "prepare: can't load adapter: adapter_config.json: there is no such file\n"
    assert [*tmp_path.iterdir()] == [tmp_path / "adapter"]


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32], ids=str)
def test_a_prepared_checkpoint_is_served_in_any_dtype(saved: torch.dtype, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of an untrained Llama in several files, with a generation config that transformers loads but refuses to save."""
    original, out = tmp_path / "original", tmp_path / "out"
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(tokenizer))
    torch.nn.Module.to(model, saved)
    model.save_pretrained(original, max_shard_size="200KB")
    tokenizer.pretrained.save_pretrained(original)
    assert len([*original.glob("*.safetensors")]) > 2
    generation = json.dumps({"do_sample": False, "temperature": 0.6, "max_new_tokens": 77})
    (original / "generation_config.json").write_text(generation)
    prepare(str(original), None, out)
    assert (out / "generation_config.json").read_text() == generation
    assert (out / "tokenizer_config.json").read_text() == (original / "tokenizer_config.json").read_text()
    for served in ("auto", "bfloat16"):
        loaded, expected = (load("int8", model=str(folder), dtype=served) for folder in (out, original))
        if served == "bfloat16" and saved != torch.bfloat16:
            # The one difference: a server rounds to bfloat16 before it rounds to 8 bits.
            assert loaded.info == expected.info
        else:
            _assert_same(loaded, expected)


def test_transformers_reads_the_same_weights(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished)
    name, saved = "model.layers.1.mlp.down_proj", load_file(finished / WEIGHTS)
    weight = model.get_parameter(f"{name}.weight")
    assert isinstance(weight, Int8Params)
    assert torch.equal(weight.data, saved[f"{name}.weight"])
    assert torch.equal(weight.SCB, saved[f"{name}.SCB"])


def test_weights_beyond_a_files_size_are_in_several(original: Path, finished: Path, tmp_path: Path) -> None:
    prepare(str(original), None, tmp_path / "out", shard_bytes=200_000)
    assert (tmp_path / "out" / INDEX).exists()
    assert not (tmp_path / "out" / WEIGHTS).exists()
    _assert_same(load("int8", model=str(tmp_path / "out")), load("int8", model=str(finished)))


def test_a_quantized_checkpoint_is_copied(finished: Path, tmp_path: Path) -> None:
    prepare(str(finished), None, tmp_path / "copy")
    names = {path.name for path in finished.iterdir()}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names
    assert all((tmp_path / "copy" / name).read_bytes() == (finished / name).read_bytes() for name in names)


def test_licences_and_chat_templates_are_copied_and_other_files_are_not(original: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(original, tmp_path / "source")), tmp_path / "out"
    for name in ("LICENSE.txt", "NOTICE", "README.md", "modeling_x.py", "pytorch_model.bin"):
        (source / name).touch()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    prepare(str(source), None, out)
    expected = {path.name for path in original.iterdir()} | {"LICENSE.txt", "NOTICE", "additional_chat_templates"}
    assert {path.name for path in out.iterdir()} == expected
    assert load("checkpoint", model=str(out)).tokenizer.chat_templates.keys() == {"default", "tool_use"}


def test_a_revision_of_a_hub_id_is_prepared(hub: Hub, finished: Path, tmp_path: Path) -> None:
    prepare(MODEL, "v1", tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert [request.url.path for request in hub.downloads(WEIGHTS)] == [f"/{MODEL}/resolve/{COMMIT}/{WEIGHTS}"]


def test_an_existing_checkpoint_is_enough_with_if_absent(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert main(["nowhere", "--out", str(tmp_path), "--if-absent"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert main(["nowhere", "--out", str(tmp_path), "--if-absent"]) == 1
    assert capsys.readouterr().err == f"prepare: {tmp_path} exists; remove it, or name another folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_revision_of_a_folder_is_refused_by_prepare_and_inspect(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(original), "--revision", "v1", "--out", str(tmp_path / "out")]) == 1
    assert inspect.main([str(original), "--revision", "v1"]) == 1
    reason = f"revision is 'v1', but {original} is no hub id; only a hub id has revisions\n"
    assert capsys.readouterr() == (f"refused  {reason}", f"prepare: {reason}")


def test_a_failed_write_leaves_nothing(original: Path, tmp_path: Path) -> None:
    with files_of_at_most(1 << 20), pytest.raises(CheckpointError, match=r"can't be written: ") as refused:
        prepare(str(original), None, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert [*tmp_path.iterdir()] == []


def test_a_result_that_does_not_load_is_not_kept(out: Path, tmp_path: Path) -> None:
    saved = load_file(out / WEIGHTS)
    kept = {name: tensor for name, tensor in saved.items() if not name.endswith("0.mlp.down_proj.SCB")}
    save_file(kept, out / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .*0\.mlp\.down_proj\.SCB"):
        prepare(str(out), None, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_files_are_readable_as_the_umask_allows(original: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        prepare(str(original), None, tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o640"}
    assert oct((tmp_path / "out").stat().st_mode & 0o777) == "0o750"


@pytest.mark.parametrize("missing", ["folder", "tokenizer.json", WEIGHTS])
def test_a_model_that_cannot_be_prepared_is_one_line(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    model = tmp_path / "folder"
    if missing != "folder":
        shutil.copytree(original, model, ignore=shutil.ignore_patterns(missing))
    assert main([str(model), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ")
    assert str(model) in line
    assert [path for path in tmp_path.iterdir() if path != model] == []


def test_a_gguf_file_becomes_a_folder_in_int8(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its logits are those of the dequantized floats, quantized per channel as any checkpoint in floats."""
    model = small_model("gemma3_text", vocab_size=len(tokenizer.vocabulary.token_bytes), tie_word_embeddings=True)
    path = write_model(tmp_path / "it.gguf", model, Kind.Q8_0)
    tokenizer.pretrained.save_pretrained(tmp_path)
    prepare(str(path), None, tmp_path / "out")
    saved = read_checkpoint_headers(path, "it").saved
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data = saved.read(name)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path / "floats")
    tokenizer.pretrained.save_pretrained(tmp_path / "floats")
    _assert_same(load("int8", model=str(tmp_path / "out")), load("int8", model=str(tmp_path / "floats")))


def test_a_base_model_for_embeddings_is_prepared(original: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(original, tmp_path / "source"))
    AutoModel.from_pretrained(original).save_pretrained(source)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    (source / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in kinds.items()]))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    prepare(str(source), None, tmp_path / "out")
    loaded = load("checkpoint", model=str(tmp_path / "out"))
    assert loaded.pooling == Pooling("mean", normalizes=False)
    assert not loaded.architecture.has_head
    _assert_same(loaded, load("int8", model=str(source)))


def test_a_checkpoint_with_modules_that_are_not_served_is_prepared(original: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(original, tmp_path / "source"))
    (source / "modules.json").write_text('[{"path": "", "type": "Transformer"}, {"path": "2_Dense", "type": "Dense"}]')
    prepare(str(source), None, tmp_path / "out")
    assert load("checkpoint", model=str(tmp_path / "out"), pooling="last").pooling == Pooling("last")


@pytest.mark.long
def test_the_command_prepares_and_sigterm_leaves_nothing(original: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triton_prepare", str(original)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert next(process.stdout).startswith("prepare: quantizing ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert [*(tmp_path / "prepared").iterdir()] == []
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    # The default OUT.
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["small-int8"]
