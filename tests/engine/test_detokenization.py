"""Tokens to text: what the tokenizer's own decode would give, however characters are split over tokens."""

import random
from collections.abc import Iterable

import pytest
from engine.prompts import reference_text
from engine.small_tokenizers import WORDS, llama2_like, wrapped
from engine.splitting import splits
from llama_engine.errors import CheckpointError
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Tokenizer
from llama_engine.text.vocabulary import Vocabulary
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

CHARACTERS = ("🙂", "☂️", "e\u0301", "ñ", "한", "\u0000", "𝔘")


def _text(vocabulary: Vocabulary, tokens: Iterable[int]) -> str:
    transcript = StopChecker(min_tokens=0, max_tokens=10**9, stop_words=(), end_tokens=())
    for token in tokens:
        transcript.add(token, vocabulary.token_bytes[token])
    return transcript.text


@pytest.mark.parametrize("character", CHARACTERS)
def test_a_character_split_over_tokens_comes_out_broken(character: str) -> None:
    for pieces in splits(f"a{character}".encode()):
        transcript = StopChecker(min_tokens=0, max_tokens=99, stop_words=(), end_tokens=())
        for piece in pieces:
            transcript.add(1, piece)
        assert transcript.text.endswith(character)
        assert "�" not in transcript.text


def test_half_a_character_at_the_end_is_an_error_or_eats_what_stands_before() -> None:
    for broken in ("🙂".encode()[:3], b"\xff", "é".encode()[:1]):
        transcript = StopChecker(min_tokens=0, max_tokens=99, stop_words=(), end_tokens=())
        transcript.add(1, b"ok")
        transcript.add(1, broken)
        assert transcript.text.rstrip("�") == "ok"
        transcript.add(1, b"go")
        assert transcript.text.replace("�", "") == "okgo"


def test_random_tokens_decode_to_another_text_than_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    randomness = random.Random(8)
    size = len(tokenizer.vocabulary.token_bytes)
    for _ in range(3000):
        tokens = [randomness.randrange(size) for _ in range(randomness.randint(1, 30))]
        assert _text(tokenizer.vocabulary, tokens) == tokenizer.pretrained.decode(tokens, skip_special_tokens=True), (
            tokens
        )


def test_a_text_does_not_survive_the_way_to_tokens_and_back(tokenizer: Tokenizer) -> None:
    randomness = random.Random(9)
    for _ in range(300):
        start = randomness.randrange(len(reference_text()))
        text = reference_text()[start : start + 80] + "".join(randomness.choices(CHARACTERS, k=3))
        assert _text(tokenizer.vocabulary, tokenizer.encode(text)) == text


def test_special_tokens_show_in_the_text(tokenizer: Tokenizer) -> None:
    special = tokenizer.pretrained.all_special_ids
    assert len(special) >= 3
    assert _text(tokenizer.vocabulary, special) == ""


def test_a_prompt_longer_than_the_tokenizers_own_limit_warns_or_is_cut(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" def" * 2000)) > tokenizer.pretrained.model_max_length


def test_sentencepiece_tokens_decode_to_another_text_than_by_the_tokenizer() -> None:
    """Two differences are intended, and left out here.

    The space that decode() strips at the very start is kept, because a completion goes on where its prompt ended. And
    bytes that are no UTF-8 become U+FFFD in other numbers, so all characters are whole.
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
        ours, theirs = _text(vocabulary, tokens), tokenizer.decode(tokens, skip_special_tokens=True)
        assert ours.removeprefix(" ") == theirs, tokens
    assert _text(vocabulary, [first_word]) == " def"


def test_ids_beyond_the_tokenizer_or_beyond_the_model_are_an_error(tokenizer: Tokenizer) -> None:
    padded = Vocabulary.from_tokenizer(tokenizer.pretrained, len(tokenizer.vocabulary.token_bytes) + 64)
    assert padded.token_bytes == tokenizer.vocabulary.token_bytes + [b""] * 64
    cut = Vocabulary.from_tokenizer(tokenizer.pretrained, 1000)
    assert cut.token_bytes == tokenizer.vocabulary.token_bytes[:1000]


def test_a_byte_level_token_outside_the_alphabet_stops_the_server() -> None:
    backend = FastTokenizer(models.BPE({"a": 0, "Ġb": 1, "two words": 2, "日": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrapped(backend)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 4)
    assert _text(vocabulary, [0, 1, 2, 3]) == tokenizer.decode([0, 1, 2, 3]) == "a btwo words日"


def test_a_tokenizer_of_another_kind_is_taken_for_ours() -> None:
    backend = FastTokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decodes by \['WordPiece'\]: neither byte-level nor SentencePiece"):
        Vocabulary.from_tokenizer(wrapped(backend), 1)


def test_looking_pieces_up_by_their_start_misses_some(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary([*tokenizer.vocabulary.token_bytes, b"\xff", b"\xff\xff", b"a\xff", b"a\xff\xff", b"b"])
    starts = {piece[:length] for piece in vocabulary.token_bytes for length in range(1, 4)} - {b""}
    for start in [*sorted(starts)[::17], b"\xff", b"\xff\xff", b"a\xff", b"\x00absent"]:
        expected = [index for index, piece in enumerate(vocabulary.token_bytes) if piece.startswith(start)]
        assert sorted(vocabulary.starting_with(start)) == expected, start
