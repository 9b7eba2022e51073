"""Prompts, parts of the language reference that every Python contains, and requests made of them."""

import random
from functools import cache
from pydoc_data.topics import topics

from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer


@cache
def reference_text() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


def random_prompt(tokenizer: Tokenizer, lengths: range, randomness: random.Random) -> tuple[str, tuple[int, ...]]:
    """Return a prompt with a random number of tokens from `lengths`, as text and as tokens."""
    length = randomness.choice(lengths)
    start = randomness.randrange(len(reference_text()) - 12 * length)
    tokens = tokenizer.encode(reference_text()[start : start + 12 * length])[:length]
    text = tokenizer.pretrained.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text, tokens


def request_of(
    checkpoint: LoadedModel, seed: int, size: int | range = range(3, 60), max_tokens: int = 8
) -> GenerationRequest:
    """Return a request of `size` prompt tokens that generates exactly `max_tokens`, sampled with every penalty.

    Its text shows every fault: a token counted twice, or a neighbour's parameters, changes what follows.
    """
    sizes = size if isinstance(size, range) else range(size, size + 1)
    return GenerationRequest(
        prompt="", prompt_tokens=random_prompt(checkpoint.tokenizer, sizes, random.Random(seed))[1],
        max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.9, top_k=40, seed=seed, frequency_penalty=2.0,
        presence_penalty=0.5, repetition_penalty=1.3,
    )  # fmt: skip


def requests_of(
    checkpoint: LoadedModel, count: int, size: int | range = range(3, 60), max_tokens: int = 8
) -> list[GenerationRequest]:
    return [request_of(checkpoint, seed, size, max_tokens) for seed in range(count)]


def random_request(checkpoint: LoadedModel, randomness: random.Random) -> GenerationRequest:
    """Return a request of random sizes and features, some of them at their neutral values."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.875},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0, "stop_words": (b".", b"\n")},
        {"bad_words": (b"e", b" the"), "presence_penalty": -0.5},
        {"temperature": 1.1, "min_p": 0.05, "logit_bias": ((5, 3.0), (300, -50.0)), "stop_token_ids": (270,)},
    ]
    max_tokens, size = randomness.randint(1, 12), randomness.choice((1, 3, 8, 20, 50, 100))
    return GenerationRequest(
        prompt="",
        prompt_tokens=random_prompt(checkpoint.tokenizer, range(size, size + 1), randomness)[1],
        max_tokens=max_tokens,
        min_tokens=randomness.choice((0, max_tokens)),
        seed=randomness.getrandbits(64),
        **randomness.choices(kinds, (4, 4, 4, 4, 1, 1))[0],  # type: ignore[arg-type]  # values are fields
    )


END = 2
"""The embedded checkpoint's end token."""

GUIDES = (
    ("regex", "[a-zäöü€😀 ]{2,14}"),
    ("regex", "(yes|no|perhaps|perhaps not)"),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ("json_schema", '{"enum": ["red", "green", {"blue": [1, 2]}]}'),
    ("json", ""),
    ("ebnf_grammar", 'root ::= [a-z]+ "." | "«" root "»"'),
)
STOPS = (b"the ", b" the object", b"e", b" a", b"ing the", b"``", b".\n\n", b"tion of", b"s are", "ä€".encode(), b"ee")
"""Stop strings and bad words that a text partly has at many places."""


def any_request(checkpoint: LoadedModel, randomness: random.Random) -> GenerationRequest:
    """Return a request with a random value, often its neutral one, of every parameter that an answer depends on."""
    choose, token_bytes = randomness.choice, checkpoint.tokenizer.vocabulary.token_bytes
    max_tokens = randomness.randint(2, 32)
    prompt, prompt_tokens = random_prompt(checkpoint.tokenizer, range(1, 40), randomness)
    kind, guide = choose(GUIDES) if randomness.random() < 0.3 else ("", "")
    # Bytes of characters of several bytes: whole ones, and incomplete ones.
    parts = [(token, 9.0) for token, piece in enumerate(token_bytes) if len(piece) == 1 and piece[0] >= 0x80]
    some = randomness.sample(range(4, len(token_bytes)), 100)
    return GenerationRequest(
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        min_tokens=choose((0, 0, max_tokens // 2, max_tokens)),
        temperature=choose((0.0, 0.0, 0.7, 1.0, 2.0)),
        top_k=choose((0, 0, 3, 40)),
        top_p=choose((1.0, 1.0, 0.9, 0.5)),
        min_p=choose((0.0, 0.0, 0.05)),
        repetition_penalty=choose((1.0, 1.0, 1.3, 0.8)),
        frequency_penalty=choose((0.0, 0.0, 2.0, -0.5)),
        presence_penalty=choose((0.0, 0.0, 0.5, -0.5)),
        logit_bias=choose(((), (), ((END, 3.0),), tuple(parts), tuple((token, 4.0) for token in some[:9]))),
        allowed_token_ids=choose(((), (), (), (*some, END))),
        seed=randomness.getrandbits(64),
        stop_words=tuple(randomness.sample(STOPS, choose((0, 0, 1, 3)))),
        stop_token_ids=choose(((), (), tuple(some[:40]))),
        ignore_eos=choose((False, False, True)),
        bad_words=tuple(randomness.sample(STOPS, choose((0, 0, 0, 2)))),
        guided_decoding_guide_type=kind,
        guided_decoding_guide=guide,
        exclude_input_in_output=choose((True, False)),
        return_log_probs=choose((True, False)),
        num_logprobs=choose((None, None, 0, 3)),
        prompt_logprobs=choose((None, None, 0, 2)),
    )


def any_requests(checkpoint: LoadedModel, count: int, seed: int) -> list[GenerationRequest]:
    randomness = random.Random(seed)
    return [any_request(checkpoint, randomness) for _ in range(count)]
