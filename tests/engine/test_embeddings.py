"""Embeddings: those of transformers in FP32, computed beside completions, leaving nothing in the KV cache.

`test_exact_bits` compares their bits in random mixes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import Run, add_all, engine_of, load, needs_compiled_kernels, run, spoil_cache
from engine.families import MAX_MODEL_LEN, save_family
from engine.forward_passes import ForwardPass, watching
from engine.logits import oracle
from engine.parsing import parse, refusal
from engine.prompts import request_of
from llama_engine.checkpoint.pooling import Pooling
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.step_health import MAX_FAILED_STEPS, StepHealth
from llama_engine.errors import GenerationError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer
from torch.nn import functional

LENGTHS = (1, 7, 40, 100)


def embedding_request(tokens: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest("", tokens, max_tokens=0, return_embedding=True)


def embeddings_of(outcome: Run) -> torch.Tensor:
    """The embeddings of sequences that all succeeded, [sequences, hidden]."""
    results = [result for result in outcome.results if isinstance(result, Completion)]
    assert [len(result.embedding) > 0 for result in results] == [True] * len(outcome.results)
    return torch.tensor([result.embedding for result in results])


def by_transformers(model: torch.nn.Module, prompts: list[tuple[int, ...]], pooling: Pooling) -> torch.Tensor:
    """The pooled hidden states of transformers' model without a head, [prompts, hidden]."""
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    pooled = torch.stack([each[-1] if pooling.mode == "last" else each.mean(0) for each in states])
    return functional.normalize(pooled, dim=1) if pooling.normalizes else pooled


def _engine(checkpoint: LoadedModel, pooling: Pooling = Pooling("mean"), slots: int = 4, **parameters: str) -> Engine:  # noqa: B008 - immutable
    return engine_of(replace(checkpoint, pooling=pooling), slots, **parameters)


