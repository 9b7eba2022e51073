"""Raw inputs as Triton passes them, and a parser with the embedded tokenizer and small limits."""

from typing import Any

import numpy as np
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.api.request_parser import GenerationRequest, RawInputs, RequestParser
from llama_engine.text.tokenizer import Tokenizer
from numpy.typing import NDArray

MAX_MODEL_LEN = 64

DTYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("text_input", "stop_words", "bad_words"), np.object_),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k"), np.int32),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), np.float32),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), np.float32),
    "seed": np.uint64,
    "exclude_input_in_output": np.bool_,
}

DEFAULTS = GenerationDefaults(
    max_tokens=16, min_tokens=2, temperature=0.5, top_k=7, top_p=0.75, repetition_penalty=1.25
)


def tensor(name: str, rows: list[Any]) -> NDArray[Any]:
    """Return an input in the contract's type and shape. rows: a value or a list of words per row."""
    lists = [row if isinstance(row, list) else [row] for row in rows]
    encoded = [[item.encode() if isinstance(item, str) else item for item in row] for row in lists]
    return np.array(encoded, dtype=DTYPES[name]).reshape(len(rows), -1)


def raw(**values: object) -> RawInputs:
    """Return the inputs of a request of one row."""
    return {name: tensor(name, [value]) for name, value in {"text_input": "def f", **values}.items()}


def parser(tokenizer: Tokenizer, defaults: GenerationDefaults = DEFAULTS) -> RequestParser:
    return RequestParser(tokenizer, defaults, MAX_MODEL_LEN)


def parse_one(tokenizer: Tokenizer, **values: object) -> GenerationRequest:
    (request,) = parser(tokenizer).parse(raw(**values))
    return request
