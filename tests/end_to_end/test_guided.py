"""Structured output over Triton: texts conform to their guides, and a hostile guide harms its own request alone.

Every kind of guide, and what is refused, is tested in tests/engine/test_guided*.py and test_guide_checking.py.
"""

from __future__ import annotations

import json
import re
import string
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from end_to_end.servers import is_decoupled
from end_to_end.streams import STREAM_WIRES, grpc_stream, whole
from end_to_end.wires import WIRES, Answer, ask, assert_clean, at_once
from triton_local.server import LocalTriton

SCHEMA = {
    "type": "object",
    "properties": {"zip": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["zip"],
    "additionalProperties": False,
}
GUIDES = [
    ("json_schema", json.dumps(SCHEMA), r'\{\s*"zip"\s*:\s*[0-9]{1,5}\s*\}'),
    ("regex", r"^\d{4}-\d\d-\d\d( or never)?$", r"[0-9]{4}(-[0-9]{2}){2}( or never)?"),
    ("ebnf_grammar", 'root ::= "(" root ")" | [a-c]{2,3}', r"\(*[a-c]{2,3}\)*"),
]
"""Type, guide, and the pattern of a whole text."""

# An automaton of more than 10 s and 1 GB; a grammar that fails after some tens of tokens.
EXPONENTIAL = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*{letter}.{{20}}"} for letter in string.ascii_lowercase]}
)
HOSTILE = [
    ("json_schema", EXPONENTIAL, "takes more than 2 s"),
    ("ebnf_grammar", "root ::= root root | [a-z]", "can't be followed to its end"),
]

GOOD = [
    {"text_input": f"Neighbour {index}", "max_tokens": 60, "min_tokens": 60, "temperature": 1.0, "seed": index}
    for index in range(4)
]


def _guided(kind: str, guide: str, **more: object) -> dict[str, object]:
    return {"text_input": "Return", "guided_decoding_guide_type": kind, "guided_decoding_guide": guide, **more}


def _answer(server: LocalTriton, inputs: dict[str, object], number: int = 0) -> Answer:
    """Ask over one of the endpoints that the server has."""
    if is_decoupled(server):
        return whole(server, STREAM_WIRES[number % 2], inputs)
    return ask(server, WIRES[number % 4], **inputs)


def test_texts_conform_to_their_guides_beside_other_requests(either: LocalTriton) -> None:
    requests = [
        (pattern, _guided(kind, guide, seed=seed, max_tokens=400, temperature=1.0, frequency_penalty=0.5))
        for seed in range(3)
        for kind, guide, pattern in GUIDES
    ]
    good = [_answer(either, inputs) for inputs in GOOD]
    jobs = [partial(_answer, either, inputs, number) for number, (_, inputs) in enumerate(requests)]
    answers = at_once([*jobs, *(partial(_answer, either, inputs) for inputs in GOOD)])
    assert answers[len(jobs) :] == good
    ended = {pattern for (pattern, _), answer in zip(requests, answers, strict=False) if answer.finish_reason == "stop"}
    assert len(ended) == len(GUIDES)
    for (pattern, _), answer in zip(requests, answers, strict=False):
        assert answer.finish_reason == "length" or re.fullmatch(pattern, answer.text), answer


def test_hostile_guides_are_refused_while_good_requests_go_on(streaming: LocalTriton) -> None:
    alone = [_answer(streaming, inputs) for inputs in GOOD]
    hostile = [
        _guided(kind, guide, max_tokens=400, min_tokens=400, ignore_eos=True) for kind, guide, _ in HOSTILE
    ]  # fmt: skip
    with ThreadPoolExecutor(len(hostile)) as pool:
        refusals = [pool.submit(grpc_stream, streaming, inputs) for inputs in hostile]
        beside = 0
        while not all(refusal.done() for refusal in refusals) or not beside:
            jobs = [partial(_answer, streaming, inputs, number) for number, inputs in enumerate(GOOD)]
            assert at_once(jobs) == alone
            beside += 1
    for (_, _, message), refusal in zip(HOSTILE, refusals, strict=True):
        error = str(refusal.result().error)
        assert message in error
        assert "guided_decoding_guide" in error
        assert_clean(error)
