"""A server gets from a prepared checkpoint what it would have made of the original, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from engine.engines import load
from llama_engine.libraries import Linear8bitLt
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.model.manifest import MANIFEST, Manifest
from llama_engine.text.tokenizer import Tokenizer
from unit.prepared import prepare_folder, save_small_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint, prepared."""
    out = tmp_path_factory.mktemp("prepared") / "pydoc-llama-int8"
    prepare_folder(EMBEDDED, out)
    return out


def _assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    tensors, wanted = found.model.state_dict(), expected.model.state_dict()
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
    assert found.info == expected.info
    ids = torch.tensor([expected.tokenizer.encode("The with statement is used to wrap the execution of a block")])
    with torch.inference_mode():
        assert torch.equal(found.model(input_ids=ids).logits, expected.model(input_ids=ids).logits)


def test_the_embedded_checkpoint_is_another_one_when_it_is_prepared(folder: Path, int8: Checkpoint) -> None:
    found = load("int8", model=str(folder))
    _assert_same(found, int8)
    assert found.generation_config.to_dict() == int8.generation_config.to_dict()
    assert found.max_model_len == int8.max_model_len
    assert found.tokenizer.encode("def f(x): é") == int8.tokenizer.encode("def f(x): é")
    assert found.tokenizer.vocabulary.token_bytes == int8.tokenizer.vocabulary.token_bytes
    assert int8.prepared is None
    assert found.prepared is not None
    assert found.prepared.source.model == "pydoc-llama"


def test_the_setting_checkpoint_or_a_threshold_has_no_effect(folder: Path) -> None:
    assert load("checkpoint", model=str(folder)).info.threshold == 0.0
    outliers = load("int8", model=str(folder), int8_threshold="6")
    assert outliers.info.threshold == 6.0
    _assert_same(outliers, load("int8", int8_threshold="6"))


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_dtype_that_it_is_served_in_depends_on_the_one_that_it_was_saved_in(
    saved: torch.dtype, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    original = save_small_in(saved, tmp_path / "original", tokenizer)
    prepare_folder(original, tmp_path / "out")
    for served in ("auto", "float16", "bfloat16"):
        found, expected = (load("int8", model=str(tmp_path / name), dtype=served) for name in ("out", "original"))
        if served == "bfloat16" and saved != torch.bfloat16:
            # The one difference: a server would have rounded to bfloat16 before it rounded to 8 bits.
            assert found.info == expected.info
            assert found.info.dtype == torch.bfloat16
        else:
            _assert_same(found, expected)


def test_a_checkpoint_in_several_files_is_prepared_in_part(tokenizer: Tokenizer, tmp_path: Path) -> None:
    original = save_small_in(torch.float32, tmp_path / "original", tokenizer, max_shard_size="400KB")
    assert len([*original.glob("*.safetensors")]) > 2
    manifest = prepare_folder(original, tmp_path / "out")
    _assert_same(load("int8", model=str(tmp_path / "out")), load("int8", model=str(original)))
    assert manifest.settings["dtype"] == "float32"


def test_the_generation_config_is_changed_or_a_questionable_one_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    original = save_small_in(torch.float32, tmp_path / "original", tokenizer)
    # transformers loads one that sets a temperature without sampling, and refuses to save it.
    said = json.dumps({"do_sample": False, "temperature": 0.6, "max_new_tokens": 77})
    (original / "generation_config.json").write_text(said)
    prepare_folder(original, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == said
    assert load("int8", model=str(tmp_path / "out")).generation_config.max_new_tokens == 77


def test_the_manifest_says_something_else_than_what_is_there(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest is not None
    on_disk = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", MANIFEST} <= on_disk
    assert manifest.files.keys() == on_disk - {MANIFEST}
    for name, file in manifest.files.items():
        content = (folder / name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert manifest.settings == {"quantization": "int8", "int8_threshold": 0.0, "dtype": "float32", "device": "cpu"}
    for package in ("torch", "transformers", "bitsandbytes"):
        assert manifest.versions[package] == version(package)
    assert manifest.source.revision.startswith("sha256:")
    assert manifest.describe() == (
        f"prepared checkpoint, quantized from the folder pydoc-llama revision {manifest.source.revision}, "
        f"on {manifest.date[:10]} with bitsandbytes {version('bitsandbytes')}"
    )


def test_the_weights_are_left_in_the_files_or_twice_in_memory(folder: Path, tmp_path: Path) -> None:
    # A copy: other tests have FP32 weights of the embedded checkpoint, which may stay in its file.
    original = Path(shutil.copytree(EMBEDDED, tmp_path / "original"))
    for model in (folder, original):
        checkpoint = load("int8", model=str(model))
        assert str(model) not in Path("/proc/self/maps").read_text()
        layers = [module for module in checkpoint.model.modules() if isinstance(module, Linear8bitLt)]
        for weight in [layer.weight for layer in layers]:
            # bitsandbytes' own reference to it, which its product takes.
            assert getattr(weight, "CB", weight).data_ptr() == weight.data_ptr()


def test_a_path_of_the_machine_that_prepared_it_is_in_a_file(folder: Path) -> None:
    for path in folder.glob("*.json"):
        assert str(EMBEDDED.parent) not in path.read_text(), path.name


def test_a_start_writes_to_the_folder(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    load("int8", model=str(folder))
    assert {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before
