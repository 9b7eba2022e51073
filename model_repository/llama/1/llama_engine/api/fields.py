"""The fields of a request: name, type, bound, and the attribute of `GenerationRequest` that each one sets.

The inputs of every Triton config are these fields and aliases. A field may come as an input, as a request parameter, or
inside `sampling_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llama_engine.api.compound_types import Numbers, TokenBias, TokenIds, Words
from llama_engine.api.value_types import Bound, Flag, OneOf, Real, Text, Whole

MAX_STOP_WORDS = 16
MAX_BAD_WORDS = 64
MAX_BIASES = 1024
MAX_BIAS_BYTES = 1 << 14
"""Of all words with a bias together: each is tokenized alone."""
MAX_ALLOWED_TOKENS = 1 << 18
"""Beyond every Llama's vocabulary."""
MAX_STOP_TOKENS = 1024
MAX_BIAS = 100.0
MAX_LOG_PROBS = 20
MAX_CHOICES = 16
MAX_COMPLETIONS = 64
"""Of a request with several choices, in all of its rows."""
MAX_GUIDE_BYTES = 1 << 17
"""About what the OpenAI API allows for the strings of a schema."""

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")


@dataclass(frozen=True)
class Field:
    """One field.

    type: Triton's, without TYPE_. attribute: of GenerationRequest; empty where the parser combines the field with
    others, or only checks it. is_list: it has any number of values a row, else one.
    """

    name: str
    type: str
    bound: Bound
    attribute: str = ""
    is_list: bool = False


def _field(name: str, type_: str, bound: Bound) -> Field:
    """Return a field of one value that sets the attribute of its name."""
    return Field(name, type_, bound, name)


def _list(name: str, type_: str, bound: Bound) -> Field:
    """Return a list that sets the attribute of its name."""
    return Field(name, type_, bound, name, is_list=True)


_PENALTY = Real(low=-2.0, high=2.0)
_LOG_PROBS = Whole(low=0, high=MAX_LOG_PROBS)

_FIELDS = (
    # The prompt: one of the two.
    Field("text_input", "STRING", Text()),
    Field("input_ids", "INT32", TokenIds(), is_list=True),
    _field("max_tokens", "INT32", Whole(low=1)),
    # At most max_tokens.
    _field("min_tokens", "INT32", Whole(low=0)),
    Field("truncate_max_tokens", "BOOL", Flag()),
    _field("temperature", "FP32", Real(low=0.0, high=2.0)),
    _field("top_k", "INT32", Whole(low=0)),
    # 0 is greedy.
    _field("top_p", "FP32", Real(low=0.0, high=1.0)),
    _field("min_p", "FP32", Real(low=0.0, high=1.0)),
    _field("repetition_penalty", "FP32", Real(above=0.0)),
    _field("frequency_penalty", "FP32", _PENALTY),
    _field("presence_penalty", "FP32", _PENALTY),
    _field("logit_bias", "STRING", TokenBias(MAX_BIASES, MAX_BIAS)),
    Field("embedding_bias_words", "STRING", Words(MAX_BIASES, together=MAX_BIAS_BYTES, keeps_empty=True), is_list=True),
    Field("embedding_bias_weights", "FP32", Numbers(MAX_BIASES, MAX_BIAS), is_list=True),
    _list("allowed_token_ids", "INT32", TokenIds(MAX_ALLOWED_TOKENS)),
    _field("seed", "UINT64", Whole(low=0, high=2**64 - 1)),
    _field("n", "INT32", Whole(low=1, high=MAX_CHOICES)),
    _list("stop_words", "STRING", Words(MAX_STOP_WORDS)),
    _list("stop_token_ids", "INT32", TokenIds(MAX_STOP_TOKENS)),
    # -1 is none, as in TensorRT-LLM.
    Field("end_id", "INT32", Whole(low=-1)),
    _field("ignore_eos", "BOOL", Flag()),
    _list("bad_words", "STRING", Words(MAX_BAD_WORDS)),
    # Empty: none, for the rows of a batch that have none.
    _field("guided_decoding_guide_type", "STRING", OneOf(("", *GUIDE_TYPES))),
    _field("guided_decoding_guide", "STRING", Text(MAX_GUIDE_BYTES)),
    _field("priority", "INT32", Whole(low=-(2**31), high=2**31 - 1)),
    _field("stream", "BOOL", Flag()),
    _field("stream_interval_ms", "INT32", Whole(low=0, high=1000)),
    _field("exclude_input_in_output", "BOOL", Flag()),
    _field("return_log_probs", "BOOL", Flag()),
    _field("num_logprobs", "INT32", _LOG_PROBS),
    _field("prompt_logprobs", "INT32", _LOG_PROBS),
    _field("return_perf_metrics", "BOOL", Flag()),
    # Of other backends: checked, and without effect.
    Field("pad_id", "INT32", Whole()),
    Field("beam_width", "INT32", Whole(low=1, high=1)),
    Field("length_penalty", "FP32", Real()),
    Field("return_finish_reason", "BOOL", Flag()),
    Field("return_num_input_tokens", "BOOL", Flag()),
    Field("return_num_output_tokens", "BOOL", Flag()),
    # A JSON object of other fields.
    Field("sampling_parameters", "STRING", Text()),
)

FIELDS: Mapping[str, Field] = {field.name: field for field in _FIELDS}

ALIASES: Mapping[str, str] = {
    "num_return_sequences": "n",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "stop": "stop_words",
}
"""Other names of fields, by name."""

PROMPTS = ("text_input", "input_ids")
"""A request has one of these."""

SAMPLING_PARAMETERS: Mapping[str, str] = {
    **{name: name for name in FIELDS if name not in (*PROMPTS, "stream", "sampling_parameters")},
    **ALIASES,
    "logprobs": "num_logprobs",
}
"""The fields that `sampling_parameters` may have, by their names there, which are those of vLLM's SamplingParams."""


def field_of(name: str) -> Field | None:
    """Return the field of an input's name or alias; None if there is none."""
    return FIELDS.get(ALIASES.get(name, name))
