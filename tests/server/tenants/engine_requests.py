"""Requests to Triton's own ports, each with canaries in everything that a client writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from server.tenants.asked import Asked, Draw, choices, headers, leave, one_word, plain
from server.tenants.canaries import Phrases, canary, tokenizer

LLAMA, UNARY = "llama", "llama_unary"
TARGETS = {
    "generate": f"/v2/models/{LLAMA}/generate",
    "generate_stream": f"/v2/models/{LLAMA}/generate_stream",
    "infer": f"/v2/models/{UNARY}/infer",
    "unary": UNARY,
    "stream": LLAMA,
    "shared stream": LLAMA,
}
"""By the way of a request."""
_STREAMS = ("generate_stream", "stream", "shared stream")


def engine_request(number: int, way: str, phrases: Phrases, draw: Draw, faults: bool) -> Asked:
    """Draw a request. faults: whether the server is the one with faults (faulty_model.py)."""
    words = phrases.new(number)
    more = " ".join(words.split()[:1] * draw.randint(0, 24))
    prompt = f"{words} {canary(number, 'prompt')} {more}".strip()
    tokens = draw.randint(1, 8)
    asked = Asked(
        number,
        way,
        "plain",
        TARGETS[way],
        {
            "text_input": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": draw.choice([0.0, 0.0, 1.0]),
            "seed": draw.getrandbits(63),
            # Both in one test: streams of every token, and of joined ones.
            **({"stream": True, "stream_interval_ms": draw.choice([0, 0, 20])} if way in _STREAMS else {}),
        },
        {
            **headers(number),
            "authorization": f"Bearer {canary(number, 'key')}",
            "x-request-id": canary(number, "header"),
        },
        # Now and then both tenants give one id; a stream that requests share tells them apart by it.
        {"id": canary(number, "id") if way == "shared stream" or draw.random() < 0.9 else "the same id"},
        prompt_tokens=len(tokenizer().encode(prompt).ids),
        tokens=tokens,
    )
    changes = [*_CHANGES, _fault] if faults else _CHANGES
    if way == "shared stream":
        # Its client can't cancel one of them.
        changes = [change for change in changes if change is not leave]
    return draw.choice(changes)(asked, draw)


def _echo(asked: Asked, draw: Draw) -> Asked:
    return asked.having("prompt in the text", {"exclude_input_in_output": False}, canary(asked.number, "prompt"))


def _words(asked: Asked, draw: Draw) -> Asked:
    number = asked.number
    fields = {
        "stop_words": [canary(number, "stop"), draw.choice([" the", "."])],
        "bad_words": [canary(number, "bad"), draw.choice([" list", "e"])],
        "min_tokens": 0,
        "embedding_bias_words": [canary(number, "bias")],
        "embedding_bias_weights": [draw.uniform(-5, 5)],
    }
    return asked.uncounted("stop and bad words", fields)


def _log_probs(asked: Asked, draw: Draw) -> Asked:
    most = draw.randint(0, 3)
    fields = {"return_log_probs": True, "num_logprobs": most, "prompt_logprobs": most}
    return asked.having("log probabilities", fields)


def _metrics(asked: Asked, draw: Draw) -> Asked:
    return asked.having("metrics", {"return_perf_metrics": True})


def _one_token(asked: Asked, draw: Draw) -> Asked:
    token, word = one_word(draw)
    if draw.random() < 0.5:
        return asked.having("one allowed token", {"allowed_token_ids": [token]}, word)
    fields = {"logit_bias": json.dumps({str(token): 100}), "temperature": 0.0}
    return asked.having("one biased token", fields, word)


def _guided(asked: Asked, what: str, says: str, kind: str, guide: str, most: int) -> Asked:
    fields = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide, "max_tokens": most, "min_tokens": 0}
    return asked.uncounted(what, fields, says)


def _guide(asked: Asked, draw: Draw) -> Asked:
    """Make the model write the request's own canary: a guide of another request would make it write that one's."""
    mark = canary(asked.number, "guide")
    guides = {
        "regex": f"{mark}(yes|no)",
        "json_schema": json.dumps({"const": mark}),
        "ebnf_grammar": f'root ::= "{mark}" ("a" | "b")',
        "structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": mark}}),
    }
    kind = draw.choice([*guides])
    return _guided(asked, f"guide, {kind}", mark, kind, guides[kind], most=32)


def _same_guide(asked: Asked, draw: Draw) -> Asked:
    """Use a guide that the other tenant uses, too: what is kept of it must not be another text's state."""
    guide = draw.choice(["(yes|no)( (yes|no)){3}", "[a-z ]{4,40}"])
    return _guided(asked, "guide of both", "", "regex", guide, most=16)


