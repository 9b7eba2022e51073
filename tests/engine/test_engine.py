"""The engine at its limits: values that are not finite, the shortest sequences and caches; and what ends a text."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
from engine.engines import alone, completions, engine_of, spoil_cache
from engine.forward_passes import ForwardPass, watching
from engine.prompts import random_prompt, request_of, requests_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.errors import GenerationError
from llama_engine.kernels import reference
from llama_engine.kernels.selection import DecodeAttention, Kernels
from llama_engine.model.loader import Checkpoint


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Engine:
    return engine_of(checkpoint, 4)


@contextmanager
def _spoiling(engine: Engine, number: int, slot: int) -> Iterator[None]:
    """Spoil the hidden state of a row, and the KV slot of that number, after an engine's pass of this number."""
    passes = count()

    def spoiled(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: object) -> torch.Tensor:
            hidden = original(*arguments)
            if next(passes) == number:
                hidden[slot] = torch.nan if number else torch.inf
                spoil_cache(engine, slot)
            return hidden

        return run

    runner = type(engine._model)
    with ExitStack() as replaced:
        for method in ("prefill", "decode"):
            replaced.enter_context(patch.object(runner, method, spoiled(getattr(runner, method))))
        yield


@pytest.mark.parametrize(("number", "slot"), [(0, 0), (2, 1)], ids=["prefill", "decode step"])
def test_a_sequence_that_is_not_finite_fails_alone_and_spoils_no_later_one_in_its_slot(
    fp32: Checkpoint, engine: Engine, number: int, slot: int
) -> None:
    requests = requests_of(fp32, 4)
    expected = completions(engine, requests)
    with _spoiling(engine, number, slot):
        results = engine.generate(requests)
    failed = results.pop(slot)
    assert isinstance(failed, GenerationError)
    assert str(failed) == "the model's logits for this request were not finite"
    assert results == [*expected[:slot], *expected[slot + 1 :]]
    assert engine.generate(requests) == expected


def test_no_requests_have_no_results_and_an_empty_step_does_nothing(engine: Engine) -> None:
    assert engine.generate([]) == []
    assert engine.step() == StepResult()


def test_a_sequence_of_one_token_needs_no_decode_step(fp32: Checkpoint, engine: Engine) -> None:
    passes: list[int] = []
    with watching(lambda one: passes.append(one.number)):
        (completion,) = completions(engine, [request_of(fp32, 1, max_tokens=1)])
    assert (completion.num_output_tokens, completion.finish_reason, passes) == (1, "length", [0])


def test_warming_up_fails_on_a_model_whose_decode_step_fails(fp32: Checkpoint, engine: Engine) -> None:
    engine.warm_up()

    def fail(one: ForwardPass) -> None:
        if one.number == 1:
            raise RuntimeError("no kernel")

    with watching(fail), pytest.raises(GenerationError):
        engine.warm_up()


@pytest.mark.parametrize(("attention", "slots"), [(None, 1), (reference.decode_attention, 20)])
def test_the_longest_prompt_of_a_gpus_warm_up_changes_no_token(
    fp32: Checkpoint, attention: DecodeAttention | None, slots: int
) -> None:
    checkpoint = replace(fp32, max_model_len=128, kernels=Kernels(attention=attention))
    engine, requests = engine_of(checkpoint, slots), requests_of(fp32, 6)
    with torch.inference_mode():
        engine._model.warm_up()
    assert completions(engine, requests) == alone(checkpoint, requests)


def test_the_shortest_cache_warms_up_and_generates_a_token(fp32: Checkpoint) -> None:
    engine = engine_of(replace(fp32, max_model_len=2), 1)
    engine.warm_up()
    assert completions(engine, [GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)])


def _part_of(text: str, randomness: random.Random) -> str:
    start = randomness.randrange(len(text))
    return text[start : start + randomness.randint(1, 8)]


def test_a_stop_string_ends_a_text_exactly_before_it(fp32: Checkpoint, engine: Engine) -> None:
    randomness = random.Random(12)
    prompts = [random_prompt(fp32.tokenizer, range(3, 30), randomness)[1] for _ in range(8)]
    free = [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=24) for prompt in prompts]
    texts = [completion.text for completion in completions(engine, free)]
    words = [_part_of(text, randomness) for text in texts]
    stopped = [replace(one, stop_words=(b"\x00never", word.encode())) for one, word in zip(free, words, strict=True)]
    for completion, text, word in zip(completions(engine, stopped), texts, words, strict=True):
        assert completion.text == text[: text.find(word)]
        assert completion.finish_reason == "stop"
        assert completion.num_output_tokens <= 24


def test_bad_words_never_appear(fp32: Checkpoint, engine: Engine) -> None:
    randomness = random.Random(40)
    free = [replace(one, temperature=randomness.choice((0.7, 1.2, 2.0))) for one in requests_of(fp32, 16, 12, 24)]
    banned = []
    for request, completion in zip(free, completions(engine, free), strict=True):
        words = {_part_of(completion.text, randomness) for _ in range(randomness.randint(1, 4))}
        # U+FFFD stands for invalid UTF-8, which can't be banned.
        words = {word for word in words if "\ufffd" not in word} or {"e"}
        banned.append(replace(request, bad_words=tuple(word.encode() for word in words)))
    for request, completion in zip(banned, completions(engine, banned), strict=True):
        assert not any(word.decode() in completion.text for word in request.bad_words), request
        assert completion.num_output_tokens == 24


def test_chunks_have_the_tokens_of_the_setting_and_join_to_the_completion(fp32: Checkpoint) -> None:
    (request,) = requests_of(fp32, 1)
    request = replace(request, max_tokens=20, min_tokens=20)
    engine = engine_of(fp32, 1, stream_interval="6")
    sequence = engine.sequence(request, stream=True)
    engine.add(sequence)
    chunks = []
    while sequence.result is None:
        engine.step()
        chunks.append(sequence.next_chunk())
    sent = [chunk for chunk in chunks if chunk is not None]
    assert sum(chunk.num_tokens for chunk in sent) == 20
    assert all(chunk.num_tokens >= 6 for chunk in sent[1:-1])
    assert len(sent) <= 5
    (expected,) = completions(engine_of(fp32, 1), [request])
    assert "".join(chunk.text for chunk in sent) == expected.text
