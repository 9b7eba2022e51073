"""Compare greedy tokens with those of transformers' `generate()` on each prompt alone."""

import random
from dataclasses import dataclass, field

import torch
from engine.engines import run, tokens_in
from engine.prompts import random_prompt
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer
from transformers import PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

LONGEST = 16
"""Maximum tokens of a completion."""
TIE = 1e-4
"""Largest gap of logits at the first different token that counts as a tie."""


@dataclass
class GreedyReference:
    """generate() on single prompts, each run once with `longest` tokens: greedy tokens are prefix-stable."""

    model: PreTrainedModel
    longest: int
    penalty: float = 1.0
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def tokens(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """Return the new tokens of generate(max_new_tokens=max_tokens)."""
        assert max_tokens <= self.longest
        if prompt not in self._known:
            ids = torch.tensor([prompt], device=self.model.device)
            with torch.inference_mode():
                full = self.model.generate(  # type: ignore[operator]  # models have it from a class beside this one
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.longest,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    repetition_penalty=self.penalty,
                )
            self._known[prompt] = full[0, len(prompt) :].tolist()
        return self._known[prompt][:max_tokens]

    def gap(self, prompt: tuple[int, ...], ours: list[int], theirs: list[int]) -> float:
        """Return how far the logit of our token is below that of theirs at the first different one."""
        same = next(index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        ids = torch.tensor([[*prompt, *theirs[:same]]], device=self.model.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids).logits[:, -1].float()
        processed = RepetitionPenaltyLogitsProcessor(self.penalty)(ids, logits)[0]
        return float(processed[theirs[same]] - processed[ours[same]])


@dataclass
class Tally:
    """What was compared. ties: requests whose tokens differ from generate()'s by a tie. preempted: preemptions."""

    requests: int = 0
    tokens: int = 0
    ties: int = 0
    preempted: int = 0
    evicted_pages: int = 0


def compare(
    engine: Engine, requests: list[GenerationRequest], references: dict[float, GreedyReference], tally: Tally
) -> None:
    """Compare every completion with the reference of its repetition penalty; an AssertionError shows both."""
    done = run(engine, [engine.builder.build(request) for request in requests])
    for request, completion in zip(requests, done.results, strict=True):
        assert isinstance(completion, Completion), completion
        compare_one(engine, request, completion, references[request.repetition_penalty], tally)
    tally.preempted += sum(step.preempted for step in done.steps)
    tally.evicted_pages += sum(step.cache.evicted_pages for step in done.steps if step.cache is not None)


def compare_one(
    engine: Engine, request: GenerationRequest, completion: Completion, reference: GreedyReference, tally: Tally
) -> None:
    """Compare a completion with the reference; an AssertionError shows both."""
    ours = tokens_in(completion.text)
    if completion.finish_reason == "stop":
        # It has no text.
        ours += engine.defaults.end_tokens
    theirs = reference.tokens(request.prompt_tokens, request.max_tokens)
    tally.requests += 1
    tally.tokens += len(theirs)
    assert completion.num_input_tokens == len(request.prompt_tokens)
    assert completion.num_output_tokens == len(ours)
    if ours != theirs:
        gap = reference.gap(request.prompt_tokens, ours, theirs)
        assert gap <= TIE, f"{request}\nours {ours}\ntheirs {theirs}"
        tally.ties += 1


def pool(tokenizer: Tokenizer, size: int, randomness: random.Random) -> list[tuple[int, ...]]:
    """Random prompts, half of them short; every fourth begins with the prefix of a long one."""
    short = [random_prompt(tokenizer, range(2, 24), randomness)[1] for _ in range(size // 2)]
    long = [random_prompt(tokenizer, range(1, 201), randomness)[1] for _ in range(size - len(short))]
    return [randomness.choice(long) + prompt if at % 2 else prompt for at, prompt in enumerate(short)] + long


def mix(
    prompts: list[tuple[int, ...]], rows: int, randomness: random.Random, penalty: float = 1.0
) -> list[GenerationRequest]:
    """Requests of one batch, with prompts from a pool."""
    return [
        GenerationRequest(
            prompt="",
            prompt_tokens=randomness.choice(prompts),
            max_tokens=randomness.randint(1, LONGEST),
            repetition_penalty=penalty,
        )
        for _ in range(rows)
    ]
