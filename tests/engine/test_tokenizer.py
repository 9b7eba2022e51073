"""Tokens to text and back, compared with transformers' decode, for byte-level and SentencePiece-like tokenizers."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from engine.engines import EMBEDDED
from llama_engine.checkpoint.config import read_config
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer, Vocabulary, read_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = ["▁def", "▁the", "▁class", "ing", "▁é", "▁", "▁▁▁▁", "\n", "lambda", *"()abcdeö🙂"]
CHARACTERS = ("🙂", "☂️", "e\u0301", "ñ", "한", "\u0000", "𝔘")


def wrapped(backend: FastTokenizer, **special_tokens: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens)


def llama2_like() -> PreTrainedTokenizerFast:
    """Ids: <unk> <s> </s>, 256 bytes, the words, and <tool>, an added token that is text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = FastTokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def text_of(vocabulary: Vocabulary, tokens: Iterable[int]) -> str:
    return b"".join(vocabulary.token_bytes[token] for token in tokens).decode(errors="replace")


def test_random_tokens_decode_as_by_transformers(tokenizer: Tokenizer) -> None:
    randomness = random.Random(8)
    size = len(tokenizer.vocabulary.token_bytes)
    for _ in range(500):
        tokens = [randomness.randrange(size) for _ in range(randomness.randint(1, 30))]
        expected = tokenizer.pretrained.decode(tokens, skip_special_tokens=True)
        assert text_of(tokenizer.vocabulary, tokens) == expected, tokens
    # Special tokens have no text.
    assert len(tokenizer.pretrained.all_special_ids) >= 3
    assert text_of(tokenizer.vocabulary, tokenizer.pretrained.all_special_ids) == ""


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizer", None])
@pytest.mark.parametrize("byte_level", [False, True])
def test_a_tokenizer_encodes_as_transformers_does(named: str | None, byte_level: bool, tmp_path: Path) -> None:
    saved = AutoTokenizer.from_pretrained(EMBEDDED) if byte_level else llama2_like()
    saved.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps({**values, "tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3072}))
    read, expected = read_tokenizer(tmp_path, read_config(tmp_path, "it")), AutoTokenizer.from_pretrained(tmp_path)
    assert type(read.pretrained) is type(expected)
    assert read.encode("def the class <tool> ö") == tuple(expected("def the class <tool> ö")["input_ids"])
    assert read.pretrained.init_kwargs == expected.init_kwargs


def test_a_prompt_beyond_the_tokenizers_limit_is_not_cut(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" def" * 4000)) > tokenizer.pretrained.model_max_length


def test_sentencepiece_tokens_decode_as_by_transformers() -> None:
    """Except for two intended differences.

    The space that decode() strips at the very start is kept, because a completion continues its prompt. And invalid
    UTF-8 becomes another number of U+FFFD, so all characters here are complete.
    """
    tokenizer = llama2_like()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer))
    randomness, first_word = random.Random(10), 3 + 256
    for _ in range(300):
        tokens: list[int] = []
        for _ in range(randomness.randint(1, 20)):
            bytes_of_one = [3 + byte for byte in randomness.choice(CHARACTERS).encode()]
            special, word = randomness.randrange(3), first_word + randomness.randrange(len(WORDS) + 1)
            tokens += randomness.choices((bytes_of_one, [special], [word]), (2, 1, 7))[0]
        ours, theirs = text_of(vocabulary, tokens), tokenizer.decode(tokens, skip_special_tokens=True)
        assert ours.removeprefix(" ") == theirs, tokens
    assert text_of(vocabulary, [first_word + WORDS.index("▁def")]) == " def"


def test_ids_that_the_tokenizer_lacks_have_no_text(tokenizer: Tokenizer) -> None:
    known = tokenizer.vocabulary.token_bytes
    assert Vocabulary.from_tokenizer(tokenizer.pretrained, len(known) + 64).token_bytes == known + [b""] * 64
    assert Vocabulary.from_tokenizer(tokenizer.pretrained, 1000).token_bytes == known[:1000]


def test_a_byte_level_token_outside_the_alphabet_stands_for_itself() -> None:
    backend = FastTokenizer(models.BPE({"a": 0, "Ġb": 1, "two words": 2, "日": 3}, []))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(wrapped(backend), 4)
    assert text_of(vocabulary, range(4)) == wrapped(backend).decode([0, 1, 2, 3]) == "a btwo words日"


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    backend = FastTokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decodes by \['WordPiece'\]: neither byte-level nor SentencePiece"):
        Vocabulary.from_tokenizer(wrapped(backend), 1)


def test_template_files_are_known_by_name_and_come_before_the_config(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((EMBEDDED / name).read_bytes())
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
    (tmp_path / "chat_template.jinja").write_text("b")
    assert read_tokenizer(tmp_path, read_config(tmp_path, "it")).chat_templates == {"default": "b", "rag": "c"}
