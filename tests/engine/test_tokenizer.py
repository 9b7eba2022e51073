"""Tokens to text and back, compared with transformers' decode, for byte-level and SentencePiece-like tokenizers."""

import random
from collections.abc import Iterable

import pytest
from engine.prompts import reference_text
from engine.small_tokenizers import WORDS, llama2_like, wrapped
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer, Vocabulary
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

CHARACTERS = ("🙂", "☂️", "e\u0301", "ñ", "한", "\u0000", "𝔘")


def text_of(vocabulary: Vocabulary, tokens: Iterable[int]) -> str:
    return b"".join(vocabulary.token_bytes[token] for token in tokens).decode(errors="replace")


def test_random_tokens_decode_as_by_transformers(tokenizer: Tokenizer) -> None:
    randomness = random.Random(8)
    size = len(tokenizer.vocabulary.token_bytes)
    for _ in range(3000):
        tokens = [randomness.randrange(size) for _ in range(randomness.randint(1, 30))]
        expected = tokenizer.pretrained.decode(tokens, skip_special_tokens=True)
        assert text_of(tokenizer.vocabulary, tokens) == expected, tokens


def test_a_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    randomness = random.Random(9)
    for _ in range(300):
        start = randomness.randrange(len(reference_text()))
        text = reference_text()[start : start + 80] + "".join(randomness.choices(CHARACTERS, k=3))
        assert text_of(tokenizer.vocabulary, tokenizer.encode(text)) == text


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    special = tokenizer.pretrained.all_special_ids
    assert len(special) >= 3
    assert text_of(tokenizer.vocabulary, special) == ""


def test_a_prompt_that_contains_the_bos_token_gets_no_second_one(tokenizer: Tokenizer) -> None:
    bos = tokenizer.pretrained.bos_token
    assert isinstance(bos, str)
    assert tokenizer.encode(f"{bos}def") == tokenizer.encode("def")


def test_a_prompt_beyond_the_tokenizers_own_limit_is_neither_cut_nor_warned_about(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" def" * 2000)) > tokenizer.pretrained.model_max_length


def test_sentencepiece_tokens_decode_as_by_transformers() -> None:
    """Except for two intended differences.

    The space that decode() strips at the very start is kept, because a completion continues its prompt. And invalid
    UTF-8 becomes another number of U+FFFD, so all characters here are complete.
    """
    tokenizer = llama2_like()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer))
    first_word = 3 + 256
    randomness = random.Random(10)
    for _ in range(2000):
        tokens: list[int] = []
        for _ in range(randomness.randint(1, 20)):
            if randomness.random() < 0.2:
                tokens += [3 + byte for byte in randomness.choice(CHARACTERS).encode()]
            elif randomness.random() < 0.1:
                tokens.append(randomness.randrange(3))
            else:
                tokens.append(first_word + randomness.randrange(len(WORDS) + 1))
        ours, theirs = text_of(vocabulary, tokens), tokenizer.decode(tokens, skip_special_tokens=True)
        assert ours.removeprefix(" ") == theirs, tokens
    assert text_of(vocabulary, [first_word]) == " def"


def test_ids_that_the_tokenizer_lacks_have_no_text_and_ids_that_the_model_lacks_are_dropped(
    tokenizer: Tokenizer,
) -> None:
    known = tokenizer.vocabulary.token_bytes
    padded = Vocabulary.from_tokenizer(tokenizer.pretrained, len(known) + 64)
    assert padded.token_bytes == known + [b""] * 64
    assert Vocabulary.from_tokenizer(tokenizer.pretrained, 1000).token_bytes == known[:1000]


def test_a_byte_level_token_outside_the_alphabet_stands_for_itself() -> None:
    backend = FastTokenizer(models.BPE({"a": 0, "Ġb": 1, "two words": 2, "日": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrapped(backend)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 4)
    assert text_of(vocabulary, [0, 1, 2, 3]) == tokenizer.decode([0, 1, 2, 3]) == "a btwo words日"


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    backend = FastTokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decodes by \['WordPiece'\]: neither byte-level nor SentencePiece"):
        Vocabulary.from_tokenizer(wrapped(backend), 1)


def test_tokens_are_found_by_their_prefix(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary([*tokenizer.vocabulary.token_bytes, b"\xff", b"\xff\xff", b"a\xff", b"a\xff\xff", b"b"])
    prefixes = {token[:length] for token in vocabulary.token_bytes for length in range(1, 4)} - {b""}
    for prefix in [*sorted(prefixes)[::17], b"\xff", b"\xff\xff", b"a\xff", b"\x00absent"]:
        expected = [index for index, token in enumerate(vocabulary.token_bytes) if token.startswith(prefix)]
        assert sorted(vocabulary.starting_with(prefix)) == expected, prefix
