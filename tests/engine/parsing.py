"""Requests parsed as the model parses them: tensors in the contract's types and shapes, and refusals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from llama_engine.errors import InvalidRequest
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.request.parameters import NAMES, PARAMETERS
from llama_engine.request.parser import RequestParser
from llama_engine.text.tokenizer import Tokenizer
from numpy.typing import NDArray

Values = dict[str, Any]

MAX_MODEL_LEN = 64
DEFAULTS = GenerationDefaults(
    {
        "max_tokens": 16, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25,
        "repetition_penalty": 1.25,
    }
)  # fmt: skip
DTYPES: Mapping[str, type[np.generic]] = {
    "STRING": np.object_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


def dtype_of(name: str) -> type[np.generic]:
    """The type of a field, by its name or alias."""
    return DTYPES[PARAMETERS[NAMES[name]].type]


def tensor(name: str, rows: list[Any]) -> NDArray[Any]:
    """Return an input, [rows, columns]. rows: a value or a list of values per row, strings as str."""
    lists = [row if isinstance(row, list) else [row] for row in rows]
    encoded = [[item.encode() if isinstance(item, str) else item for item in row] for row in lists]
    return np.array(encoded, dtype=dtype_of(name)).reshape(len(rows), -1)


def parse_rows(
    tokenizer: Tokenizer, parameters: Values | None = None, options: Values | None = None, /, **inputs: list[Any]
) -> list[GenerationRequest]:
    """Parse a request. options: the parser's, by their names."""
    parser = RequestParser(tokenizer, DEFAULTS, MAX_MODEL_LEN, **(options or {}))
    return parser.parse({name: tensor(name, rows) for name, rows in inputs.items()}, parameters)


def parse(
    tokenizer: Tokenizer, parameters: Values | None = None, options: Values | None = None, /, **values: object
) -> GenerationRequest:
    """Parse a request of one row, of a prompt that has one if there is none."""
    inputs = values if "input_ids" in values else {"text_input": "def f", **values}
    (request,) = parse_rows(tokenizer, parameters, options, **{name: [value] for name, value in inputs.items()})
    return request


def refusal(
    tokenizer: Tokenizer, parameters: Values | None = None, options: Values | None = None, /, **values: object
) -> str:
    """Return why a request of one row is refused."""
    with pytest.raises(InvalidRequest) as refused:
        parse(tokenizer, parameters, options, **values)
    return str(refused.value)
