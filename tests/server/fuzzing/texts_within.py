"""Hypothesis strategies for inputs whose text has a syntax of its own: guides, JSON of other inputs, biases."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from llama_engine.api.fields import GUIDE_TYPES, SAMPLING_PARAMETERS

_GUIDES: dict[str, tuple[str, ...]] = {
    "json": ("", "{}"),
    "json_schema": (
        *("{}", "true", "false", "[]", "{", '{"type": "object"}', '{"type": ["integer", "null"]}', '{"enum": []}'),
        *('{"$ref": "#"}', '{"$ref": "#/x"}', '{"$ref": "file:///etc/passwd"}', '{"$ref": "http://localhost:1/"}'),
        *('{"pattern": "(a+)+$"}', '{"type": "string", "pattern": "("}', '{"type": "array", "minItems": 1000000}'),
        *('{"type": "string", "maxLength": 1000000000}', '{"type": "integer", "minimum": 5, "maximum": 4}'),
        *('{"allOf": [{"type": "string"}, {"type": "integer"}]}', '{"anyOf": ' * 60 + "[]" + "}" * 60),
        json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}),
        '{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
    ),
    "regex": (
        *("a*", "", "(", "[", "a{2,1}", "(a+)+$", "(a|a)*b", "(a{1,1000}){1,1000}", "[a-z]{1,100000}", "(.*){50}"),
        *("(?=a)b", "(?<!a)b", r"\1", r"\p{L}+", "^$", "\u00e9|\U0001f642", ".*" * 300, "(" * 5000 + ")" * 5000),
    ),
    "ebnf_grammar": (
        *('root ::= "a"', 'start: "a"+', "root ::= root", "root ::= root root | root", "start: start", "root ::=", "x"),
        *('root ::= ("a" | ' * 300 + '"b"' + ")" * 300, "start: /(a+)+/", 'start: "a"~1..1000000', "%ignore /./", ""),
    ),
    "structural_tag": ("{}", '{"type": "structural_tag"}', '{"structures": [], "triggers": []}', "[", ""),
}

_guides = st.sampled_from(GUIDE_TYPES).flatmap(
    lambda of: st.tuples(
        st.just(("guided_decoding_guide_type", of)),
        st.tuples(st.just("guided_decoding_guide"), st.sampled_from(_GUIDES[of]) | st.text(max_size=30)),
    )
)
_scalars = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.text(max_size=9)
_any = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
_sampling = st.dictionaries(st.sampled_from([*SAMPLING_PARAMETERS, "x"]), _any, max_size=4).map(json.dumps)
_bias = st.dictionaries(st.integers(-2, 4000).map(str) | st.text(max_size=3), _scalars, max_size=4).map(json.dumps)

inputs: SearchStrategy[tuple[tuple[str, str], ...]] = st.one_of(
    _guides,
    _sampling.map(lambda text: (("sampling_parameters", text),)),
    _bias.map(lambda text: (("logit_bias", text),)),
)
"""Names and texts: valid, wrong, without end, or expensive."""
