"""Requests with receipts, as the model parses them, and verifications by an engine.

As a program it writes the receipts that `test_receipt_contract` verifies: `python -m engine.receipts`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.engines import engine_of, load
from engine.parsing import tensor
from engine.prompts import random_prompt
from engine.transcripts import build
from llama_engine.api.generation_request import GenerationRequest
from llama_engine.api.request_parser import RequestParser
from llama_engine.engine import Engine
from llama_engine.optional_outputs import LogProbsWriter, Span, optional_outputs
from llama_engine.sequence import Sequence

Content = dict[str, Any]

GOLDEN = Path(__file__).with_name("receipts.json")
"""Receipts of the embedded checkpoint, each with the cumulative log probability of its tokens."""

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

GOLDEN_INPUTS: tuple[Content, ...] = (
    {"text_input": "Return a list of", "max_tokens": 12, "temperature": 0.0, "seed": 1},
    {"text_input": "class Node:", "max_tokens": 12, "temperature": 1.0, "seed": 7, "top_p": 0.9, "min_tokens": 12},
    {"text_input": "A dictionary", "max_tokens": 12, "seed": 3, "temperature": 0.8, "repetition_penalty": 1.3,
     "frequency_penalty": 0.5, "logit_bias": '{"300": 2.5}', "bad_words": ["e"]},
    {"text_input": "A list", "max_tokens": 16, "seed": 9, "temperature": 1.0,
     "guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(NUMBER)},
)  # fmt: skip

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.875, "end_id": 270},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "frequency_penalty": 0.5},
    {"temperature": 1.0, "n": 3, "presence_penalty": 1.0, "stop_words": [".", "\n"]},
    {"bad_words": ["e", " the"], "presence_penalty": -0.5, "ignore_eos": True},
    {"temperature": 1.1, "min_p": 0.05, "logit_bias": '{"5": 3, "300": -50.5}', "stop_token_ids": [270, 300]},
    {"embedding_bias_words": [" list", " of"], "embedding_bias_weights": [4.0, -0.0], "temperature": 0.5},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{3,9}( [0-9]+)*", "temperature": 1.0},
    {"allowed_token_ids": list(range(200, 400)), "temperature": 1.5},
    {"top_p": 0.0, "temperature": 0.7},
)


def random_inputs(engine: Engine, randomness: random.Random) -> Content:
    """Return the inputs of a request with random sizes and one of KINDS."""
    size, max_tokens = randomness.choice((1, 3, 8, 20, 50)), randomness.randint(1, 30)
    prompt = random_prompt(engine.tokenizer, range(size, size + 1), randomness)[1]
    return {
        "input_ids": list(prompt), "max_tokens": max_tokens, "min_tokens": randomness.choice((0, max_tokens // 2)),
        "seed": randomness.getrandbits(64), "receipt": True, **randomness.choice(KINDS),
    }  # fmt: skip


def parse(engine: Engine, **inputs: Any) -> list[GenerationRequest]:  # noqa: ANN401 - a value of any parameter
    """Parse a request of one row, and split it into its choices."""
    parser = RequestParser(engine.tokenizer, engine.defaults, engine.max_model_len, origin=engine.origin)
    (request,) = parser.parse({name: tensor(name, [value]) for name, value in inputs.items()})
    return request.choices()


def finished(engine: Engine, requests: Iterable[GenerationRequest]) -> list[Sequence]:
    """Run the requests with their guides; return their sequences."""
    sequences = [build(engine, request) for request in requests]
    waiting = deque(sequences)
    while waiting or engine.used_slots:
        while waiting and engine.can_admit(waiting[0]):
            engine.add(waiting.popleft())
        engine.step()
    return sequences


def output(engine: Engine, sequence: Sequence, name: str) -> str:
    """Return an optional output of a finished sequence."""
    spans = [Span(sequence, 0, sequence.num_output_tokens)]
    text: str = optional_outputs(spans, LogProbsWriter(engine.tokenizer), final=True)[name][0].decode()
    return text


def receipts_of(engine: Engine, *inputs: Content) -> list[str]:
    """Generate; return the receipts of all choices."""
    requests = [request for row in inputs for request in parse(engine, **row)]
    return [output(engine, sequence, "receipt") for sequence in finished(engine, requests)]


def verify(engine: Engine, *receipts: str, beside: Iterable[GenerationRequest] = ()) -> list[Content]:
    """Verify receipts, with other requests beside them."""
    requests = [request for receipt in receipts for request in parse(engine, verify_receipt=receipt)]
    sequences = finished(engine, [*requests, *beside])[: len(receipts)]
    return [json.loads(output(engine, sequence, "verification")) for sequence in sequences]


def rehashed(receipt: str, **changed: object) -> str:
    """Return the receipt with other values of fields or parameters, and the hash of these."""
    content = json.loads(receipt)
    del content["hash"]
    of_parameters = {name: value for name, value in changed.items() if name not in content}
    content["parameters"] |= of_parameters
    content |= {name: value for name, value in changed.items() if name in content}
    # As docs/exact-int8.md says.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**content, "hash": hashlib.sha256(text.encode()).hexdigest()}, ensure_ascii=False)


def golden(engine: Engine) -> list[Content]:
    """Return what GOLDEN has, computed by this engine."""
    inputs = [{**row, "receipt": True, "return_log_probs": True} for row in GOLDEN_INPUTS]
    sequences = finished(engine, [request for row in inputs for request in parse(engine, **row)])
    receipts = [json.loads(output(engine, sequence, "receipt")) for sequence in sequences]
    sums = [sequence.cum_log_probs[-1] for sequence in sequences]
    return [{"receipt": receipt, "cum_log_prob": total} for receipt, total in zip(receipts, sums, strict=True)]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(engine_of(load("int8")))) + "\n")
