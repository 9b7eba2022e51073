"""The engine at its limits: values that are not finite, the shortest sequences and caches; and what ends a text."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
from engine.engines import alone, completions, engine_of, spoil_cache
from engine.forward_passes import ForwardPass, watching
from engine.prompts import request_of, requests_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.kernels.gpu.gpu_kernels import DecodeAttention, Kernels
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import RequestContext


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


@pytest.mark.parametrize(("attention", "slots"), [(None, 1), (gpu_reference.decode_attention, 20)])
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


def test_chunks_have_the_tokens_of_the_setting_and_join_to_the_completion(fp32: Checkpoint) -> None:
    (request,) = requests_of(fp32, 1)
    request = replace(request, max_tokens=20, min_tokens=20)
    engine = engine_of(fp32, 1, stream_interval="6")
    sequence = engine.builder.build(request, RequestContext(stream=True))
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
