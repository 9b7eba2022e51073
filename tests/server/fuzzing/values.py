"""Hypothesis strategies for what inputs may hold: good values, values at the border, and every wrong kind.

Good ones are short, because they are computed. Large ones stay far below the sizes that end Triton 2.51: bodies of
megabytes, and hundreds of thousands of chunks or of nested lists (docs/limits.md, perf/LOG.md).
"""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.clients import DTYPES

Inputs = dict[str, object]

_EDGES: tuple[float, ...] = (
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**40),
    *(0.1, -0.0, 1e-320, 1e308, -1e308, 3.5e38, math.nan, math.inf, -math.inf),
)
_PROMPTS = ("Return a list of", "a", "The class ", "caf\u00e9 \U0001f642", "\u0000", "\ufeff", "</s><s>", "\r\n\r\n")
_FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_SURROGATES = ("\ud800", "a\udfff", "\udc80\ud800", "x\ud83d")
_LARGE = tuple(part * count for part in ("a", "word ", "\u00e9", "\\", '"') for count in (999, 9999))

names: SearchStrategy[str] = st.sampled_from([*DTYPES])
prompts: SearchStrategy[str] = st.sampled_from(_PROMPTS) | st.sampled_from(_PROMPTS) | st.text(min_size=1, max_size=9)
texts: SearchStrategy[str] = prompts | st.sampled_from(["", *_SURROGATES, *_LARGE]) | st.text(max_size=30)
numbers: SearchStrategy[float] = st.integers(-3, 70) | st.sampled_from(_EDGES) | st.floats()
anything: SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | names, inner, max_size=4),
    max_leaves=8,
)

_GOOD: tuple[tuple[str, object], ...] = (
    *(("min_tokens", value) for value in (0, 1)),
    *(("temperature", value) for value in (0.0, 0.7, 2.0)),
    *(("top_k", value) for value in (0, 1, 50)),
    *(("top_p", value) for value in (1.0, 0.9, 0.01)),
    *(("repetition_penalty", value) for value in (1.0, 1.3, 0.1)),
    *((f"{kind}_penalty", value) for kind in ("frequency", "presence") for value in (-2.0, 0.5)),
    *(("seed", value) for value in (0, 2**64 - 1)),
    *((words, value) for words in ("stop_words", "bad_words") for value in ([""], ["e"], [" the", "\u00e9", ""])),
    *((name, value) for name in _FLAGS for value in (True, False)),
)
_BEYOND: tuple[tuple[str, object], ...] = (
    *(("text_input", value) for value in ("", "word " * 99, "word " * 9999, "\udc80")),
    *(("max_tokens", value) for value in (0, -1, 65, 2**31 - 1, -(2**31))),
    *(("min_tokens", value) for value in (-1, 65)),
    *(("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf)),
    *(("top_k", value) for value in (-1, -(2**31))),
    *(("top_p", value) for value in (0.0, 1.1, -math.inf)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, math.nan)),
    *((f"{kind}_penalty", value) for kind in ("frequency", "presence") for value in (-2.1, 1e38)),
    *((words, ["x"] * 65) for words in ("stop_words", "bad_words")),
    *((words, ["x" * 1025]) for words in ("stop_words", "bad_words")),
)
_good = st.lists(st.sampled_from(_GOOD), max_size=3)
_beyond = st.lists(st.sampled_from((*_GOOD, *_BEYOND, *_BEYOND)), min_size=1, max_size=3)
_wrong = st.lists(st.tuples(names | st.text(max_size=8), anything), min_size=1, max_size=2)

inputs: SearchStrategy[Inputs] = st.builds(
    lambda prompt, tokens, others: {"text_input": prompt, "max_tokens": tokens, **dict(others)},
    prompts,
    st.integers(1, 4),
    _good | _beyond | _wrong,
)
"""A prompt, a few tokens, and others: good ones, ones beyond their bounds, or of any kind."""

_how = st.sampled_from([*["whole"] * 8, "cut", "doubled", "put in", "replaced"])
_some_bytes = st.binary(min_size=1, max_size=4)
_places = st.integers(0, 2**16)


@st.composite
def mangled(draw: st.DrawFn, whole: bytes) -> bytes:
    """Cut, doubled, with something put in or in place of a byte; mostly as it is."""
    how = draw(_how)
    if how == "whole" or not whole:
        return whole
    if how == "doubled":
        return whole + whole
    place = draw(_places) % len(whole)
    if how == "cut":
        return whole[:place]
    return whole[:place] + draw(_some_bytes) + whole[place + (how == "replaced") :]
