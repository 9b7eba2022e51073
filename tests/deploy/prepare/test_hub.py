"""A hub id becomes a folder with what a Llama needs, downloaded once, or from the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from deploy.prepare.conftest import INDEX, MODEL, WEIGHTS, Hub, files_of_at_most
from llama_engine.checkpoint.hub import resolve_adapter, resolve_folder
from llama_engine.checkpoint.lora import ADAPTER
from llama_engine.checkpoint.lora_config import CONFIG
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import resolve_name
from safetensors.torch import load_file, save_file

GGUF_SHARDS = ("it-Q8_0-00001-of-00002.gguf", "it-Q8_0-00002-of-00002.gguf")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def repository(hub: Hub, tmp_path: Path) -> Path:
    """The hub's folder, to be changed, with files that no server needs."""
    hub.folder = Path(shutil.copytree(hub.folder, tmp_path / "repository"))
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "2_Dense.json"):
        (hub.folder / name).write_text("of no use")
    return hub.folder


def _downloaded(hub: Hub) -> set[str]:
    return {Path(request.url.path).name for request in hub.requests if "/resolve/" in request.url.path}


def test_what_a_llama_needs_is_downloaded_once(hub: Hub, repository: Path) -> None:
    """The repository has the files of sentence-transformers, too."""
    (repository / "1_Pooling").mkdir()
    for name in ("modules.json", "1_Pooling/config.json"):
        (repository / name).write_text("{}")
    folder = resolve_folder(MODEL, None)
    needed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS}
    needed |= {"modules.json"}
    assert {path.name for path in folder.rglob("*") if path.is_file()} == _downloaded(hub)
    assert (folder / "1_Pooling" / "config.json").exists()
    assert needed <= _downloaded(hub) <= needed | {"chat_template.jinja", "special_tokens_map.json"}
    assert (folder / WEIGHTS).read_bytes() == (repository / WEIGHTS).read_bytes()
    hub.requests.clear()
    assert resolve_folder(MODEL, None) == folder
    assert _downloaded(hub) == set()


def _shard(repository: Path) -> None:
    """Save the repository's weights in SHARDS and a file that the index doesn't name."""
    tensors = load_file(repository / WEIGHTS)
    (repository / WEIGHTS).unlink()
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, repository / shard)
    (repository / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"other": torch.zeros(1)}, repository / "model-00003-of-00002.safetensors")


def test_the_files_of_an_index_are_downloaded(hub: Hub, repository: Path) -> None:
    _shard(repository)
    folder = resolve_folder(MODEL, None)
    assert {name for name in _downloaded(hub) if name.endswith(".safetensors")} == {*SHARDS}
    assert {path.name for path in folder.glob("*.safetensors")} == {*SHARDS}


def test_a_cache_is_enough_if_the_hub_is_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = resolve_folder(MODEL, "v1")
    hub.is_reachable = False
    assert resolve_folder(MODEL, "v1") == online
    hub.requests.clear()
    # As a process takes it from HF_HUB_OFFLINE=1.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_folder(MODEL, "v1") == online
    (online / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"^can't load {MODEL}: ") as refused:
        resolve_folder(MODEL, "v1")
    assert "\n" not in str(refused.value)
    assert hub.requests == []