def _prompts(checkpoint: LoadedModel) -> list[tuple[int, ...]]:
    return [request_of(checkpoint, seed, size).prompt_tokens for seed, size in enumerate(LENGTHS)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save_family(tmp_path / "it", family)
    checkpoint = load("none", model=str(folder), max_model_len=str(MAX_MODEL_LEN))
    prompts = _prompts(checkpoint)
    for pooling in (Pooling("last"), Pooling("mean"), Pooling("mean", normalizes=False)):
        # Prompts are packed, and the longest are cut.
        engine = _engine(checkpoint, pooling, prefill_tokens="48")
        results = embeddings_of(run(engine, [engine.builder.build(embedding_request(prompt)) for prompt in prompts]))
        assert (results - by_transformers(oracle(checkpoint).model, prompts, pooling)).abs().max() <= 1e-5


def test_nothing_of_an_embedding_stays_in_the_cache_or_is_taken_from_it(int8: LoadedModel) -> None:
    engine, request = _engine(int8), request_of(int8, 1, 100)
    run(engine, [engine.builder.build(request)])
    before = engine.take_cache_counts()
    outcome = run(engine, [engine.builder.build(embedding_request(request.prompt_tokens)) for _ in range(2)])
    assert sum(step.prefill_tokens for step in outcome.steps) == 200
    after = engine.take_cache_counts()
    # The first prompt's full pages.
    assert (after.used_pages, after.idle_pages, after.free_pages) == (0, 100 // 16, before.free_pages)
    assert [step.cache.queried_tokens for step in outcome.steps if step.cache] == [0] * len(outcome.steps)


def test_embeddings_leave_most_of_a_pass_while_another_sequence_decodes(int8: LoadedModel) -> None:
    engine = _engine(int8, prefill_tokens="64", slots=16)
    add_all(engine, [request_of(int8, 1, 20, max_tokens=40)])
    engine.step()
    add_all(engine, [embedding_request(request_of(int8, seed, 100).prompt_tokens) for seed in range(10)])
    assert all(0 < engine.step().prefill_tokens <= 16 for _ in range(8))


def test_a_prompt_passes_embeddings_that_wait(int8: LoadedModel) -> None:
    engine = _engine(int8, prefill_tokens="64", slots=16)
    embeddings = [embedding_request(request_of(int8, seed, 10).prompt_tokens) for seed in range(10)]
    *_, writer = add_all(engine, [*embeddings, request_of(int8, 1, 20, max_tokens=4)])
    engine.step()
    assert writer.num_output_tokens == 1


def test_an_embedding_that_is_preempted_has_the_same_bits(int8: LoadedModel) -> None:
    needs_compiled_kernels()
    checkpoint = replace(int8, max_model_len=128)
    request = embedding_request(request_of(checkpoint, 9, 110).prompt_tokens)
    alone = _engine(checkpoint, slots=1)
    expected = run(alone, [alone.builder.build(request)]).results
    engine = _engine(checkpoint, prefill_tokens="2", kv_cache_tokens="192")
    writers = add_all(engine, [request_of(checkpoint, seed, 14, max_tokens=40) for seed in range(2)])
    while not all(writer.num_output_tokens for writer in writers):
        engine.step()
    (sequence,) = add_all(engine, [request])
    steps = [engine.step() for _ in range(160)]
    assert sum(step.preempted for step in steps) > 0
    assert [sequence.result] == expected


def test_a_pass_that_fails_costs_no_other_embedding(int8: LoadedModel) -> None:
    needs_compiled_kernels()
    engine, requests = _engine(int8), [embedding_request(prompt) for prompt in _prompts(int8)]
    expected = run(engine, [engine.builder.build(request) for request in requests]).results

    def fail(forward: ForwardPass) -> None:
        if any(len(chunk.tokens) == LENGTHS[1] for chunk in forward.chunks):
            raise RuntimeError("of this prompt")

    with watching(fail):
        outcome = run(engine, [engine.builder.build(request) for request in requests])
    assert isinstance(outcome.results[1], GenerationError)
    assert [outcome.results[0], *outcome.results[2:]] == [expected[0], *expected[2:]]


def test_an_embedding_that_is_not_finite_is_an_error(fp32: LoadedModel) -> None:
    engine = _engine(fp32, prefill_tokens="48")
    (sequence,) = add_all(engine, [embedding_request(_prompts(fp32)[-1])])
    engine.step()
    for page in sequence.pages:
        spoil_cache(engine, page)
    engine.step()
    engine.step()
    assert isinstance(sequence.result, GenerationError)


def test_steps_that_only_embed_are_no_failures(int8: LoadedModel) -> None:
    engine, health = _engine(int8), StepHealth(0)
    for _ in range(MAX_FAILED_STEPS + 1):
        sequence = engine.builder.build(embedding_request((5, 6)))
        (step,) = run(engine, [sequence]).steps
        health.record_step(step)
    assert not health.failing


def test_a_text_has_the_tokenizers_special_tokens(tokenizer: Tokenizer) -> None:
    values = {"return_embedding": True, "priority": 3, "cache_salt": "a", "return_perf_metrics": True}
    request = parse(tokenizer, None, {"embeds": True}, **values)
    assert request.prompt_tokens == tokenizer.encode("def f")
    assert (request.max_tokens, request.priority) == (0, 3)


@pytest.mark.parametrize(
    ("embeds", "values", "message"),
    [
        (False, {}, "return_embedding is true; it must be false: the setting pooling is off, or auto and"),
        *[(True, values, f"{next(iter(values))} is given; it must be missing beside return_embedding")
          for values in ({"max_tokens": 1}, {"stop_words": ["x"]}, {"stream": False}, {"temperature": 0.0})],
        (True, {"sampling_parameters": '{"top_k": 3}'}, "sampling_parameters is given; it must be missing beside"),
        (True, {"text_input": "a b " * 40}, "text_input is 82 tokens; it must be at most 63 tokens"),
    ],
)  # fmt: skip
def test_what_an_embedding_cannot_have_is_refused(
    tokenizer: Tokenizer, embeds: bool, values: dict[str, object], message: str
) -> None:
    assert message in refusal(tokenizer, None, {"embeds": embeds}, return_embedding=True, **values)


def test_a_completion_is_refused_where_there_is_no_head(tokenizer: Tokenizer) -> None:
    refused = refusal(tokenizer, None, {"generates": False, "embeds": True})
    assert refused.startswith("return_embedding is false or missing; it must be true: the checkpoint")
