"""The sampler: all parameters together as in transformers' chain, and every row as if it were alone."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine.slot_sampler import SlotSampler
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sampling.logits_processors import draw, penalize_output
from llama_engine.sampling.philox import step_keys
from llama_engine.text.bad_words import BadWords
from llama_engine.text.tokenizer import Vocabulary
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY, ENDS, STEPS = 200, (2, 7), 16


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
    sampler = SlotSampler(1, VOCABULARY, ENDS)
    sampler.add(request)
    return [sampler.step(logits[step : step + 1])[0] for step in range(STEPS)]


def _together(requests: Sequence[GenerationRequest], logits: Sequence[torch.Tensor], slots: int) -> list[list[int]]:
    """Add rows one by one while others decode, and remove each after its last step, so that slots are reused."""
    sampler = SlotSampler(slots, VOCABULARY, ENDS)
    tokens: list[list[int]] = [[] for _ in requests]
    waiting = list(range(len(requests)))
    rows: dict[object, int] = {}

    def step(first: int) -> None:
        present = [rows[sequence] for sequence in sampler.batch.sequences[first:]]
        now = torch.stack([logits[row][len(tokens[row])] for row in present])
        for row, token in zip(present, sampler.step(now, first), strict=True):
            tokens[row].append(token)
        for slot in reversed(range(first, len(sampler.batch))):
            if len(tokens[rows[sampler.batch.sequences[slot]]]) == STEPS:
                sampler.batch.remove(slot)

    while waiting or len(sampler.batch):
        if waiting and len(sampler.batch) < slots:
            row = waiting.pop(0)
            rows[sampler.add(requests[row])] = row
            step(len(sampler.batch) - 1)
        if len(sampler.batch):
            step(0)
    return tokens


def test_all_parameters_together_give_the_tokens_of_transformers() -> None:
    randomness = random.Random(1)
    for index in range(40):
        request = _random_request(randomness)
        assert _alone(request, _random_logits(index)) == _reference(request, _random_logits(index)), request


def test_a_row_gets_the_same_tokens_alone_and_among_others() -> None:
    randomness = random.Random(2)
    requests = [_random_request(randomness) for _ in range(40)]
    logits = [_random_logits(index) for index in range(40)]
    together = _together(requests, logits, slots=8)
    for index, request in enumerate(requests):
        assert together[index] == _alone(request, logits[index]), f"row {index}: {request}"


def test_no_end_token_comes_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, ENDS[1]] = 50.0
    sampler = SlotSampler(1, VOCABULARY, ENDS)
    sampler.add(GenerationRequest(prompt="", prompt_tokens=(1,), max_tokens=9, min_tokens=3, temperature=1.0))
    tokens = [sampler.step(logits)[0] for _ in range(5)]
    assert not set(tokens[:3]) & set(ENDS)
    assert tokens[3:] == [ENDS[1], ENDS[1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_ends_even_before_min_tokens(temperature: float) -> None:
    sampler = SlotSampler(2, 6, (4,))
    everything = BadWords([b"a"], Vocabulary([b"a1", b"a2", b"2a", b"aa", b"", b"a"]), torch.device("cpu"))
    request = GenerationRequest(prompt="", prompt_tokens=(1,), max_tokens=9, min_tokens=5, temperature=temperature)
    for bad_words in (everything, None):
        sampler.add(request, bad_words)
    ended, free = sampler.step(torch.tensor([[3.0, 1.0, 2.0, 5.0, -9.0, 0.0]]).expand(2, -1))
    assert ended == 4
    assert free != 4
