"""The sampler: all parameters together against transformers' chain, and every row as if it were alone."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sampling.logits_processors import draw, penalize_output
from llama_engine.sampling.philox import step_keys
from llama_engine.sampling.sampler import Sampler
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY, ENDS, STEPS = 200, (2, 7), 16
CPU = torch.device("cpu")


def _random_request(randomness: random.Random) -> GenerationRequest:
    def one_of(off: float, low: float, high: float) -> float:
        return off if randomness.random() < 0.4 else float(np.float32(randomness.uniform(low, high)))

    return GenerationRequest(
        prompt="",
        prompt_tokens=tuple(randomness.randrange(VOCABULARY) for _ in range(30)),
        max_tokens=STEPS,
        min_tokens=randomness.choice((0, 0, 5, STEPS)),
        temperature=one_of(0.0, 0.05, 2.0),
        top_k=randomness.choice((0, 0, 1, 10, VOCABULARY, 10**6)),
        top_p=one_of(1.0, 0.05, 0.99),
        repetition_penalty=one_of(1.0, 0.5, 2.0),
        frequency_penalty=one_of(0.0, -2.0, 2.0),
        presence_penalty=one_of(0.0, -2.0, 2.0),
        seed=randomness.getrandbits(64),
    )


def _random_logits(seed: int) -> torch.Tensor:
    """[STEPS, VOCABULARY] of one row, with end tokens that are likely to win."""
    logits = 4 * torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits[:, ENDS] += 5
    return logits


def _reference(request: GenerationRequest, logits: torch.Tensor) -> list[int]:
    """One row through transformers' processors, in the order in which generate() applies them."""
    written = list(request.prompt_tokens)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(request.repetition_penalty)])
    masks = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(30, request.min_tokens, list(ENDS), "cpu")])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(request.temperature or 1.0)])
    if request.top_k:
        warpers.append(TopKLogitsWarper(request.top_k))
    if request.top_p < 1:
        warpers.append(TopPLogitsWarper(request.top_p))
    for step in range(STEPS):
        ids = torch.LongTensor([written])
        counts = torch.bincount(torch.tensor(written[30:], dtype=torch.long), minlength=VOCABULARY)[None]
        scores = processors(ids, logits[step : step + 1])
        scores = penalize_output(
            scores, counts, torch.tensor([request.frequency_penalty]), torch.tensor([request.presence_penalty])
        )
        scores = masks(ids, scores)
        if request.temperature > 0:
            key = step_keys(np.array([request.seed], dtype=np.uint64), np.array([step]))
            written.append(int(draw(warpers(ids, scores), torch.from_numpy(key))))
        else:
            written.append(int(scores.argmax()))
    return written[30:]


def _alone(request: GenerationRequest, logits: torch.Tensor) -> list[int]:
    sampler = Sampler(1, VOCABULARY, ENDS, CPU)
    sampler.admit([request])
    return [int(sampler.sample(logits[step : step + 1], 0, [step], [None])) for step in range(STEPS)]


def _together(requests: Sequence[GenerationRequest], logits: Sequence[torch.Tensor], slots: int) -> list[list[int]]:
    """Rows enter one after the other while others decode, and leave at their last step: slots are handed on."""
    sampler = Sampler(slots, VOCABULARY, ENDS, CPU)
    tokens: list[list[int]] = [[] for _ in requests]
    waiting, present = list(range(len(requests))), list[int]()

    def sample(first: int) -> None:
        steps = [len(tokens[row]) for row in present[first:]]
        now = torch.stack([logits[row][step] for row, step in zip(present[first:], steps, strict=True)])
        for row, token in zip(present[first:], sampler.sample(now, first, steps, [None] * len(now)), strict=True):
            tokens[row].append(int(token))
        for slot in range(len(present) - 1, first - 1, -1):
            if len(tokens[present[slot]]) == STEPS:
                sampler.retire(slot)
                present[slot] = present[-1]
                present.pop()

    while waiting or present:
        if waiting and len(present) < slots:
            present.append(waiting.pop(0))
            sampler.admit([requests[present[-1]]])
            sample(len(present) - 1)
        if present:
            sample(0)
    return tokens


def test_parameters_together_give_other_tokens_than_transformers() -> None:
    randomness = random.Random(1)
    for index in range(40):
        request = _random_request(randomness)
        assert _alone(request, _random_logits(index)) == _reference(request, _random_logits(index)), request


def test_a_row_depends_on_its_neighbours() -> None:
    randomness = random.Random(2)
    requests = [_random_request(randomness) for _ in range(40)]
    logits = [_random_logits(index) for index in range(40)]
    together = _together(requests, logits, slots=8)
    for index, request in enumerate(requests):
        assert together[index] == _alone(request, logits[index]), f"row {index}: {request}"


def test_an_end_token_comes_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, ENDS[1]] = 50.0
    sampler = Sampler(1, VOCABULARY, ENDS, CPU)
    sampler.admit([GenerationRequest(prompt="", prompt_tokens=(1,), max_tokens=9, min_tokens=3, temperature=1.0)])
    tokens = [int(sampler.sample(logits, 0, [step], [None])) for step in range(5)]
    assert not set(tokens[:3]) & set(ENDS)
    assert tokens[3:] == [ENDS[1], ENDS[1]]
