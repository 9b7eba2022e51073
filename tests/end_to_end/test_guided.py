"""A hostile guide harms its own request alone.

Texts that conform to every kind of guide are tested in tests/engine/test_guided*.py, over Triton in test_tenants.py.
"""

from __future__ import annotations

import json
import string
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from end_to_end.streams import STREAM_WIRES, grpc_stream, whole
from end_to_end.wires import assert_clean, at_once
from triton_local.server import LocalTriton

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


def test_hostile_guides_are_refused_while_good_requests_go_on(streaming: LocalTriton) -> None:
    alone = [whole(streaming, STREAM_WIRES[0], inputs) for inputs in GOOD]
    hostile = [
        _guided(kind, guide, max_tokens=400, min_tokens=400, ignore_eos=True) for kind, guide, _ in HOSTILE
    ]  # fmt: skip
    with ThreadPoolExecutor(len(hostile)) as pool:
        refusals = [pool.submit(grpc_stream, streaming, inputs) for inputs in hostile]
        beside = 0
        while not all(refusal.done() for refusal in refusals) or not beside:
            jobs = [partial(whole, streaming, STREAM_WIRES[number % 2], inputs) for number, inputs in enumerate(GOOD)]
            assert at_once(jobs) == alone
            beside += 1
    for (_, _, message), refusal in zip(HOSTILE, refusals, strict=True):
        error = str(refusal.result().error)
        assert message in error
        assert "guided_decoding_guide" in error
        assert_clean(error)
