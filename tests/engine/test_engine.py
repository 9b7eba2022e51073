"""The engine: removals, values that are not finite, the shortest sequences and caches."""

from dataclasses import replace

import pytest
from engine.engines import add_all, alone, attention_by_sequence, completions, engine_of, load, needs_compiled_kernels
from engine.forward_passes import ForwardPass, watching
from engine.prompts import request_of, requests_of
from llama_engine.errors import GenerationError
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.metrics import INT8_COLUMNS
from llama_engine.request.generation_request import GenerationRequest


def test_removing_a_sequence_again_or_after_its_end_frees_no_other_slot(fp32: LoadedModel) -> None:
    engine = engine_of(fp32, 3)
    finished, removed, last = add_all(engine, [request_of(fp32, seed, 9, 4 if seed else 1) for seed in range(3)])
    assert engine.step().finished == [finished]
    for sequence in (finished, removed, removed):
        engine.remove(sequence)
    assert engine.num_sequences == 1
    while engine.num_sequences:
        engine.step()
    assert [last.result] == alone(fp32, [last.request])


def test_warming_up_fails_on_a_model_whose_decode_step_fails(int8: LoadedModel) -> None:
    engine = engine_of(int8, 4)
    engine.warm_up()

    def fail(forward: ForwardPass) -> None:
        if forward.number == 1:
            raise RuntimeError("no kernel")

    with watching(fail), pytest.raises(GenerationError):
        engine.warm_up()


def test_the_longest_prompt_of_a_gpus_warm_up_changes_no_token(fp32: LoadedModel) -> None:
    checkpoint = replace(fp32, max_model_len=128, attention=attention_by_sequence)
    engine, requests = engine_of(checkpoint, 20), requests_of(fp32, 6)
    engine._model.warm_up()
    assert completions(engine, requests) == alone(checkpoint, requests)


def test_the_shortest_cache_generates_a_token(fp32: LoadedModel) -> None:
    engine = engine_of(replace(fp32, max_model_len=2), 1)
    engine.warm_up()
    assert completions(engine, [GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)])


def test_a_step_counts_the_columns_of_each_linear_layer() -> None:
    needs_compiled_kernels()
    checkpoint = load("int8")
    engine, layers = engine_of(checkpoint, 4), checkpoint.config.num_hidden_layers
    engine.step()
    (request,) = requests_of(checkpoint, 1)
    engine.add(engine.builder.build(request))
    step = engine.step()
    tokens = step.prefill_tokens
    # In the order of the metric's series. The head computes the last token alone.
    assert tuple(step.term_counts) == INT8_COLUMNS.values
    assert [count.tokens for count in step.term_counts.values()] == [tokens * layers] * 4 + [1]
    down = step.term_counts["down"]
    assert 0 < down.outlier_columns < down.tokens * down.inputs
    assert down.outlier_columns % 4 == 0
