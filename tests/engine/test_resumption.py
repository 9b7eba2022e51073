"""Resumption: a request that continues after its own tokens gives what it would have given without an interruption.

Tokens that can't be its own are refused.
"""

import random
import re
from dataclasses import replace

import pytest
from engine.engines import completions, engine_of, load, needs_compiled_kernels, run
from engine.guided_texts import END, EngineOf
from engine.prompts import any_requests, request_of
from engine.scheduling import running
from engine.transcripts import Transcript, cuts, transcripts
from llama_engine.engine.engine import Engine
from llama_engine.errors import InvalidRequest
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest

SIGNS = ("'stop', .*stop_reason=''", "stop_reason='[0-9]", "stop_reason='[^0-9']", "'length'", "\ufffd", "[äöü€😀«]")
"""What results show: ends by a guide or an end token, a stop token, a stop string, and max_tokens; incomplete
characters, and whole ones of several bytes.
"""


@pytest.fixture(autouse=True)
def _exact() -> None:
    needs_compiled_kernels()


def _different(resuming: Engine, pairs: list[tuple[GenerationRequest, Transcript]]) -> list[str]:
    """Run resumed requests among each other; describe those that don't give what they must."""
    given = transcripts(resuming, [request for request, _ in pairs])
    return [
        f"{request}\nmust give {must}\nbut gives {gives}"
        for (request, must), gives in zip(pairs, given, strict=True)
        if gives != must
    ]


def test_a_request_resumed_at_any_token_gives_the_same_bits(int8: LoadedModel, engine_with_guides: EngineOf) -> None:
    requests = any_requests(int8, 40, 5)
    whole = transcripts(engine_with_guides(int8), requests)
    pairs = cuts(requests, whole, random.Random(2))[::2]
    assert _different(engine_with_guides(int8), pairs) == []
    held = sum(not must.chunks or must.chunks[0][0] > len(request.resume_ids) + 1 for request, must in pairs)
    assert len(pairs) > 120
    assert held > 5
    assert all(any(re.search(sign, of.result) for of in whole) for sign in SIGNS)


def test_a_prompt_that_has_the_output_so_far_draws_the_same_tokens(int8: LoadedModel) -> None:
    """As a router continues a request that it migrates: it doesn't say where the prompt ends."""
    # A repetition penalty doesn't tell prompt and output apart, as the other penalties do.
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "min_tokens": 0}
    requests = [replace(request_of(int8, seed, 20, 12), **neutral) for seed in range(3)]  # type: ignore[arg-type]
    whole = transcripts(engine_of(int8), requests)
    continued, rest = list[GenerationRequest](), list[list[int]]()
    for request, of in zip(requests, whole, strict=True):
        for cut in range(1, len(of.tokens)):
            prompt = (*request.prompt_tokens, *of.tokens[:cut])
            continued.append(replace(request, prompt_tokens=prompt, max_tokens=12 - cut))
            rest.append(of.tokens[cut:])
    assert [of.tokens for of in transcripts(engine_of(int8), continued)] == rest
    assert len(rest) > 20


@pytest.mark.parametrize(
    "parameters",
    [
        {"kv_cache_dtype": "int8", "prefill_tokens": "3"},
        {"kv_cache_tokens": "160", "prefill_tokens": "7"},
        {"kv_cache_tokens": "160", "prefix_cache": "off", "int8_terms": "1"},
    ],
    ids=["an INT8 cache and short chunks", "too few pages", "too few pages, no prefix cache, one term"],
)
def test_every_exact_path_gives_the_same_bits(parameters: dict[str, str], engine_with_guides: EngineOf) -> None:
    checkpoint = load("int8", max_model_len="128", **parameters)
    cache = {name: value for name, value in parameters.items() if name == "kv_cache_dtype"}
    # Of the same prompt and tokens, so that they share pages as far as these are cached.
    requests = [request for request in any_requests(checkpoint, 3, 5) for _ in range(2)]
    requests += [replace(request_of(checkpoint, seed, 30, max_tokens=60), num_logprobs=seed) for seed in range(2)]
    whole = transcripts(engine_with_guides(checkpoint, **cache), requests)
    pairs = cuts(requests, whole, random.Random(2))[::6]
    given = transcripts(engine_with_guides(checkpoint, 12, **parameters), [request for request, _ in pairs])
    assert [gives for (_, must), gives in zip(pairs, given, strict=True) if gives != must] == []
    assert any(of.preempted for of in given) == ("kv_cache_tokens" in parameters)


