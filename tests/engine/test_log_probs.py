"""Log probabilities of generated tokens and of prompts: those of transformers' model, in pieces, and without effect."""

import math
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of, run, tokens_in, with_tokens_as_text
from engine.logits import oracle
from engine.prompts import requests_of
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.log_probs import TokenLogProbs, pack, unpack

TOLERANCE = 2e-4
"""Of a log probability in FP32, against another order of sums."""


def _asking(request: GenerationRequest) -> GenerationRequest:
    return replace(request, return_log_probs=True, num_logprobs=3, prompt_logprobs=2)


def _finished(engine: Engine, requests: list[GenerationRequest]) -> list[Sequence]:
    sequences = [sequence for request in requests for sequence in engine.builder.choices(request)]
    assert all(isinstance(result, Completion) for result in run(engine, sequences).results)
    return sequences


def _expected(checkpoint: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Return transformers' log probabilities of what follows each token, [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(checkpoint)(input_ids=torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def _assert_is(log_probs: TokenLogProbs, expected: torch.Tensor, token: int, top: int) -> None:
    assert log_probs.token == token
    assert math.isclose(log_probs.log_prob, float(expected[token]), abs_tol=TOLERANCE)
    better = int((expected > expected[token] + TOLERANCE).sum())
    assert better <= log_probs.rank - 1 <= int((expected > expected[token] - TOLERANCE).sum())
    values = expected.topk(top).values.tolist()
    assert [value for _, value in log_probs.top] == pytest.approx(values, abs=TOLERANCE)
    assert all(math.isclose(value, float(expected[likely]), abs_tol=TOLERANCE) for likely, value in log_probs.top)


def test_they_are_those_of_transformers(fp32: LoadedModel) -> None:
    """Penalties, temperature and the draw don't count; nor does the cut of the prompt, which choices share."""
    shown = with_tokens_as_text(fp32)
    engine = engine_of(shown, 3, prefill_tokens="7")
    requests = [replace(_asking(request), n=2) for request in requests_of(shown, 3)]
    for sequence in _finished(engine, requests):
        assert isinstance(sequence.result, Completion)
        prompt, output = list(sequence.request.prompt_tokens), tokens_in(sequence.result.text)
        expected = _expected(fp32, [*prompt, *output])
        assert len(sequence.prompt_log_probs) == len(prompt) - 1
        for place, log_probs in enumerate(sequence.prompt_log_probs):
            _assert_is(log_probs, expected[place], prompt[place + 1], 2)
        assert len(sequence.log_probs) == len(output)
        for place, log_probs in enumerate(sequence.log_probs, len(prompt) - 1):
            _assert_is(log_probs, expected[place], output[place - len(prompt) + 1], 3)


def test_asking_for_them_changes_no_text(int8: LoadedModel) -> None:
    requests = requests_of(int8, 6)
    plain = completions(engine_of(int8, 4), requests)
    mixed = [_asking(request) if row % 2 else request for row, request in enumerate(requests)]
    sequences = _finished(engine_of(int8, 4), mixed)
    assert [sequence.result for sequence in sequences] == plain
    for sequence in sequences[::2]:
        assert (sequence.log_probs, sequence.prompt_log_probs) == ([], [])
        assert sequence.next_log_probs is None


def test_equally_likely_tokens_have_the_same_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(4, -1)
    assert [log_probs.rank for log_probs in unpack(pack(logits, torch.arange(4), [0] * 4), [0] * 4)] == [4, 1, 1, 3]


def test_no_more_tokens_are_reported_than_there_are() -> None:
    (log_probs,) = unpack(pack(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), [20]), [20])
    assert [token for token, _ in log_probs.top] == [1, 0]
