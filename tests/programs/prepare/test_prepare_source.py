"""An unsuitable source is refused before its weights are read or downloaded, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from programs.prepare.hubs import COMMIT, MODEL, LocalHub
from safetensors.torch import load_file, save_file
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.quantize import read_weights
from triton_prepare.source import choose_files

LLAMA = json.dumps({"model_type": "llama"})
QUANTIZED = json.dumps({"model_type": "llama", "quantization_config": {"load_in_8bit": True}})
NEEDED = "weights in safetensors are needed, as pickles can run code"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SHARDED = json.dumps({"weight_map": {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[0]}})


def _folder(folder: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_only_files_that_are_loaded_or_kept_are_chosen(tmp_path: Path) -> None:
    kept = ["LICENSE.txt", "NOTICE", "chat_template.jinja"]
    kept += ["generation_config.json", "tokenizer.json", "tokenizer.model"]
    others = [
        *("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "original/params.json", INDEX),
        *("original/LICENSE", "modeling_x.py", "README.md", "manifest.json", "adapter_config.json"),
    ]
    folder = _folder(tmp_path, dict.fromkeys([*kept, *others, WEIGHTS], "") | {"config.json": LLAMA})
    assert choose_files("x", folder) == (["config.json", WEIGHTS], kept)


def test_the_shards_of_an_index_are_loaded(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"config.json": LLAMA, INDEX: SHARDED, **dict.fromkeys(SHARDS, "")})
    assert choose_files("x", folder) == (["config.json", INDEX, *SHARDS], [])


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"x": ""}, "x has no config.json: it is no checkpoint"),
        ({"config.json": "{"}, "x: config.json is not a JSON object: "),
        ({"config.json": "[]"}, "x: config.json is not a JSON object"),
        ({"config.json": '{"model_type": "gpt2"}'}, "x is a 'gpt2' checkpoint; this project serves 'llama'"),
        ({"config.json": QUANTIZED}, "x is quantized already: there is nothing to prepare"),
        ({"config.json": LLAMA, "pytorch_model.bin": ""}, f"x has no {WEIGHTS}: {NEEDED}"),
        ({"config.json": LLAMA, INDEX: SHARDED, SHARDS[0]: ""}, f"x lacks 1 of 2 files of weights, first {SHARDS[1]}"),
        ({"config.json": LLAMA, INDEX: "{}"}, f"x: {INDEX} has no weight_map"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(tmp_path: Path, contents: dict[str, str], message: str) -> None:
    with pytest.raises(PrepareError) as refused:
        choose_files("x", _folder(tmp_path, contents))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model", ["/does/not/exist", "./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(hub: LocalHub, tmp_path: Path, model: str) -> None:
    with pytest.raises(PrepareError) as refused:
        prepare(model, None, tmp_path / "out")
    assert str(refused.value) == f"model is {model!r}: no such folder"
    assert hub.asked == []


def test_a_revision_of_a_folder_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"^revision is 'v2', but .* is a folder: only a hub id has revisions$"):
        prepare(str(original), "v2", tmp_path / "out")


def _saved(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


HALF = torch.zeros(4, 4).half()


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ({"a__weight": HALF, "b__bias": torch.zeros(4).half()}, "float16"),
        ({"a__weight": HALF.bfloat16()}, "bfloat16"),
        # A table of rotary frequencies isn't a weight.
        ({"a__weight": HALF, "rotary_emb__inv_freq": torch.zeros(4)}, "float16"),
        # float32 holds the values of both.
        ({"a__weight": HALF, "b__weight": HALF.bfloat16()}, "float32"),
    ],
)
def test_the_dtype_holds_every_saved_weight(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: str) -> None:
    assert read_weights("x", _saved(tmp_path, **tensors))[0] == dtype


def test_the_room_for_the_result_is_that_of_its_tensors_and_64_mib(original: Path, finished: Path) -> None:
    needed = read_weights("x", original)[1]
    assert needed == sum(tensor.nbytes for tensor in load_file(finished / WEIGHTS).values()) + (64 << 20)
    assert needed >= sum(path.stat().st_size for path in finished.iterdir())


def test_a_dtype_that_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"^x has weights in F64; F32, F16, BF16 can be quantized$"):
        read_weights("x", _saved(tmp_path, a__weight=torch.zeros(4, 4).double()))


def _header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff" * 64, _header("notjson!"), _header("[]"), _header('{"a.weight": {"data_offsets": [0, 0]}}')),
        _header('{"a.weight": {"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]}}'),
        _header('{"a_proj.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}') + bytes(4),
    ],
)
def test_broken_weights_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(PrepareError, match=r"^x: the weights can't be read: ") as refused:
        read_weights("x", tmp_path)
    assert "\n" not in str(refused.value)


def test_weights_without_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(_header("{}"))
    with pytest.raises(PrepareError, match=r"^x has weights in no dtype at all; F32, F16, BF16 can be quantized$"):
        read_weights("x", tmp_path)


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_revision_is_resolved_to_its_commit(hub: LocalHub, tmp_path: Path, revision: str | None) -> None:
    manifest = prepare(MODEL, revision, tmp_path / "out", "cpu")
    assert (manifest.source.revision, manifest.source.asked_revision) == (COMMIT, revision)
    assert f"quantized from {MODEL} revision {COMMIT}, on " in manifest.describe()


def test_weights_are_not_downloaded_from_an_unsuitable_checkpoint(hub: LocalHub, tmp_path: Path) -> None:
    hub.folder = _folder(tmp_path / "pickled", {"config.json": LLAMA, "pytorch_model.bin": "pickle"})
    with pytest.raises(PrepareError, match="weights in safetensors are needed"):
        prepare(MODEL, None, tmp_path / "out")
    assert hub.downloads("pytorch_model.bin") == 0
    hub.folder = _folder(tmp_path / "gpt2", {"config.json": '{"model_type": "gpt2"}', WEIGHTS: "weights"})
    hub.commit = "1" * 40
    with pytest.raises(PrepareError, match="is a 'gpt2' checkpoint"):
        prepare(MODEL, None, tmp_path / "out")
    assert hub.downloads(WEIGHTS) == 0
    hub.folder = _folder(tmp_path / "shards", {"config.json": LLAMA, INDEX: SHARDED, SHARDS[0]: "weights"})
    hub.commit = "2" * 40
    with pytest.raises(PrepareError, match=f"^{MODEL} lacks 1 of 2 files of weights, first {SHARDS[1]}$"):
        prepare(MODEL, None, tmp_path / "out")
    assert hub.downloads(SHARDS[0]) == 0
    assert not (tmp_path / "out.part").exists()


def test_a_gated_model_is_refused_until_the_token_has_access(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    for token, access in ((None, "HF_TOKEN isn't set"), ("hf_wrong", "the account of HF_TOKEN has no access yet")):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PrepareError) as refused:
            prepare(MODEL, None, tmp_path / "out")
        assert str(refused.value) == (
            f"{MODEL} is gated, and {access}: accept its terms, and set HF_TOKEN to that account's token"
        )
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert prepare(MODEL, None, tmp_path / "out", "cpu").source.revision == COMMIT


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("example/else", None, "the hub has no example/else, or it is private: check the id, or set HF_TOKEN"),
        (MODEL, "v9", f"{MODEL} has no revision 'v9' on the hub"),
        ("not an id", None, "'not an id' is neither an existing folder nor a hub id (organisation/name)"),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_refused(
    hub: LocalHub, tmp_path: Path, model: str, revision: str | None, message: str
) -> None:
    with pytest.raises(PrepareError) as refused:
        prepare(model, revision, tmp_path / "out")
    assert str(refused.value) == message


def test_files_and_names_keep_the_identity_of_a_folder(original: Path, finished: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(original, tmp_path / "elsewhere"))
    (copy / "README.md").write_text("not loaded")
    assert prepare(str(copy), None, finished).source.model == "small"
