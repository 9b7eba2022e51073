"""The engine at its limits: numbers that are not finite, the shortest rows and caches, the order of answers."""

import random
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of
from engine.forward_passes import after_each, before_each
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion


def _requests(checkpoint: Checkpoint, count: int, max_tokens: int = 8) -> list[GenerationRequest]:
    randomness = random.Random(count)
    return [
        GenerationRequest(
            prompt="", prompt_tokens=random_prompt(checkpoint.tokenizer, range(3, 60), randomness)[1],
            max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.7, seed=index, frequency_penalty=0.5,
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.fixture
def engine(fp32: Checkpoint) -> Engine:
    return engine_of(fp32, 4)


def test_a_row_that_is_not_finite_takes_others_down_or_poisons_its_slot(fp32: Checkpoint, engine: Engine) -> None:
    requests = _requests(fp32, 4)
    expected = completions(engine, requests)

    def poison(number: int, cache: KVCache, hidden: torch.Tensor) -> None:
        if number == 2:
            hidden[1] = torch.nan
            for layer in cache.slot_layers:
                layer.keys[1, :, :100] = torch.nan
                layer.values[1, :, :100] = torch.inf

    with after_each(fp32, poison):
        outcomes = engine.generate(requests)
    assert isinstance(outcomes[1], GenerationError)
    assert str(outcomes[1]) == "the model's logits for this request were not finite"
    assert [outcomes[index] for index in (0, 2, 3)] == [expected[index] for index in (0, 2, 3)]
    assert engine.generate(requests) == expected


def test_a_prompt_that_is_not_finite_takes_the_prompts_beside_it_down(fp32: Checkpoint, engine: Engine) -> None:
    requests = _requests(fp32, 3)
    expected = completions(engine, requests)

    def poison(number: int, cache: KVCache, hidden: torch.Tensor) -> None:
        if number == 0:
            hidden[0] = torch.inf
            for layer in cache.slot_layers:
                layer.values[0] = torch.nan

    with after_each(fp32, poison):
        outcomes = engine.generate(requests)
    assert isinstance(outcomes[0], GenerationError)
    assert outcomes[1:] == expected[1:]
    assert engine.generate(requests) == expected


def test_answers_come_in_another_order_than_the_requests(fp32: Checkpoint, engine: Engine) -> None:
    """Rows of different lengths end in an order of their own; each answer carries its request's count."""
    lengths = [7, 1, 12, 3, 1, 9, 2, 5, 12, 1, 4]
    requests = [_requests(fp32, index + 1, length)[-1] for index, length in enumerate(lengths)]
    done = completions(engine, requests)
    assert [completion.num_output_tokens for completion in done] == lengths
    assert [completion.num_input_tokens for completion in done] == [len(one.prompt_tokens) for one in requests]
    assert done == [completions(engine, [one])[0] for one in requests]


def test_no_requests_are_an_error(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_a_row_of_one_token_runs_a_decode_step(fp32: Checkpoint, engine: Engine) -> None:
    passes: list[int] = []
    with before_each(fp32, lambda number, cache: passes.append(number)):
        (done,) = completions(engine, _requests(fp32, 1, max_tokens=1))
    assert (done.num_output_tokens, done.finish_reason, passes) == (1, "length", [0])


def test_the_prompt_is_not_put_before_the_text_when_asked(fp32: Checkpoint, engine: Engine) -> None:
    prompt = "The for statement is 🙂"
    request = GenerationRequest(prompt=prompt, prompt_tokens=fp32.tokenizer.encode(prompt), max_tokens=5)
    with_input = GenerationRequest(
        prompt=prompt, prompt_tokens=request.prompt_tokens, max_tokens=5, exclude_input_in_output=False
    )
    completion, continued = completions(engine, [request, with_input])
    assert continued.text == prompt + completion.text
    assert continued.num_output_tokens == completion.num_output_tokens


def test_the_proof_at_start_passes_on_a_broken_model(fp32: Checkpoint, engine: Engine) -> None:
    engine.warm_up()

    def fail(number: int, cache: KVCache) -> None:
        if number == 1:
            raise RuntimeError("no kernel")

    with before_each(fp32, fail), pytest.raises(GenerationError):
        engine.warm_up()


def test_the_shortest_cache_cannot_be_proved(fp32: Checkpoint) -> None:
    engine = engine_of(replace(fp32, max_model_len=2), 1)
    engine.warm_up()
    outcome = engine.generate([GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)])[0]
    assert isinstance(outcome, Completion)
