"""Structured output over Triton: every text conforms to its guide, and a bad guide harms its own request alone.

How a guide goes together with stop strings, bad words, min_tokens and choices is tested in
tests/engine/test_guided_generation.py, and what is refused in tests/engine/test_guide_checking.py.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jsonschema
from server.clients import WIRES, Answer, ask, assert_clean, at_once
from server.servers import is_decoupled
from server.streams import STREAM_WIRES, grpc_stream, whole
from triton_local.server import LocalTriton

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "zip": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["big", "old"]}, "maxItems": 2},
    },
    "required": ["city", "zip", "tags"],
    "additionalProperties": False,
}
CALL = {
    "type": "structural_tag",
    "format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<call=f>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</call>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "."}, {"type": "regex", "pattern": "[!?]{2}"}]},
    ]},
}  # fmt: skip


def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _is_city(text: str) -> bool:
    jsonschema.validate(json.loads(text), CITY)
    return True


def _is_call(text: str) -> bool:
    tag = re.fullmatch(r"<call=f>(.*)</call>(\.|[!?]{2})", text, re.DOTALL)
    return tag is not None and _is_city(tag[1])


class Guided(NamedTuple):
    """A guide and the check of a whole text."""

    kind: str
    guide: str
    conforms: Callable[[str], object]

    def inputs(self, seed: int, **more: object) -> dict[str, object]:
        """Return a request that is pushed to end before max_tokens."""
        guide = {"guided_decoding_guide": self.guide} if self.guide else {}
        return {
            "text_input": "Return", "max_tokens": 400, "temperature": 1.0, "seed": seed, "frequency_penalty": 0.5,
            "guided_decoding_guide_type": self.kind, **guide, **more,
        }  # fmt: skip


SCHEMA = Guided("json_schema", json.dumps(CITY), _is_city)
KINDS = (
    Guided("json", "", _is_object),
    SCHEMA,
    Guided("regex", r"^\d{4}-\d\d-\d\d( or never)?$", partial(re.fullmatch, r"[0-9]{4}(-[0-9]{2}){2}( or never)?")),
    # GBNF, then Lark.
    Guided("ebnf_grammar", 'root ::= "(" root ")" | [a-c]{2,3}', partial(re.fullmatch, r"\(*[a-c]{2,3}\)*")),
    Guided(
        "ebnf_grammar", 'start: WORD (", " WORD){1,2}\nWORD: /[a-d]{1,3}/', partial(re.fullmatch, "[a-d]+(, [a-d]+)+")
    ),
    Guided("structural_tag", json.dumps(CALL), _is_call),
)

GOOD = [
    {"text_input": f"Neighbour {index}", "max_tokens": 60, "min_tokens": 60, "temperature": 1.0, "seed": index}
    for index in range(4)
]


def _endless(count: int) -> str:
    """Return a schema whose automaton is exponential: more than 10 s and 1 GB."""
    patterns = [{"type": "string", "pattern": f".*{letter}.{{{count}}}"} for letter in string.ascii_lowercase]
    return json.dumps({"allOf": patterns})


HOSTILE = {
    "exponential": ("json_schema", _endless(20), "takes more than 2 s"),
    "nested": ("json_schema", '{"items":' * 10_000 + "true" + "}" * 10_000, "guided_decoding_guide "),
    "groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000, "nested parentheses"),
    "ambiguous": ("ebnf_grammar", "root ::= root root | [a-z]", "can't be followed to its end"),
    "a megabyte": ("regex", "a" * 1_000_000, "at most 131072 bytes"),
}


def _answer(server: LocalTriton, inputs: dict[str, object], number: int = 0) -> Answer:
    """Ask over one of the endpoints that the server has."""
    if is_decoupled(server):
        return whole(server, STREAM_WIRES[number % 2], inputs)
    return ask(server, WIRES[number % 4], **inputs)


def test_texts_conform_to_their_guides_whatever_is_beside_them(either: LocalTriton) -> None:
    requests = [(guided, guided.inputs(seed)) for seed in range(4) for guided in KINDS]
    jobs = [partial(_answer, either, inputs, number) for number, (_, inputs) in enumerate(requests)]
    good = [_answer(either, inputs) for inputs in GOOD]
    answers = at_once([*jobs, *(partial(_answer, either, inputs) for inputs in GOOD)])
    assert answers[len(jobs) :] == good
    finished = set()
    for (guided, inputs), answer in zip(requests, answers, strict=False):
        if answer.finish_reason == "stop":
            assert guided.conforms(answer.text), answer
            finished.add(guided)
        else:
            assert answer.num_output_tokens == inputs["max_tokens"]
    assert len(finished) == len(KINDS), finished
    # Alone as among others.
    assert _answer(either, requests[1][1]) == answers[1]


def _refused(server: LocalTriton, name: str) -> str:
    """Ask with a hostile guide; return the error's message."""
    kind, guide, _ = HOSTILE[name]
    # An ambiguous grammar fails after some tens of tokens.
    length = {"max_tokens": 400, "min_tokens": 400, "ignore_eos": True}
    inputs = {"text_input": name, **length, "guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    return str(grpc_stream(server, inputs).error)


def test_hostile_guides_are_refused_while_good_requests_go_on_unharmed(streaming: LocalTriton) -> None:
    alone = [_answer(streaming, inputs) for inputs in GOOD]
    known = _answer(streaming, SCHEMA.inputs(2))
    assert _is_city(known.text)
    with ThreadPoolExecutor(len(HOSTILE)) as pool:
        refusals = {name: pool.submit(_refused, streaming, name) for name in HOSTILE}
        beside = 0
        while not all(refusal.done() for refusal in refusals.values()) or not beside:
            jobs = [partial(_answer, streaming, inputs, number) for number, inputs in enumerate(GOOD)]
            *answers, guided = at_once([*jobs, partial(_answer, streaming, SCHEMA.inputs(2))])
            assert answers == alone
            assert guided == known
            beside += 1
        for name, refusal in refusals.items():
            assert HOSTILE[name][2] in refusal.result(), name
            assert "guided_decoding_guide" in refusal.result()
            assert_clean(refusal.result())
