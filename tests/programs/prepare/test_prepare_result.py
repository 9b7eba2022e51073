"""A server loads from a prepared checkpoint what it would have made of the original, or refuses it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from engine.checkpoints import small_config
from engine.engines import load, runner_with_pages
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.model.manifest import MANIFEST, Manifest
from llama_engine.model.model_runner import PromptChunk
from llama_engine.text.tokenizer import Tokenizer
from programs.prepare.conftest import WEIGHTS
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from triton_prepare.prepare import prepare

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint, prepared."""
    out = tmp_path_factory.mktemp("prepared") / "pydoc-llama-int8"
    prepare(str(EMBEDDED), None, out, "cpu")
    return out


def _assert_same(loaded: Checkpoint, expected: Checkpoint) -> None:
    """Compare the info, the embedding and the bits of the logits, on which every other weight has a part."""
    assert loaded.info == expected.info
    assert torch.equal(loaded.model.embedding, expected.model.embedding)
    chunk = PromptChunk(0, 0, expected.tokenizer.encode("The with statement is used to wrap the execution of a block"))
    first, second = (runner_with_pages(checkpoint) for checkpoint in (loaded, expected))
    with torch.inference_mode():
        assert torch.equal(first.logits(first.prefill([chunk])), second.logits(second.prefill([chunk])))


def test_a_prepared_checkpoint_loads_as_the_original_does(embedded: Path, int8: Checkpoint) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (embedded, *embedded.iterdir())}
    loaded = load("int8", model=str(embedded))
    _assert_same(loaded, int8)
    assert loaded.generation_config.to_dict() == int8.generation_config.to_dict()
    assert loaded.max_model_len == int8.config.max_position_embeddings
    assert loaded.tokenizer.encode("def f(x): é") == int8.tokenizer.encode("def f(x): é")
    assert loaded.tokenizer.vocabulary.token_bytes == int8.tokenizer.vocabulary.token_bytes
    assert int8.prepared is None
    assert loaded.prepared is not None
    assert loaded.prepared.source.model == "pydoc-llama"
    # Loading writes nothing to the folder.
    assert {path.name: path.stat().st_mtime_ns for path in (embedded, *embedded.iterdir())} == before


def test_a_quantized_checkpoint_is_copied(finished: Path, tmp_path: Path) -> None:
    manifest = prepare(str(finished), None, tmp_path / "copy", "cpu")
    assert manifest.settings["quantization"] == "checkpoint"
    assert "copied from the folder small-int8" in manifest.describe()
    assert all((tmp_path / "copy" / name).read_bytes() == (finished / name).read_bytes() for name in manifest.files)
    _assert_same(load("int8", model=str(tmp_path / "copy")), load("int8", model=str(finished)))


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_a_copys_manifest_has_only_a_saved_threshold(out: Path, tmp_path: Path, threshold: float | None) -> None:
    (out / MANIFEST).unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"].pop("llm_int8_threshold")
    config["quantization_config"] |= {} if threshold is None else {"llm_int8_threshold": threshold}
    (out / "config.json").write_text(json.dumps(config))
    assert prepare(str(out), None, tmp_path / "copy", "cpu").settings.get("int8_threshold") == threshold


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_copy_is_loaded_on_the_chosen_device(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^device is 'cuda' .* PyTorch sees no GPU$"):
        prepare(str(finished), None, tmp_path / "copy", "cuda")


def test_a_quantized_checkpoint_that_does_not_load_is_not_copied(out: Path, tmp_path: Path) -> None:
    saved = load_file(out / WEIGHTS)
    save_file(
        {name: tensor for name, tensor in saved.items() if not name.endswith("0.mlp.down_proj.SCB")}, out / WEIGHTS
    )
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .*0\.mlp\.down_proj\.SCB"):
        prepare(str(out), None, tmp_path / "copy", "cpu")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32], ids=str)
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
    assert prepare(str(original), None, out, "cpu").settings["dtype"] == str(saved).removeprefix("torch.")
    assert (out / "generation_config.json").read_text() == generation
    for served in ("auto", "float16", "bfloat16"):
        loaded, expected = (load("int8", model=str(folder), dtype=served) for folder in (out, original))
        assert loaded.generation_config.max_new_tokens == 77
        if served == "bfloat16" and saved != torch.bfloat16:
            # The one difference: a server rounds to bfloat16 before it rounds to 8 bits.
            assert loaded.info == expected.info
            assert loaded.info.dtype == torch.bfloat16
        else:
            _assert_same(loaded, expected)


