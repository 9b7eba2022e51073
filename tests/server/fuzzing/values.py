"""Hypothesis strategies for what inputs may hold: good values, values at the border, and every wrong kind.

Good ones are short, because they are computed. Large ones stay far below the sizes that end Triton 2.51: bodies of
megabytes, and hundreds of thousands of chunks or of nested lists (docs/limits.md, perf/LOG.md).
"""

from __future__ import annotations

import math
import struct
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from llama_engine.triton.batch_strategy.build import is_built
from server.clients import DTYPES
from server.fuzzing import texts_within

_MOST_ELEMENTS = 2**20
_LONGER = (1, 2, 4, 1000, 2**21, 2**31, 2**32)

DATATYPES = ("BOOL", "UINT8", "UINT64", "INT8", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16")
_FORMATS = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}

_SIZES = (0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))
_EDGES = (2**53 + 1, 2**63, 2**64 - 1, 2**64, 10**40, 0.1, -0.0, 1e-320, 1e308, 3.5e38, math.nan, -math.inf)
_PROMPTS = ("Return a list of", "a", "The class ", "caf\u00e9 \U0001f642", "\u0000", "\ufeff", "</s><s>", "\r\n\r\n")
_SURROGATES = ("\ud800", "a\udfff", "\udc80\ud800", "x\ud83d")
_LARGE = tuple(part * count for part in ("a", "word ", "\u00e9", "\\", '"') for count in (999, 9999))

PARAMETERS = (
    *("binary_data", "binary_data_size", "binary_data_output", "classification", "priority", "timeout", "headers"),
    *("sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "shared_memory_byte_size", "id"),
    *("shared_memory_offset", "triton_enable_empty_final_response", "no such one", ""),
)

DEADLY = "classification"
"""A parameter of an output: Triton 2.51 ends where that is one of texts (docs/security.md)."""

_VALUES: dict[str, tuple[object, ...]] = {
    "BYTES": ([""], ["e"], [" the", "\u00e9", ""], ["x"] * 65, ["x" * 1025]),
    "INT32": (0, 1, 2, 50, -1, 65, 2**31 - 1, -(2**31)),
    "FP32": (0.0, 0.01, 0.5, 0.7, 1.0, 1.3, 2.0, -0.1, -2.0, -2.1, 2.1, 1e38, math.nan, math.inf, -math.inf),
    "UINT64": (0, 2**64 - 1),
    "BOOL": (True, False),
}
"""Good ones, and ones beyond the bounds of some input."""

_Drawn = TypeVar("_Drawn")


def weighted(*choices: tuple[int, SearchStrategy[_Drawn]]) -> SearchStrategy[_Drawn]:
    """Draw from each strategy as often as its weight says; `|` would drop what is there twice."""
    return st.sampled_from([one for weight, one in choices for _ in range(weight)]).flatmap(lambda one: one)


names: SearchStrategy[str] = st.sampled_from([*DTYPES])
sizes: SearchStrategy[int] = st.sampled_from(_SIZES)
shapes: SearchStrategy[list[int]] = st.lists(sizes, max_size=4)
prompts: SearchStrategy[str] = st.sampled_from(_PROMPTS) | st.text(min_size=1, max_size=9)
texts: SearchStrategy[str] = prompts | st.sampled_from(["", *_SURROGATES, *_LARGE]) | st.text(max_size=30)
numbers: SearchStrategy[float] = st.integers(-3, 70) | sizes | st.sampled_from(_EDGES) | st.floats()
anything: SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | names, inner, max_size=4),
    max_leaves=8,
)


part: SearchStrategy[object] = names | texts | shapes | st.sampled_from(DATATYPES) | anything
"""Whatever may stand where a tensor has its name, shape, type or data."""

_of_its_type = st.sampled_from(
    [(name, value) for name, dtype in DTYPES.items() if name != "text_input" for value in _VALUES[dtype]]
)
_wrong = st.tuples(names | st.text(max_size=8), anything)

inputs: SearchStrategy[dict[str, object]] = st.builds(
    lambda prompt, tokens, others: {"text_input": prompt, "max_tokens": tokens, **dict(others)},
    weighted((4, prompts), (1, texts)),
    st.integers(1, 4),
    weighted(
        (4, st.lists(_of_its_type, max_size=3)),
        (1, st.lists(_wrong, min_size=1, max_size=2)),
        (1, texts_within.inputs),
    ),
)
"""A prompt, a few tokens, and others: of their types, some beyond their bounds, of any kind, or a text in a text."""


def without_deadly(parameters: dict[str, _Drawn]) -> dict[str, _Drawn]:
    """Return parameters that Triton 2.51 survives at an output."""
    return {name: value for name, value in parameters.items() if name != DEADLY}


def survivable(shape: object) -> bool:
    """Whether Triton 2.51 survives a tensor of that shape with its data in JSON.

    It allocates what the shape says before it looks at the data, and ends if it can't (docs/security.md). A shape may
    be of any kind, and taken for a larger one: Triton multiplies until it overflows.
    """
    parts = shape if isinstance(shape, list) else [shape]
    sizes = [min(abs(part), _MOST_ELEMENTS) for part in parts if isinstance(part, int | float)]
    return math.prod(max(1, size) for size in sizes) < _MOST_ELEMENTS


def one_in(count: int) -> SearchStrategy[bool]:
    """Return True once in that many draws."""
    return st.integers(1, count).map(lambda number: number == 1)


@st.composite
def mangled(draw: st.DrawFn, whole: bytes) -> bytes:
    """Cut, doubled, with something put in or in place of a byte; mostly as it is."""
    how = draw(st.sampled_from([*["whole"] * 8, "cut", "doubled", "put in", "replaced"]))
    if how == "whole" or not whole:
        return whole
    if how == "doubled":
        return whole + whole
    place = draw(st.integers(0, 2**16)) % len(whole)
    if how == "cut":
        return whole[:place]
    return whole[:place] + draw(st.binary(min_size=1, max_size=4)) + whole[place + (how == "replaced") :]


def packed(value: object, datatype: str) -> bytes:
    """Return a value as the binary extension has it; one of a wrong kind as whatever bytes it has."""
    text = as_bytes(value)
    if datatype not in _FORMATS:
        return struct.pack("<I", len(text)) + text
    try:
        return struct.pack(_FORMATS[datatype], value)
    except (struct.error, OverflowError):
        return text


@st.composite
def packed_row(draw: st.DrawFn, row: list[object], datatype: str) -> bytes:
    """Return a row's values as the binary extension has them; of texts the last one is sometimes longer than its bytes.

    Triton itself refuses every other wrong length. Without `batchstrategy.so` this one fails other requests.
    """
    whole = b"".join(packed(item, datatype) for item in row)
    if datatype != "BYTES" or not row or not is_built() or not draw(one_in(16)):
        return whole
    last = packed(row[-1], datatype)
    length = len(last) - 4 + draw(st.sampled_from(_LONGER))
    return whole.removesuffix(last) + struct.pack("<I", min(length, 2**32 - 1)) + last[4:]


def as_bytes(value: object) -> bytes:
    """Return a text in UTF-8, lone surrogates included; anything else as it is shown."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else repr(value).encode()
