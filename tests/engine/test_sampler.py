"""The sampler over a decode batch, without a model: all parameters as in transformers' chain, and at their ends.

Nothing becomes NaN, and only a row whose logits are not finite fails.
"""

import itertools
import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from llama_engine.engine.decode import DecodeBatch
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.sequence_builder import SequenceBuilder
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.bias_and_masks import BadWords, LogitsProcessor
from llama_engine.sampling.draw import draw, position_keys
from llama_engine.sampling.sampler import FAILED, Sampler
from llama_engine.text.output_text import OutputText
from llama_engine.text.tokenizer import Vocabulary
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY, ENDS, STEPS = 200, (2, 7), 16
CPU = torch.device("cpu")
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 1e-45


def _request(**values: object) -> GenerationRequest:
    defaults = {"prompt": "", "prompt_tokens": (1, 3, 4), "max_tokens": STEPS}
    return GenerationRequest(**{**defaults, **values})  # type: ignore[arg-type]  # values are fields


def _logits(scale: float, rows: int = 1) -> torch.Tensor:
    return scale * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


def _batch(requests: list[GenerationRequest], vocabulary: int, processor: LogitsProcessor | None = None) -> DecodeBatch:
    """Return a batch with a row for each request. processor: of the first row."""
    batch = DecodeBatch(len(requests), vocabulary, CPU, Mock(PageManager))
    builder = SequenceBuilder(Vocabulary([b""] * vocabulary), frozenset(ENDS), CPU, 1)
    for row, request in enumerate(requests):
        of_row = builder.processor(request) if row or not processor else processor
        sequence = Sequence(request, OutputText(min_tokens=0, max_tokens=1 << 30, stop_words=[], end_tokens=[]), of_row)
        sequence.kv_slot = row
        batch.add([sequence])
    return batch


def _sample(
    requests: list[GenerationRequest], steps: list[torch.Tensor], processor: LogitsProcessor | None = None
) -> list[list[int]]:
    """Return each row's tokens. steps: logits of each step, [rows, vocabulary]. processor: of the first row."""
    batch = _batch(requests, steps[0].shape[1], processor)
    sampler = Sampler(batch.sampling, ENDS)
    tokens = []
    for logits in steps:
        tokens.append(sampler.sample(logits.clone(), slice(0, len(batch)), batch.sequences, batch.features).tolist())
        for sequence, token in zip(batch.sequences, tokens[-1], strict=True):
            sequence.append(token, b"")
    return [list(row) for row in zip(*tokens, strict=True)]


def _random_biases(randomness: random.Random) -> tuple[tuple[int, float], ...]:
    tokens = randomness.sample(range(VOCABULARY), randomness.choice((0, 0, 1, 30)))
    return tuple((token, float(np.float32(randomness.uniform(-8, 8)))) for token in tokens)


def _random_request(randomness: random.Random) -> GenerationRequest:
    def one_of(off: float, low: float, high: float) -> float:
        return off if randomness.random() < 0.4 else float(np.float32(randomness.uniform(low, high)))

    return _request(
        prompt_tokens=tuple(randomness.randrange(VOCABULARY) for _ in range(30)),
        min_tokens=randomness.choice((0, 0, 5, STEPS)),
        temperature=one_of(0.0, 0.05, 2.0),
        top_k=randomness.choice((0, 0, 1, 10, VOCABULARY, 10**6)),
        top_p=one_of(1.0, 0.05, 0.99),
        repetition_penalty=one_of(1.0, 0.5, 2.0),
        frequency_penalty=one_of(0.0, -2.0, 2.0),
        presence_penalty=one_of(0.0, -2.0, 2.0),
        min_p=one_of(0.0, 0.01, 0.5),
        logit_bias=_random_biases(randomness),
        allowed_token_ids=randomness.choice(((), (), tuple(randomness.sample(range(VOCABULARY), 50)))),
        stop_token_ids=randomness.choice(((), (5, 11))),
        ignore_eos=randomness.random() < 0.3,
        seed=randomness.getrandbits(64),
    )


