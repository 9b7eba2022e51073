"""Bad words: the string never appears, however it would be split into tokens."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampler import Sampler
from llama_engine.text.bad_words import BadWords
from llama_engine.text.vocabulary import Vocabulary

CPU = torch.device("cpu")


def _banned(words: list[bytes], vocabulary: Vocabulary, pieces: Sequence[bytes]) -> list[int]:
    """The ids that must not follow a text of these pieces."""
    rules = BadWords(words, vocabulary, CPU)
    for piece in pieces:
        rules.append(piece)
    return sorted({*rules.always.tolist(), *rules.completing().tolist()})


def test_a_token_is_banned_without_need_or_missed() -> None:
    """Against the definition, on a small alphabet in which words overlap with themselves."""
    randomness = random.Random(5)
    pieces = [b"", *sorted({bytes(randomness.choices(b"ab", k=randomness.randint(1, 4))) for _ in range(200)})]
    vocabulary = Vocabulary(pieces)
    for _ in range(2000):
        words = [bytes(randomness.choices(b"ab", k=randomness.randint(1, 6))) for _ in range(2)]
        text = bytes(randomness.choices(b"ab", k=randomness.randint(0, 8)))
        if any(word in text for word in words):
            continue
        cut = randomness.randint(0, len(text))
        expected = [index for index, piece in enumerate(pieces) if any(word in text + piece for word in words)]
        assert _banned(words, vocabulary, [text[:cut], b"", text[cut:]]) == expected, (words, text)


def test_a_bad_word_appears(fp32: Checkpoint) -> None:
    """What a row wrote without bad words, in parts of random length, is what it must not write with them."""
    randomness = random.Random(40)
    engine = engine_of(fp32)
    for _ in range(4):
        free = [
            GenerationRequest(
                prompt="", prompt_tokens=random_prompt(fp32.tokenizer, range(2, 20), randomness)[1], max_tokens=24,
                min_tokens=24, temperature=randomness.choice((0.7, 1.2, 2.0)), seed=randomness.getrandbits(64),
            )
            for _ in range(8)
        ]  # fmt: skip
        banned = []
        for request, completion in zip(free, completions(engine, free), strict=True):
            words = []
            for _ in range(randomness.randint(1, 4)):
                start = randomness.randrange(len(completion.text))
                words.append(completion.text[start : start + randomness.randint(1, 8)])
            # U+FFFD stands for bytes that are no text, and can't be banned.
            words = [word for word in words if "�" not in word] or ["e"]
            banned.append(replace(request, bad_words=tuple(word.encode() for word in words)))
        for request, completion in zip(banned, completions(engine, banned), strict=True):
            for word in request.bad_words:
                assert word.decode() not in completion.text, request
            assert completion.num_output_tokens == 24


def test_a_ban_changes_a_neighbour(fp32: Checkpoint) -> None:
    plain = GenerationRequest(
        prompt="", prompt_tokens=fp32.tokenizer.encode("def"), max_tokens=12, temperature=1.0, seed=3
    )
    banned = replace(plain, bad_words=(b" ", b"a", b"e", b"\n"))
    engine = engine_of(fp32, 2)
    assert completions(engine, [banned, plain])[1] == completions(engine, [plain])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_on_everything_fails_the_row_or_never_ends_it(temperature: float) -> None:
    sampler = Sampler(2, 6, (4,), CPU)
    request = GenerationRequest(prompt="", prompt_tokens=(1,), max_tokens=9, min_tokens=5, temperature=temperature)
    sampler.admit([request, request])
    logits = torch.tensor([[3.0, 1.0, 2.0, 5.0, -9.0, 0.0]]).expand(2, -1)
    everything = BadWords([b"a"], Vocabulary([b"a1", b"a2", b"2a", b"aa", b"", b"a"]), CPU)
    ended, free = sampler.sample(logits, 0, [0, 0], [everything, None]).tolist()
    assert ended == 4
    assert free != 4


def test_a_ban_on_every_byte_lets_text_through(fp32: Checkpoint) -> None:
    every_byte = tuple(bytes([byte]) for byte in range(256))
    request = GenerationRequest(
        prompt="", prompt_tokens=fp32.tokenizer.encode("def"), max_tokens=8, temperature=1.0, bad_words=every_byte
    )
    (completion,) = completions(engine_of(fp32, 1), [request])
    assert completion.text == ""


def test_a_bad_word_longer_than_any_text_is_banned_in_part() -> None:
    vocabulary = Vocabulary([b"", b"a", b"b", b"aab"])
    assert _banned([b"a" * 100_000 + b"b"], vocabulary, [b"a"] * 50) == []
    assert _banned([b"a" * 1000 + b"b"], vocabulary, [b"a"] * 999) == [3]
    assert _banned([b"a" * 1000 + b"b"], vocabulary, [b"a"] * 1200) == [2, 3]
