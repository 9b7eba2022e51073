"""Random requests: greedy ones with generate()'s answer as the expectation, and seeded ones that sample."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from llama_engine.model.loader import Checkpoint
from server.clients import Answer

END = 2
LONGEST = 24


@dataclass
class Greedy:
    """Greedy requests from a pool of prompts, and generate()'s answers to them. ties: differences at a tie so far."""

    checkpoint: Checkpoint
    prompts: Sequence[str]
    ties: int = 0
    _references: dict[float, GreedyReference] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, count: int, randomness: random.Random) -> Greedy:
        """Choose prompts: most are short, one in four is prefilled in several chunks."""
        lengths = [range(1, 24)] * 3 + [range(24, 200)]
        prompts = [random_prompt(checkpoint.tokenizer, lengths[index % 4], randomness)[0] for index in range(count)]
        references = {penalty: GreedyReference(checkpoint, LONGEST, penalty) for penalty in (1.0, 1.3)}
        return cls(checkpoint, [prompt for prompt in prompts if prompt], 0, references)

    def request(self, randomness: random.Random) -> dict[str, object]:
        """Return a request of random prompt, length, stop string and penalty."""
        prompt = randomness.randrange(len(self.prompts))
        request: dict[str, object] = {
            "text_input": self.prompts[prompt],
            "max_tokens": randomness.randint(1, LONGEST),
            "temperature": 0.0,
            # One penalty for each prompt, because a reference costs a run of generate().
            "repetition_penalty": (1.0, 1.3)[prompt % 5 == 0],
            "exclude_input_in_output": randomness.random() < 0.8,
        }
        if randomness.random() < 0.3:
            request["stop_words"] = [randomness.choice(["e", " the", ".", "\n"])]
        return request

    def check(self, request: Mapping[str, object], answer: Answer) -> None:
        """Compare an answer with generate()'s. A difference at a tie is counted, any other raises AssertionError."""
        prompt, limit = str(request["text_input"]), request["max_tokens"]
        tokens = self.checkpoint.tokenizer.encode(prompt)
        reference = self._references[1.0 if request["repetition_penalty"] == 1.0 else 1.3]
        assert isinstance(limit, int)
        words = request.get("stop_words", [])
        assert isinstance(words, list)
        theirs = reference.tokens(tokens, limit)
        expected = self._answer(tokens, theirs, limit, [str(word).encode() for word in words])
        if not request["exclude_input_in_output"]:
            expected = Answer(prompt + expected.text, *list(vars(expected).values())[1:])
        if answer == expected:
            return
        # The first token with a difference.
        same = len(_common(answer.text.removeprefix(prompt), expected.text.removeprefix(prompt)).encode())
        index = next((index for index in range(len(theirs)) if len(self._bytes(theirs[: index + 1])) > same), None)
        if index is not None and reference.is_tie(tokens, [*theirs[:index], -1], theirs):
            self.ties += 1
            return
        raise AssertionError(f"{request}\nours   {answer}\ntheirs {expected}")

    def _answer(self, prompt: Sequence[int], tokens: Sequence[int], limit: int, words: Sequence[bytes]) -> Answer:
        for count in range(1, len(tokens) + 1):
            text = self._bytes(tokens[:count])
            cuts = [text.index(word) for word in words if word in text]
            if cuts:
                return Answer(text[: min(cuts)].decode(errors="replace"), "stop", len(prompt), count)
        reason = "stop" if tokens[-1] == END else "length"
        assert reason == "stop" or len(tokens) == limit
        return Answer(self._bytes(tokens).decode(errors="replace"), reason, len(prompt), len(tokens))

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.checkpoint.tokenizer.vocabulary.token_bytes[token] for token in tokens)


def seeded_request(randomness: random.Random, prompts: Sequence[str]) -> dict[str, object]:
    """Return a request that samples, with random values for every input."""
    return {
        "text_input": randomness.choice(prompts),
        "max_tokens": randomness.randint(1, LONGEST),
        "temperature": randomness.choice([0.5, 0.9, 1.5]),
        "top_k": randomness.choice([0, 5, 50]),
        "top_p": randomness.choice([1.0, 0.9, 0.5]),
        "repetition_penalty": randomness.choice([1.0, 1.25]),
        "frequency_penalty": randomness.choice([0.0, 0.5]),
        "presence_penalty": randomness.choice([0.0, -0.5]),
        "seed": randomness.getrandbits(64),
        "stop_words": randomness.choice([[""], [".", "\n"], ["the"]]),
        "bad_words": randomness.choice([[""], [" the", "e"]]),
        "exclude_input_in_output": randomness.random() < 0.8,
    }


def _common(one: str, other: str) -> str:
    same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return min(one, other, key=len) if same is None else one[:same]