def _reference(request: GenerationRequest, logits: list[torch.Tensor]) -> list[int]:
    """One row through transformers' processors, in the order in which generate() applies them; min_p as in vLLM."""
    written, prompt = list(request.prompt_tokens), len(request.prompt_tokens)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(request.repetition_penalty)])
    ends = sorted({*request.stop_token_ids, *(() if request.ignore_eos else ENDS)})
    masks = LogitsProcessorList()
    if ends:
        masks.append(MinNewTokensLengthLogitsProcessor(prompt, request.min_tokens, ends, "cpu"))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(request.temperature or 1.0)])
    if request.min_p:
        warpers.append(MinPLogitsWarper(request.min_p))
    if request.top_k:
        warpers.append(TopKLogitsWarper(request.top_k))
    if request.top_p < 1:
        warpers.append(TopPLogitsWarper(request.top_p))
    bias, forbidden = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY, dtype=torch.bool)
    for token, amount in request.logit_bias:
        bias[token] = amount
    if request.allowed_token_ids:
        forbidden = ~torch.isin(torch.arange(VOCABULARY), torch.tensor(request.allowed_token_ids))
    for row in logits:
        ids = torch.LongTensor([written])
        counts = torch.bincount(torch.tensor(written[prompt:], dtype=torch.long), minlength=VOCABULARY)[None]
        penalties = request.frequency_penalty * counts + request.presence_penalty * (counts > 0)
        scores = masks(ids, processors(ids, row + bias) - penalties)
        scores = scores.masked_fill(forbidden, -torch.inf)
        if request.temperature > 0:
            key = position_keys(np.array([request.seed], dtype=np.uint64), np.array([len(written)]))
            written.append(int(draw(warpers(ids, scores), torch.from_numpy(key))))
        else:
            written.append(int(scores.argmax()))
    return written[prompt:]


def test_all_parameters_together_give_the_tokens_of_transformers() -> None:
    randomness = random.Random(1)
    requests = [_random_request(randomness) for _ in range(40)]
    logits = 4 * torch.randn(STEPS, 40, VOCABULARY, generator=torch.Generator().manual_seed(0))
    # End tokens are likely to win.
    logits[:, :, ENDS] += 5
    # A repetition penalty multiplies negative logits, and divides others.
    logits[:, ::2] -= 25
    together = _sample(requests, [*logits])
    for row, request in enumerate(requests):
        steps = [step[row : row + 1] for step in logits]
        expected = _reference(request, steps)
        assert together[row] == expected, request
        assert _sample([request], steps)[0] == expected, request


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_ends_even_before_min_tokens(temperature: float) -> None:
    banned = BadWords([b"a"], Vocabulary([b"a1", b"a2", b"", b"2a", b"aa", b"1a", b"a", b""]), CPU)
    everything = LogitsProcessor(8, CPU, ends=ENDS, bad_words=banned)
    request = _request(min_tokens=5, temperature=temperature)
    logits = torch.tensor([[3.0, 1.0, -9.0, 2.0, 5.0, 0.0, 1.0, -10.0]]).expand(2, -1)
    (ended,), (free,) = _sample([request, request], [logits], everything)
    assert ended in ENDS
    assert free not in ENDS


@pytest.mark.parametrize("penalty", [SMALLEST, LARGEST])
@pytest.mark.parametrize("temperature", [0.0, SMALLEST, 1.0])
def test_an_extreme_repetition_penalty_fails_no_row(penalty: float, temperature: float) -> None:
    for scale, extra in itertools.product((1e-3, 1e4), (0.0, 2.0)):
        request = _request(
            repetition_penalty=penalty, temperature=temperature, frequency_penalty=extra, presence_penalty=extra,
            top_k=20, top_p=0.5,
        )  # fmt: skip
        (tokens,) = _sample([request], [_logits(scale)] * 6)
        assert FAILED not in tokens
        if penalty > 1 and extra == 0 and temperature < 1:
            assert len(set(tokens)) == len(tokens), "a token came twice under a crushing penalty"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}])
def test_only_the_row_that_is_not_finite_or_all_masked_fails(bad: float, parameters: dict[str, float]) -> None:
    requests = [_request(seed=row, **parameters) for row in range(3)]
    finite = _logits(2.0, rows=3)
    logits = finite.clone()
    logits[1, 17 if bad != -torch.inf else slice(None)] = bad
    expected = _sample(requests, [finite] * 6)
    assert _sample(requests, [logits] * 6) == [expected[0], [FAILED] * 6, expected[2]]


def test_a_neighbours_penalty_does_not_make_infinite_logits_finite() -> None:
    requests, logits = [_request(), _request(repetition_penalty=1.3)], _logits(1.0, rows=2)
    (first,), _ = _sample(requests, [logits])
    assert first != FAILED
    # Of a token that it has produced, which a penalty would make the greatest finite number.
    infinite = logits.clone()
    infinite[0, first] = torch.inf
    assert _sample(requests, [logits, infinite])[0] == [first, FAILED]