def test_the_manifest_describes_every_file(embedded: Path) -> None:
    manifest = Manifest.read(embedded)
    assert manifest is not None
    on_disk = {path.name for path in embedded.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", WEIGHTS, MANIFEST} <= on_disk
    assert manifest.files.keys() == on_disk - {MANIFEST}
    for name, file in manifest.files.items():
        content = (embedded / name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert manifest.settings == {"quantization": "int8", "int8_threshold": 0.0, "dtype": "float32", "device": "cpu"}
    for package in ("torch", "transformers", "bitsandbytes"):
        assert manifest.versions[package] == version(package)
    # Of these files, in every release: a finished checkpoint must not look like another source's.
    assert manifest.source.revision == "sha256:00e6322d9acf601fdde54031a6a234996a8c46d557e8e59eaaa09d1eccc5d383"
    assert manifest.describe() == (
        f"prepared checkpoint, quantized from the folder pydoc-llama revision {manifest.source.revision}, "
        f"on {manifest.date[:10]} with bitsandbytes {version('bitsandbytes')}"
    )
    for path in embedded.glob("*.json"):
        assert str(EMBEDDED.parent) not in path.read_text(), path.name


def test_the_prepared_revision_is_accepted(out: Path) -> None:
    manifest = Manifest.read(out)
    assert manifest is not None
    assert load("int8", model=str(out), revision=manifest.source.revision).prepared == manifest


def _change(name: str, value: object) -> Damage:
    """Change an entry of the manifest; None removes it."""

    def damage(out: Path) -> None:
        content = json.loads((out / MANIFEST).read_text()) | {name: value}
        (out / MANIFEST).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return damage


def _write(text: bytes) -> Damage:
    return lambda out: (out / MANIFEST).write_bytes(text)


CUT = r"\.safetensors has 999 bytes; when it was prepared it had \d+$"
GONE = r"config\.json can't be read, and the manifest lists it: "
SAVED = r"^quantization is '{}', but .* is saved in int8; set quantization to 'checkpoint'"
REVISION = r"^revision is 'v2', but the checkpoint was prepared from the folder small revision s"


@pytest.mark.parametrize(
    ("damage", "parameters", "message"),
    [
        (lambda out: os.truncate(out / WEIGHTS, 999), {}, CUT),
        (lambda out: (out / "config.json").unlink(), {}, GONE),
        (_change("format", 2), {}, r"manifest\.json is of format 2; this program reads 1$"),
        (str, {"revision": "v2"}, REVISION),
        *((_write(text), {}, r"manifest\.json can't be read: ") for text in (b'{"kind": ', b"\x80")),
        *((_change(name, None), {}, "isn't a whole manifest: ") for name in ("source", "files", "date")),
        *((str, {"quantization": other}, SAVED.format(other)) for other in ("none", "nf4")),
    ],
)
def test_a_damaged_or_different_checkpoint_is_refused(
    out: Path, damage: Damage, parameters: dict[str, str], message: str
) -> None:
    damage(out)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(**{"quantization": "int8", "model": str(out), **parameters})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["[]", '{"version": 3}', '{"kind": "of another tool", "files": {}}'])
def test_a_manifest_of_another_tool_is_ignored(out: Path, text: str) -> None:
    (out / MANIFEST).write_text(text)
    assert Manifest.read(out) is None
    assert load("int8", model=str(out)).prepared is None