def test_one_that_is_preempted_in_its_prefill_has_its_log_probs_once(int8: LoadedModel) -> None:
    short = replace(int8, max_model_len=128)
    requests = [request_of(short, 1, 40, 80), replace(request_of(short, 2, 60, 50), num_logprobs=2, prompt_logprobs=1)]
    whole = transcripts(engine_of(short), requests)
    resumed = replace(requests[1], resume_ids=tuple(whole[1].tokens[:40]))
    engine = engine_of(short, 2, prefill_tokens="3", kv_cache_tokens="176")
    given = transcripts(engine, [requests[0], resumed])
    assert given[1].preempted
    assert given == [whole[0], whole[1].after(40)]


def test_a_stream_of_longer_chunks_goes_on_where_its_text_ended(
    int8: LoadedModel, engine_with_guides: EngineOf
) -> None:
    requests = any_requests(int8, 12, 6)
    whole = transcripts(engine_with_guides(int8, stream_interval="3"), requests)
    ends = {(request.seed, end) for request, of in zip(requests, whole, strict=True) for end, _ in of.chunks}
    resuming = engine_with_guides(int8, stream_interval="3")
    pairs = cuts(requests, whole, random.Random(2))
    at_ends = [pair for pair in pairs if (pair[0].seed, len(pair[0].resume_ids)) in ends]
    assert len(at_ends) > 20
    assert _different(resuming, at_ends) == []


def test_only_what_the_prefix_cache_lacks_is_computed(int8: LoadedModel) -> None:
    request = request_of(int8, 1, 40, max_tokens=40)
    engine = engine_of(int8, 2)
    first = engine.builder.build(request)
    run(engine, [first])
    engine.take_cache_counts()
    second = engine.builder.build(replace(request, resume_ids=tuple(first.output_tokens[:30])))
    step, *_ = run(engine, [second]).steps
    assert step.prefill_tokens == 70 - 64
    assert step.cache is not None
    assert (step.cache.queried_tokens, step.cache.hit_tokens) == (70, 64)
    # Those of the prompt; the others are output.
    assert second.num_cached_prompt_tokens == 40


def _encode(checkpoint: LoadedModel, text: str) -> tuple[int, ...]:
    return checkpoint.tokenizer.encode_inside(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("the end", {"stop_words": (b"en",)}),
        ("a stop", {"stop_token_ids": (9,)}),
        ("an end", {}),
    ],
)
def test_ids_within_which_the_text_ends_are_refused(
    int8: LoadedModel, engine_with_guides: EngineOf, text: str, values: dict[str, object]
) -> None:
    ids = _encode(int8, text) + {"an end": (END,), "a stop": (9,)}.get(text, ())
    request = replace(request_of(int8, 1, 9, 30), min_tokens=0, **values)  # type: ignore[arg-type]
    engine_with_guides(int8, 1).builder.build(replace(request, resume_ids=ids[:1]))
    with pytest.raises(InvalidRequest) as refused:
        engine_with_guides(int8, 1).builder.build(replace(request, resume_ids=(*ids, 40)))
    message = f"resume_ids is a list of {len(ids) + 1} tokens; it must be fewer: the text ends with token {len(ids)}"
    assert str(refused.value) == message
    # Before min_tokens, stop strings don't count; and ignored end tokens never do.
    if text != "a stop":
        engine_with_guides(int8, 1).builder.build(
            replace(request, resume_ids=(*ids, 40), min_tokens=29, ignore_eos=True)
        )


@pytest.mark.parametrize(
    ("guide", "text", "message"),
    [
        ("[a-z]{30}", "abX", "resume_ids is a list of {n} tokens; token {n} must conform to guided_decoding_guide"),
        ("ab", "ab", "resume_ids is a list of {n} tokens; it must be fewer: the text ends with token {n}"),
    ],
)
def test_ids_that_the_guide_rules_out_fail_that_sequence_alone(
    int8: LoadedModel, guide: str, text: str, message: str
) -> None:
    ids = tuple(id_ for letter in text for id_ in _encode(int8, letter))
    guided = replace(request_of(int8, 1, 9, 30), guided_decoding_guide_type="regex", guided_decoding_guide=guide)
    others = [request_of(int8, seed, 12) for seed in range(3)]
    expected = completions(engine_of(int8, 1), others)
    with running(int8, 2) as started:
        sequences = started.add(others[0], replace(guided, resume_ids=ids), *others[1:])
        first, failed, *rest = started.finish(sequences)
    assert isinstance(failed, InvalidRequest)
    assert str(failed) == message.format(n=len(ids))
    assert [first, *rest] == expected