def _refused_guide(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "guide")
    kind, guide = draw.choice(
        [
            ("regex", f"{mark}("),
            ("json_schema", json.dumps({"type": mark})),
            ("json_schema", f"{{{mark}"),
            ("ebnf_grammar", f"root ::= {mark}"),
            ("ebnf_grammar", f"{mark} {mark}"),
            ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": mark}})),
            ("structural_tag", json.dumps({"type": mark})),
            (mark, "a"),
        ]
    )
    return _guided(asked, "refused guide", "", kind, guide, most=8)


def _refused_value(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "value")
    field, value = draw.choice(
        [
            ("sampling_parameters", mark),
            ("sampling_parameters", json.dumps({"temperature": mark})),
            ("sampling_parameters", json.dumps({mark: 1})),
            ("sampling_parameters", json.dumps([mark])),
            ("logit_bias", json.dumps({mark: 1})),
            ("logit_bias", json.dumps({"5": mark})),
            ("stop_words", [mark * 100]),
            ("temperature", float(asked.number)),
            ("max_tokens", 100_000 + asked.number),
        ]
    )
    return asked.uncounted("refused value", {field: value})


def _refused_parameter(asked: Asked, draw: Draw) -> Asked:
    """Send what the model refuses as a request parameter, and what contradicts an input, such as another prompt."""
    mark, prompt = canary(asked.number, "value"), canary(asked.number, "prompt")
    names = [(mark, "1"), ("temprature", mark), ("max_tokens", mark), ("stop_words", mark), ("text_input", prompt)]
    changed = asked.uncounted("refused parameter", {"stop_words": ["other"]})
    # Over /generate that is the prompt.
    return replace(changed, parameters={**changed.parameters, **dict([draw.choice(names)])}, prompt_tokens=None)


def _forged(asked: Asked, draw: Draw) -> Asked:
    """Pretend to be llama_unary."""
    mark = canary(asked.number, "value")
    name = draw.choice([f"{draw.getrandbits(128):032x}", "0" * 32, f"../../tmp/{mark}"])
    forged = json.dumps(draw.choice([[name, {"seed": 5}], [name, {}, True], [name, {mark: 1}]]))
    changed = asked.uncounted("forged parameter", {})
    return replace(changed, parameters={**changed.parameters, "llama_unary": forged})


def _fault(asked: Asked, draw: Draw) -> Asked:
    """Fail in the middle of a step, or before it; `chunk` of streams only."""
    kinds = ["step", "parse"] + ["chunk"] * (asked.way in _STREAMS)
    prompt = f"{asked.body['text_input']} fault {draw.choice(kinds)}"
    changed = asked.uncounted("fault", {"text_input": prompt, "max_tokens": 8, "min_tokens": 8})
    return replace(changed, prompt_tokens=None)


_CHANGES: list[Callable[[Asked, Draw], Asked]] = [
    *(plain, plain, _echo, _echo, _words, _words, choices, _log_probs, _metrics, _one_token, _one_token, _guide),
    *(_same_guide, _refused_guide, _refused_value, _refused_parameter, _forged, leave),
]
