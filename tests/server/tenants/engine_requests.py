"""Requests to Triton's own ports, each with canaries in everything that a client writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from server.tenants.asked import Asked
from server.tenants.canaries import Phrases, canary, tokenizer

LLAMA, UNARY = "llama", "llama_unary"
WAYS = ("generate", "generate_stream", "infer", "unary", "stream", "shared stream")
_TARGETS = {
    "generate": f"/v2/models/{LLAMA}/generate",
    "generate_stream": f"/v2/models/{LLAMA}/generate_stream",
    "infer": f"/v2/models/{UNARY}/infer",
    "unary": UNARY,
    "stream": LLAMA,
    "shared stream": LLAMA,
}
_STREAMS = ("generate_stream", "stream", "shared stream")

Draw = random.Random
Change = Callable[[Asked, Draw], Asked]


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
        _TARGETS[way],
        {
            "text_input": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": draw.choice([0.0, 0.0, 1.0]),
            "seed": draw.getrandbits(63),
            # Both in one test: streams of every token, and of joined ones.
            **({"stream": True, "stream_interval_ms": draw.choice([0, 0, 20])} if way in _STREAMS else {}),
        },
        _headers(number),
        # Now and then both tenants give one id; a stream that requests share tells them apart by it.
        {"id": canary(number, "id") if way == "shared stream" or draw.random() < 0.9 else "the same id"},
        prompt_tokens=len(tokenizer().encode(prompt).ids),
        tokens=tokens,
    )
    changes = [*_CHANGES, _fault] if faults else _CHANGES
    if way == "shared stream":
        # Its client can't cancel one of them.
        changes = [change for change in changes if change is not _leave]
    return draw.choice(changes)(asked, draw)


def _headers(number: int) -> dict[str, str]:
    mark = canary(number, "header")
    return {
        "authorization": f"Bearer {canary(number, 'key')}",
        "x-tenant": mark,
        "user-agent": mark,
        "cookie": f"session={mark}",
        "x-request-id": mark,
    }


def _with(asked: Asked, what: str, **inputs: object) -> Asked:
    return replace(asked, what=what, body={**asked.body, **inputs})


def _refused(asked: Asked, what: str, **inputs: object) -> Asked:
    return replace(_with(asked, what, **inputs), tokens=None, prompt_tokens=None)


def _plain(asked: Asked, draw: Draw) -> Asked:
    return asked


def _echo(asked: Asked, draw: Draw) -> Asked:
    return replace(
        _with(asked, "prompt in the text", exclude_input_in_output=False), says=canary(asked.number, "prompt")
    )


def _words(asked: Asked, draw: Draw) -> Asked:
    number = asked.number
    changed = _with(
        asked,
        "stop and bad words",
        stop_words=[canary(number, "stop"), draw.choice([" the", "."])],
        bad_words=[canary(number, "bad"), draw.choice([" list", "e"])],
        min_tokens=0,
        embedding_bias_words=[canary(number, "bias")],
        embedding_bias_weights=[draw.uniform(-5, 5)],
    )
    return replace(changed, tokens=None)


def _choices(asked: Asked, draw: Draw) -> Asked:
    return replace(_with(asked, "choices", n=draw.randint(2, 3), temperature=1.0), tokens=None)


def _log_probs(asked: Asked, draw: Draw) -> Asked:
    most = draw.randint(0, 3)
    return _with(asked, "log probabilities", return_log_probs=True, num_logprobs=most, prompt_logprobs=most)


def _metrics(asked: Asked, draw: Draw) -> Asked:
    return _with(asked, "metrics", return_perf_metrics=True)


def _one_token(asked: Asked, draw: Draw) -> Asked:
    """Allow one token alone: the text shows whose request it was."""
    size = tokenizer().get_vocab_size()
    words = [token for token in draw.sample(range(300, size), 20) if tokenizer().decode([token]).isalpha()]
    token = words[0]
    said = tokenizer().decode([token])
    if draw.random() < 0.5:
        return replace(_with(asked, "one allowed token", allowed_token_ids=[token]), says=said)
    return replace(
        _with(asked, "one biased token", logit_bias=json.dumps({str(token): 100}), temperature=0.0), says=said
    )


def _guide(asked: Asked, draw: Draw) -> Asked:
    """Make the model write the request's own canary: a guide of another request would make it write that one's."""
    mark = canary(asked.number, "guide")
    kind, guide = draw.choice(
        [
            ("regex", f"{mark}(yes|no)"),
            ("json_schema", json.dumps({"const": mark})),
            ("ebnf_grammar", f'root ::= "{mark}" ("a" | "b")'),
            (
                "structural_tag",
                json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": mark}}),
            ),
        ]
    )
    fields = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide, "max_tokens": 32, "min_tokens": 0}
    return replace(_with(asked, f"guide, {kind}", **fields), says=mark, tokens=None)


def _same_guide(asked: Asked, draw: Draw) -> Asked:
    """Use a guide that the other tenant uses, too: what is kept of it must not be another text's state."""
    guide = draw.choice(["(yes|no)( (yes|no)){3}", "[a-z ]{4,40}"])
    fields = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": guide, "max_tokens": 16, "min_tokens": 0}
    return replace(_with(asked, "guide of both", **fields), tokens=None)


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
    fields = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    return _refused(asked, "refused guide", **fields)


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
    return _refused(asked, "refused value", **{field: value})


def _refused_parameter(asked: Asked, draw: Draw) -> Asked:
    """Send what the model refuses as a request parameter, and what contradicts an input, such as another prompt."""
    mark, prompt = canary(asked.number, "value"), canary(asked.number, "prompt")
    names = [(mark, "1"), ("temprature", mark), ("max_tokens", mark), ("stop_words", mark), ("text_input", prompt)]
    changed = _refused(asked, "refused parameter", stop_words=["other"])
    return replace(changed, parameters={**changed.parameters, **dict([draw.choice(names)])})


def _forged(asked: Asked, draw: Draw) -> Asked:
    """Pretend to be llama_unary."""
    name = draw.choice([f"{draw.getrandbits(128):032x}", "0" * 32, "../../tmp/" + canary(asked.number, "value")])
    forged = json.dumps(
        draw.choice([[name, {"seed": 5}], [name, {}, True], [name, {canary(asked.number, "value"): 1}]])
    )
    changed = _refused(asked, "forged parameter")
    return replace(changed, parameters={**changed.parameters, "llama_unary": forged})


def _leave(asked: Asked, draw: Draw) -> Asked:
    changed = _refused(asked, "cancelled", max_tokens=300, min_tokens=300)
    return replace(changed, leaves=True, repeatable=False)


def _fault(asked: Asked, draw: Draw) -> Asked:
    """Fail in the middle of a step, or before it; `chunk` of streams only."""
    kinds = ["step", "parse"] + ["chunk"] * (asked.way in _STREAMS)
    prompt = f"{asked.body['text_input']} fault {draw.choice(kinds)}"
    return _refused(asked, "fault", text_input=prompt, max_tokens=8, min_tokens=8)


_CHANGES: list[Change] = [
    *(_plain, _plain, _echo, _echo, _words, _words, _choices, _log_probs, _metrics, _one_token, _one_token, _guide),
    *(_same_guide, _refused_guide, _refused_value, _refused_parameter, _forged, _leave),
]
