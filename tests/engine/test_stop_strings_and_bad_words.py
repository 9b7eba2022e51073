"""Stop strings and bad words in whole requests: parts of the text that a request generates without them."""

import random
from dataclasses import replace

import torch
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint

CPU = torch.device("cpu")


def request_of(checkpoint: Checkpoint, **values: object) -> GenerationRequest:
    defaults = {"prompt": "", "prompt_tokens": checkpoint.tokenizer.encode("def"), "max_tokens": 24}
    return GenerationRequest(**{**defaults, **values})  # type: ignore[arg-type]  # values are fields


def part_of(text: str, randomness: random.Random) -> str:
    start = randomness.randrange(len(text))
    return text[start : start + randomness.randint(1, 8)]


def test_a_stop_string_ends_a_greedy_text_exactly_before_it(fp32: Checkpoint) -> None:
    randomness = random.Random(12)
    engine = engine_of(fp32)
    prompts = [random_prompt(fp32.tokenizer, range(3, 30), randomness)[1] for _ in range(8)]
    free = [request_of(fp32, prompt_tokens=prompt) for prompt in prompts]
    texts = [completion.text for completion in completions(engine, free)]
    words = [part_of(text, randomness) for text in texts]
    stopped = [
        replace(request, stop_words=(b"\x00never", word.encode())) for request, word in zip(free, words, strict=True)
    ]
    for completion, text, word in zip(completions(engine, stopped), texts, words, strict=True):
        assert completion.text == text[: text.find(word)]
        assert completion.finish_reason == "stop"
        assert completion.num_output_tokens <= 24


def test_bad_words_never_appear(fp32: Checkpoint) -> None:
    randomness = random.Random(40)
    engine = engine_of(fp32)
    for _ in range(2):
        free = [
            request_of(
                fp32, prompt_tokens=random_prompt(fp32.tokenizer, range(2, 20), randomness)[1], min_tokens=24,
                temperature=randomness.choice((0.7, 1.2, 2.0)), seed=randomness.getrandbits(64),
            )
            for _ in range(8)
        ]  # fmt: skip
        banned = []
        for request, completion in zip(free, completions(engine, free), strict=True):
            words = {part_of(completion.text, randomness) for _ in range(randomness.randint(1, 4))}
            # U+FFFD stands for invalid UTF-8, which can't be banned.
            words = {word for word in words if "\ufffd" not in word} or {"e"}
            banned.append(replace(request, bad_words=tuple(word.encode() for word in words)))
        for request, completion in zip(banned, completions(engine, banned), strict=True):
            for word in request.bad_words:
                assert word.decode() not in completion.text, request
            assert completion.num_output_tokens == 24


def test_bad_words_do_not_change_a_neighbour(fp32: Checkpoint) -> None:
    plain = request_of(fp32, temperature=1.0, seed=3)
    banned = replace(plain, bad_words=(b" ", b"a", b"e", b"\n"))
    engine = engine_of(fp32, 2)
    assert completions(engine, [banned, plain])[1] == completions(engine, [plain])[0]


def test_with_every_byte_banned_the_text_is_empty(fp32: Checkpoint) -> None:
    every_byte = tuple(bytes([byte]) for byte in range(256))
    request = request_of(fp32, max_tokens=8, temperature=1.0, bad_words=every_byte)
    assert completions(engine_of(fp32, 1), [request])[0].text == ""
