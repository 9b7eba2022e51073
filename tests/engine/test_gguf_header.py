"""GGUF files as files: folders, shards, tokenizers that aren't known, and contents that a file can't have."""

import struct
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from engine.gguf_files import small_model, write_model
from llama_engine.checkpoint.gguf.config import read_gguf_config
from llama_engine.checkpoint.gguf.header import find_gguf, read_gguf
from llama_engine.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "ab", "▁ab", "=", "a="]
ALPHABET = sorted({chr(byte) for byte in range(33, 127)} | {"Ġ"})
BYTE_LEVEL = [*ALPHABET, "12", "345", "<s>", "<|im_end|>"]


def _refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_gguf(path)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300
    return message.removeprefix(f"can't load {path}: ")


def _shards(folder: Path, count: int) -> list[Path]:
    """A Llama's tensors in turn in files, as gguf-split writes them."""
    whole = gguf.GGUFReader(write_model(folder / "whole", small_model("llama")))
    paths = [folder / f"it-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in whole.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _with_tokenizer(folder: Path, model: str, tokens: list[str], **metadata: object) -> Path:
    kinds = [3 if token.startswith("<") and not token.startswith("<0x") else 1 for token in tokens]
    values: dict[str, object] = {
        "model": model, "tokens": tokens, "token_type": kinds, "bos_token_id": tokens.index("<s>"), **metadata,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return write_model(folder / "it.gguf", small_model("llama", num_hidden_layers=1), metadata=metadata)


def _tokenizer(path: Path) -> Tokenizer:
    file = read_gguf(path)
    return read_gguf_tokenizer(file, read_gguf_config(file))


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.pretrained.convert_ids_to_tokens(list(tokenizer.encode(text))))


def test_several_files_in_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(a\.gguf, b\.gguf\); set model to one of them"):
        find_gguf(tmp_path)


def test_safetensors_come_before_a_file_beside_them(tmp_path: Path) -> None:
    for name in ("it.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) is None


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    paths = _shards(tmp_path, 3)
    assert find_gguf(tmp_path) == paths[0]
    assert read_gguf(paths[2]).tensors.keys() == read_gguf(tmp_path / "whole").tensors.keys()


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    paths = _shards(tmp_path, 3)
    paths[1].unlink()
    assert _refusal(paths[0]) == f"1 of 3 shards are missing, first {paths[1].name}"


def test_shards_in_another_order_are_refused(tmp_path: Path) -> None:
    paths = _shards(tmp_path, 2)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: it doesn't say that it is shard 2 of 2"):
        read_gguf(paths[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header needs 4 bytes at 0 and ends at 0"),
        (b"ggml" * 9, "it doesn't begin with GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "it is of version 1; this engine reads 2 and 3"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "its header needs 8 bytes at 24 and ends at 24"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62), "its header needs 4611686018427387904 bytes at 32"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"a", 13), "it has a value of type 13, which"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 8, 1 << 50), "its header needs 8 bytes at 49"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"a", 9), "'a' has 9 dimensions, not 1 to 4"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"a", 1, 32, 77, 0), "'a' is of type 77, which"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"a", 1, 33, 8, 0), "'a' has shape (33,), not whole"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"a", 1, 8, 0, 1 << 63), "it has 57 bytes, and 'a' ends"),
    ],
)
def test_an_invalid_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "it.gguf").write_bytes(content)
    assert _refusal(tmp_path / "it.gguf").startswith(message)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    path = _with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, merges=["1 2"], pre="of tomorrow")
    with pytest.raises(CheckpointError, match=r"pre is 'of tomorrow'.*put the model's tokenizer\.json and tokenizer_"):
        _tokenizer(path)


def test_a_tokenizer_json_beside_the_file_is_served(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, merges=["1 2"], pre="of tomorrow")
    tokenizer.pretrained.save_pretrained(tmp_path)
    assert _tokenizer(path).encode("import os") == tokenizer.encode("import os")


def test_digits_are_split_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    merges = ["1 2", "3 4", "34 5"]
    tokens = [*BYTE_LEVEL, "34"]
    for pre, pieces in {"gpt-2": ["12", "345"], "smollm": ["1", "2", "3", "4", "5"]}.items():
        path = _with_tokenizer(tmp_path, "gpt2", tokens, merges=merges, pre=pre)
        assert _pieces(_tokenizer(path), "12345") == pieces


@pytest.mark.parametrize("pre", [None, "default"])
def test_without_a_pre_tokenizer_texts_are_split_as_by_llama_cpp(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [*BYTE_LEVEL, "34", "a=", "Ġ="]
    path = _with_tokenizer(tmp_path, "gpt2", tokens, merges=["1 2", "3 4", "34 5", "a =", "Ġ ="], pre=pre)
    # Punctuation such as = is split from the space before it, and digits are in threes from the left.
    assert _pieces(_tokenizer(path), "a= =123456") == ["a", "=", "Ġ", "=", "12", "3", "4", "5", "6"]
    assert ("it has no tokenizer.ggml.pre: texts are split as by llama.cpp's default" in caplog.text) == (pre is None)


def test_named_chat_templates_of_a_file_are_known_by_name(tmp_path: Path) -> None:
    templates = {"chat_template": "a", "chat_template.tool_use": "b"}
    path = _with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, merges=["1 2"], pre="gpt-2")
    file = read_gguf(path)
    metadata = {**file.metadata, **{f"tokenizer.{name}": text for name, text in templates.items()}}
    read = read_gguf_tokenizer(replace(file, metadata=metadata), read_gguf_config(file))
    assert read.chat_templates == {"default": "a", "tool_use": "b"}


def test_a_llama_3_takes_whole_words_and_begins_with_bos(tmp_path: Path) -> None:
    path = _with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, merges=["1 2"], pre="llama-bpe")
    assert _pieces(_tokenizer(path), "345") == ["<s>", "345"]


@pytest.mark.parametrize(("prefix", "pieces"), [(True, ["<s>", "▁ab"]), (False, ["<s>", "ab"])])
def test_sentencepiece_adds_the_space_that_the_file_says(prefix: bool, pieces: list[str], tmp_path: Path) -> None:
    scores = [-float(number) for number in range(len(SENTENCEPIECE))]
    # Converters write a pre-tokenizer for it, too, which would split "a=".
    values: dict[str, object] = {"scores": scores, "eos_token_id": 2, "unknown_token_id": 0, "pre": "default"}
    read = _tokenizer(_with_tokenizer(tmp_path, "llama", SENTENCEPIECE, add_space_prefix=prefix, **values))
    assert _pieces(read, "ab") == pieces
    assert _pieces(read, "ba=")[-1] == "a="
    assert read.pretrained.decode(list(read.encode_inside("ab"))) == "ab"


def test_no_token_is_beyond_the_vocabulary(tmp_path: Path) -> None:
    # transformers adds GPT-2's.
    read = _tokenizer(_with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, merges=["1 2"], pre="gpt-2"))
    assert max(read.encode("<|endoftext|> 12")) < len(BYTE_LEVEL)


def test_known_end_tokens_end_a_text_too(tmp_path: Path) -> None:
    path = _with_tokenizer(tmp_path, "gpt2", BYTE_LEVEL, pre="gpt-2", eos_token_id=1, eot_token_id=2)
    assert read_gguf_config(read_gguf(path)).eos_token_id == [1, 2, BYTE_LEVEL.index("<|im_end|>")]
