"""Parameters at the ends of float32 and logits that aren't finite: nothing becomes NaN, and only the bad row fails."""

import itertools

import numpy as np
import pytest
import torch
from engine.slot_sampler import SlotSampler
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sampling.sampler import FAILED

VOCABULARY = 50
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 1e-45


def _request(**parameters: float) -> GenerationRequest:
    return GenerationRequest(prompt="", prompt_tokens=(1, 2, 3), max_tokens=8, **parameters)  # type: ignore[arg-type]


def _logits(scale: float, rows: int = 1) -> torch.Tensor:
    return scale * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


def _sampler(*requests: GenerationRequest) -> SlotSampler:
    sampler = SlotSampler(len(requests), VOCABULARY, (0,))
    for request in requests:
        sampler.add(request)
    return sampler


def _sample(requests: list[GenerationRequest], logits: torch.Tensor, steps: int = 6) -> list[list[int]]:
    """Return each row's tokens over some steps with the same logits."""
    sampler = _sampler(*requests)
    return [list(row) for row in zip(*(sampler.step(logits) for _ in range(steps)), strict=True)]


@pytest.mark.parametrize("temperature", [SMALLEST, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_a_tiny_temperature_is_greedy(temperature: float, scale: float) -> None:
    logits = _logits(scale)
    (tokens,) = _sample([_request(temperature=temperature, top_k=9, top_p=0.9)], logits)
    if temperature < 1e-4 * scale:
        assert set(tokens) == {int(logits.argmax())}


@pytest.mark.parametrize("penalty", [SMALLEST, 1e-38, 1e-10, 1e10, 1e38, LARGEST])
@pytest.mark.parametrize("temperature", [0.0, SMALLEST, 1.0, 2.0])
def test_an_extreme_repetition_penalty_fails_no_row(penalty: float, temperature: float) -> None:
    for scale, extra in itertools.product((1e-3, 1.0, 1e4), (-2.0, 0.0, 2.0)):
        request = _request(
            repetition_penalty=penalty, temperature=temperature, frequency_penalty=extra, presence_penalty=extra,
            top_k=20, top_p=0.5,
        )  # fmt: skip
        (tokens,) = _sample([request], _logits(scale))
        assert FAILED not in tokens
        if penalty > 1 and extra == 0 and temperature < 1:
            assert len(set(tokens)) == len(tokens), "a token came twice under a crushing penalty"


def test_extreme_parameters_change_no_neighbour() -> None:
    plain = _request(temperature=0.8, seed=5)
    wild = _request(repetition_penalty=SMALLEST, frequency_penalty=2.0, temperature=SMALLEST, top_p=SMALLEST, top_k=1)
    logits = _logits(3.0, rows=3)
    assert _sample([wild, plain, wild], logits)[1] == _sample([plain], logits[1:2])[0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}])
def test_only_the_row_that_is_not_finite_fails(bad: float, parameters: dict[str, float]) -> None:
    requests = [_request(seed=row, **parameters) for row in range(3)]
    finite = _logits(2.0, rows=3)
    logits = finite.clone()
    logits[1, 17] = bad
    expected = _sample(requests, finite)
    assert _sample(requests, logits) == [expected[0], [FAILED] * 6, expected[2]]


def test_a_row_whose_tokens_are_all_masked_fails() -> None:
    logits = _logits(1.0, rows=2)
    logits[0] = -torch.inf
    tokens = _sample([_request(temperature=1.0), _request()], logits)
    assert tokens == [[FAILED] * 6, [int(logits[1].argmax())] * 6]


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = _logits(1.0)
    logits[:, 5:] = -torch.inf
    (tokens,) = _sample([_request(temperature=2.0, repetition_penalty=1.5, presence_penalty=2.0)], logits, steps=200)
    assert set(tokens) <= set(range(5))


def test_a_neighbours_penalty_does_not_make_infinite_logits_finite() -> None:
    sampler = _sampler(_request(), _request(repetition_penalty=1.3))
    logits = _logits(1.0, rows=2)
    first = sampler.step(logits)
    assert FAILED not in first
    # Of a token that it has produced, which a penalty would make the greatest finite number.
    logits[0, first[0]] = torch.inf
    assert sampler.step(logits)[0] == FAILED
