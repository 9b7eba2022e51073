"""The engine at its limits: values that are not finite, the shortest sequences and caches, the order of results."""

from dataclasses import replace

import pytest
import torch
from engine.engines import alone, completions, engine_of
from engine.forward_passes import after_each, before_each
from engine.requests import request_of, requests_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.errors import GenerationError
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint


@pytest.fixture
def engine(fp32: Checkpoint) -> Engine:
    return engine_of(fp32, 4)


@pytest.mark.parametrize(("number", "slot"), [(0, 0), (2, 1)], ids=["prefill", "decode step"])
def test_a_sequence_that_is_not_finite_fails_alone_and_leaves_a_clean_slot(
    fp32: Checkpoint, engine: Engine, number: int, slot: int
) -> None:
    requests = requests_of(fp32, 4)
    expected = completions(engine, requests)

    def poison(current: int, cache: KVCache, hidden: torch.Tensor) -> None:
        if current == number:
            hidden[slot] = torch.inf if number == 0 else torch.nan
            for layer in cache.slot_layers:
                layer.keys[slot, :, :100] = torch.nan
                layer.values[slot, :, :100] = torch.inf

    with after_each(fp32, poison):
        results = engine.generate(requests)
    failed = results.pop(slot)
    assert isinstance(failed, GenerationError)
    assert str(failed) == "the model's logits for this request were not finite"
    assert results == [*expected[:slot], *expected[slot + 1 :]]
    assert engine.generate(requests) == expected


def test_results_come_in_the_order_of_the_requests(fp32: Checkpoint, engine: Engine) -> None:
    lengths = [7, 1, 12, 3, 1, 9, 2, 5, 12, 1, 4]
    requests = [request_of(fp32, seed, max_tokens=length) for seed, length in enumerate(lengths)]
    found = completions(engine, requests)
    assert [completion.num_output_tokens for completion in found] == lengths
    assert [completion.num_input_tokens for completion in found] == [len(one.prompt_tokens) for one in requests]
    assert found == alone(fp32, requests)


def test_no_requests_have_no_results_and_an_empty_step_does_nothing(engine: Engine) -> None:
    assert engine.generate([]) == []
    assert engine.step() == StepResult()


def test_a_sequence_of_one_token_needs_no_decode_step(fp32: Checkpoint, engine: Engine) -> None:
    passes: list[int] = []
    with before_each(fp32, lambda number, cache: passes.append(number)):
        (completion,) = completions(engine, [request_of(fp32, 1, max_tokens=1)])
    assert (completion.num_output_tokens, completion.finish_reason, passes) == (1, "length", [0])


def test_the_prompt_comes_before_the_text_on_request(fp32: Checkpoint, engine: Engine) -> None:
    prompt = "The for statement is 🙂"
    request = GenerationRequest(prompt=prompt, prompt_tokens=fp32.tokenizer.encode(prompt), max_tokens=5)
    plain, prompted = completions(engine, [request, replace(request, exclude_input_in_output=False)])
    assert prompted.text == prompt + plain.text
    assert prompted.num_output_tokens == plain.num_output_tokens


def test_warming_up_fails_on_a_model_whose_decode_step_fails(fp32: Checkpoint, engine: Engine) -> None:
    engine.warm_up()

    def fail(number: int, cache: KVCache) -> None:
        if number == 1:
            raise RuntimeError("no kernel")

    with before_each(fp32, fail), pytest.raises(GenerationError):
        engine.warm_up()


def test_the_shortest_cache_warms_up_and_generates_a_token(fp32: Checkpoint) -> None:
    engine = engine_of(replace(fp32, max_model_len=2), 1)
    engine.warm_up()
    assert completions(engine, [GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)])
