"""The pooling of a checkpoint, from sentence-transformers' files, GGUF's metadata or the setting; base models."""

import json
import shutil
from pathlib import Path

import pytest
from engine.engines import engine_of, load, run
from engine.families import save_base_model, save_family
from engine.gguf_files import small_model, write_model
from engine.test_embeddings import by_transformers, embedding_request, embeddings_of
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.pooling import Pooling, choose_pooling
from llama_engine.errors import CheckpointError
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

TRANSFORMER, POOLING, NORMALIZE, DENSE = (
    f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize", "Dense")
)
NEWER = ("sentence_transformers.base.modules.transformer.Transformer",
         "sentence_transformers.sentence_transformer.modules.pooling.Pooling")  # fmt: skip


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("pooling") / "qwen3", "qwen3")


@pytest.fixture
def saved(qwen3: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(qwen3, tmp_path / "qwen3"))


def _save_modules(folder: Path, kinds: tuple[str, ...], pooling: dict[str, object]) -> None:
    paths = ("", "1_Pooling", "2_Normalize", "3")
    modules = [{"idx": index, "path": path, "type": kind} for index, (path, kind) in enumerate(zip(paths, kinds))]  # noqa: B905 - fewer kinds
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _pooling(folder: Path, setting: str = "auto") -> Pooling | None:
    return choose_pooling(setting, read_checkpoint_headers(folder, "it"))


@pytest.mark.parametrize(
    ("kinds", "config", "expected"),
    [
        ((TRANSFORMER, POOLING, NORMALIZE), {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
         Pooling("last")),
        ((TRANSFORMER, POOLING), {"pooling_mode_mean_tokens": True, "include_prompt": False}, Pooling("mean", False)),
        (NEWER, {"embedding_dimension": 64, "pooling_mode": "lasttoken"}, Pooling("last", False)),
        (NEWER, {"pooling_mode": ["mean"]}, Pooling("mean", False)),
    ],
)  # fmt: skip
def test_pooling_is_read_from_the_files_of_sentence_transformers(
    saved: Path, kinds: tuple[str, ...], config: dict[str, object], expected: Pooling
) -> None:
    _save_modules(saved, kinds, config)
    assert _pooling(saved) == expected


@pytest.mark.parametrize(
    ("kinds", "config", "message"),
    [
        ((TRANSFORMER, POOLING), {"pooling_mode_cls_token": True}, "pooling_mode is 'cls_token'; this engine serves "),
        ((TRANSFORMER, POOLING), {"pooling_mode": ["mean", "max"]}, "pooling_mode is 'mean, max'; this engine serves "),
        ((TRANSFORMER, POOLING), {"pooling_mode_mean_tokens": "false"}, "pooling_mode_mean_tokens is 'false'; it must"),
        ((TRANSFORMER, POOLING), {"pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens is false; one of "),
        ((TRANSFORMER, POOLING, DENSE, NORMALIZE), {}, "its modules are 'Transformer, Pooling, Dense, Normalize'; "),
    ],
)
def test_other_pooling_is_refused_by_name_unless_the_setting_says_which(
    saved: Path, kinds: tuple[str, ...], config: dict[str, object], message: str
) -> None:
    _save_modules(saved, kinds, config)
    with pytest.raises(CheckpointError) as refused:
        _pooling(saved)
    assert message in str(refused.value)
    assert str(refused.value).endswith("; the setting pooling, last, mean or off, overrides it")
    assert _pooling(saved, "last") == Pooling("last")
    assert _pooling(saved, "off") is None


def test_a_pooling_module_in_another_folder_is_refused(saved: Path) -> None:
    _save_modules(saved, NEWER, {})
    text = (saved / "modules.json").read_text()
    (saved / "modules.json").write_text(text.replace("1_Pooling", ".."))
    with pytest.raises(CheckpointError, match=r"the path of Pooling is '\.\.'; it must be 1_Pooling; the setting"):
        _pooling(saved)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modality_config": {"text": {}, "message": {}}}, "modality_config has 'message': its texts are chats"),
        ({"modality_config": 5}, "modality_config is 5; it must be an object"),
        ({"do_lower_case": True}, "do_lower_case is True; this engine embeds a text as it is"),
    ],
)
def test_files_that_change_texts_are_refused(saved: Path, config: dict[str, object], message: str) -> None:
    _save_modules(saved, NEWER, {"pooling_mode": "mean"})
    (saved / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        _pooling(saved)


def test_a_checkpoint_without_such_files_has_none(qwen3: Path) -> None:
    assert _pooling(qwen3) is None


def test_pooling_is_read_from_gguf(tmp_path: Path) -> None:
    for number, expected in ((0, None), (1, Pooling("mean")), (3, Pooling("last"))):
        path = write_model(tmp_path / "it.gguf", small_model("llama"), metadata={"llama.pooling_type": number})
        assert _pooling(path) == expected
    write_model(path, small_model("llama"), metadata={"llama.pooling_type": 4})
    with pytest.raises(CheckpointError, match="pooling_type is 4; this engine serves 1, mean, and 3, last"):
        _pooling(path)


def test_a_checkpoint_of_qwen3_embeddings_form_is_served(saved: Path) -> None:
    """Tied embeddings, names without `model.`, no head, an end token that the tokenizer appends."""
    _save_modules(saved, (TRANSFORMER, POOLING, NORMALIZE), {"pooling_mode_lasttoken": True})
    tensors = load_file(saved / "model.safetensors")
    save_file({name.removeprefix("model."): tensors[name] for name in tensors}, saved / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", None, [("</s>", 2)])
    tokenizer.save_pretrained(saved)
    checkpoint = load("none", model=str(saved))
    tokens = checkpoint.tokenizer.encode("Return a list")
    assert tokens[-1] == 2
    engine = engine_of(checkpoint)
    result = embeddings_of(run(engine, [engine.builder.build(embedding_request(tokens))]))
    model = AutoModel.from_pretrained(saved)
    assert (result - by_transformers(model, [tokens], Pooling("last"))).abs().max() <= 1e-5
    assert json.loads(engine.description.document)["tasks"] == ["generate", "embed"]


def test_a_base_model_serves_embeddings_alone(tmp_path: Path) -> None:
    folder = save_base_model(tmp_path / "base", save_family(tmp_path / "mistral", "mistral"))
    with pytest.raises(CheckpointError, match=r"has no output head .* alone: set pooling to last or mean"):
        load("none", model=str(folder))
    with pytest.raises(CheckpointError, match=r"has no output head \(lm_head\); nf4 and an int8_threshold need"):
        load("nf4", model=str(folder), pooling="mean")
    checkpoint = load("none", model=str(folder), pooling="mean")
    engine = engine_of(checkpoint)
    tokens = checkpoint.tokenizer.encode("Return a list")
    result = embeddings_of(run(engine, [engine.builder.build(embedding_request(tokens))]))
    assert (result - by_transformers(AutoModel.from_pretrained(folder), [tokens], Pooling("mean"))).abs().max() <= 1e-5
    assert json.loads(engine.description.document)["tasks"] == ["embed"]


def test_a_base_model_of_another_class_is_refused_by_name(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text()) | {"architectures": ["Qwen3EncoderModel"]}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="architectures has 'Qwen3EncoderModel', which this engine doesn't know"):
        load("none", model=str(saved), pooling="mean")


def test_a_checkpoint_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "mistral", "mistral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .* lm_head\.weight"):
        load("none", model=str(folder), pooling="mean")