@pytest.mark.parametrize(("model", "reason"), [(MODEL, "RevisionNotFoundError: 404"), ("an id", "HFValidationError: ")])
def test_what_the_hub_does_not_have_is_refused_in_one_line(hub: Hub, model: str, reason: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        resolve_folder(model, "v9")
    assert str(refused.value).startswith(f"can't load {model}: {reason}")
    assert "\n" not in str(refused.value)


def test_a_download_that_does_not_fit_is_one_line(hub: Hub) -> None:
    with files_of_at_most(1 << 18), pytest.raises(CheckpointError, match="File too large") as refused:
        resolve_folder(MODEL, None)
    assert "\n" not in str(refused.value)


def test_a_gated_model_is_refused_until_the_token_has_access(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CheckpointError) as refused:
            resolve_folder(MODEL, None)
        assert "\n" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert (resolve_folder(MODEL, None) / WEIGHTS).is_file()


@pytest.fixture
def gguf_repository(repository: Path) -> Path:
    """The repository with files of other quantizations, and one in shards."""
    for path in repository.glob("*.safetensors"):
        path.unlink()
    for name in ("it-Q4_K_M.gguf", "it-IQ4_K_M.gguf", "it-Q4_K.gguf", "mmproj-it-f16.gguf", *GGUF_SHARDS):
        (repository / name).write_text(name)
    return repository


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{MODEL}:Q4_K_M", ["it-Q4_K_M.gguf"]),
        (f"hf.co/{MODEL}:q4_k", ["it-Q4_K.gguf"]),
        (f"{MODEL}:Q8_0", [*GGUF_SHARDS]),
        (f"{MODEL}/{GGUF_SHARDS[0]}", [*GGUF_SHARDS]),
    ],
)
def test_a_gguf_file_of_the_hub_has_llama_cpps_names(
    hub: Hub, gguf_repository: Path, name: str, files: list[str]
) -> None:
    assert resolve_name(name) == name
    found = resolve_folder(name, None)
    assert found.name == files[0]
    assert found.read_text() == files[0]
    assert sorted(path.name for path in found.parent.glob("*.gguf")) == files
    hub.is_reachable = False
    assert resolve_folder(name, None, with_weights=False) == found


@pytest.mark.parametrize("name", [f"{MODEL}:Q5_0", f"{MODEL}/other.gguf"])
def test_a_gguf_file_that_the_hub_lacks_is_refused(hub: Hub, gguf_repository: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{MODEL} must have .* once; it has none$"):
        resolve_folder(name, None)


@pytest.mark.parametrize("name", ["missing.gguf", "models/missing.gguf"])
def test_a_missing_gguf_file_is_not_looked_for_on_the_hub(hub: Hub, name: str) -> None:
    assert resolve_folder(name, None) == Path(name)
    assert hub.requests == []


def test_a_gguf_file_is_not_downloaded_without_weights(hub: Hub, gguf_repository: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^the GGUF file of {MODEL} isn't downloaded; "):
        resolve_folder(f"{MODEL}:Q4_K_M", None, with_weights=False)
    assert not [name for name in _downloaded(hub) if name.endswith(".gguf")]


def test_a_repository_without_a_config_is_refused_with_a_gguf_name(hub: Hub, gguf_repository: Path) -> None:
    (gguf_repository / "config.json").unlink()
    with pytest.raises(CheckpointError, match=rf"it has no config\.json; if it has GGUF files, .* {MODEL}:Q4_K_M$"):
        resolve_folder(MODEL, None)


@pytest.fixture
def adapter(hub: Hub, tmp_path: Path) -> Path:
    """The hub's repository, of an adapter."""
    hub.folder = tmp_path / "adapter"
    hub.folder.mkdir()
    for name in (CONFIG, ADAPTER, "adapter_model.bin", "README.md", "optimizer.pt"):
        (hub.folder / name).write_text(name)
    return hub.folder


def test_the_files_of_an_adapter_are_downloaded(hub: Hub, adapter: Path) -> None:
    folder = resolve_adapter(f"{MODEL}@v1")
    assert {path.name for path in folder.iterdir()} == _downloaded(hub) == {CONFIG, ADAPTER}
    hub.is_reachable = False
    assert resolve_adapter(f"{MODEL}@v1") == folder


def test_a_folder_of_an_adapter_is_not_looked_up_on_the_hub(hub: Hub, adapter: Path) -> None:
    for source in (str(adapter), f"{adapter}-2", "a\0b", "x" * 5000):
        assert resolve_adapter(source) == Path(source)
    assert hub.requests == []


@pytest.mark.parametrize("source", [f"{MODEL}@v2", MODEL])
def test_an_adapter_that_the_hub_lacks_is_refused_in_one_line(hub: Hub, adapter: Path, source: str) -> None:
    hub.is_reachable = source != MODEL
    with pytest.raises(CheckpointError, match=f"^can't load {source}: ") as refused:
        resolve_adapter(source)
    assert "\n" not in str(refused.value)
