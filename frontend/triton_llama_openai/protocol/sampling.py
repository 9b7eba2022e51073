"""The fields that several paths share: OpenAI's, vLLM's extra ones, with their types and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from triton_llama.sampling_params import INPUTS

from triton_llama_openai.errors import ApiError, unsupported
from triton_llama_openai.protocol.formats import (
    Choices,
    GuidedJson,
    ResponseFormat,
    StructuredOutputs,
    WhitespacePattern,
)
from triton_llama_openai.protocol.schema import (
    IGNORED,
    MAX_TOKEN,
    CacheSalt,
    Items,
    ModelName,
    OnlyFalse,
    OnlyTrue,
    Schema,
    TokenIds,
    Word,
    Words,
    one_of,
    without_effect,
)


class StreamOptions(Schema):
    """Options of a stream. include_usage: a last chunk with the counts; continuous_usage_stats: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, json_schema_extra=IGNORED)


RepetitionPenalty = Annotated[float, Field(gt=0, le=1000)]
KeepAlive = Annotated[
    Annotated[str, Field(max_length=64), Tag("<string>")] | Annotated[float, Tag("<number>")],
    one_of("a duration, as a string or in seconds"),
]
"""Ollama's: how long a model stays loaded."""


def _not_zero(count: int) -> int:
    if count == 0:
        raise PydanticCustomError("not_zero", "Input should be -1 or at least 1")
    return count


Priority = Annotated[int, Field(ge=-(2**31), le=MAX_TOKEN)]
TruncatedLength = Annotated[int, Field(ge=-1, le=MAX_TOKEN), AfterValidator(_not_zero)]


def check_names(name: str, value: float | None, other_name: str, other_value: float | None) -> None:
    """Raise ApiError if both names of one field are given, with different values."""
    if value is not None and other_value is not None and value != other_value:
        message = f"{name} is {value} and {other_name} is {other_value}; give one of them"
        raise ApiError(400, message, name, "invalid_value")


class SamplingFields(Schema):
    """The fields that chat, completions and responses share. Null is no value: a default applies."""

    model: ModelName | None = None
    """a served name, another one is 404; not needed where there is only one"""
    stream: bool | None = None
    """true: server-sent events"""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; default: the checkpoint's, else 1"""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 is greedy; default: the checkpoint's, else 1"""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """subtracted from a token's score for each time it was generated"""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """subtracted from a token's score once it was generated"""
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None
    """numbers by token id, at most 1024, that are added to the logits"""
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    """the same request with the same seed has the same text; choice 0 has the seed, the others have derived ones"""
    stop: Words | None = None
    """stop strings, up to 16 of 1 … 1024 bytes; the text ends before the first of them"""
    user: Annotated[str, Field(max_length=512)] | None = without_effect("OpenAI's bookkeeping")

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    """vLLM's; 0 or -1 is off"""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """vLLM's; 0 is off"""
    repetition_penalty: RepetitionPenalty | None = None
    """vLLM's; 1 is off"""
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    """vLLM's; no end token or stop string ends the text before"""
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    """vLLM's; tokens that end the text"""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """vLLM's; the only tokens that may be sampled"""
    bad_words: Annotated[Items[Word], Field(max_length=64)] | None = None
    """vLLM's; strings that are never generated"""
    ignore_eos: bool | None = None
    """vLLM's; true: end tokens are ordinary tokens"""
    priority: Priority | None = None
    """vLLM's; lower first among the requests that wait for a slot"""
    truncate_max_tokens: bool | None = None
    """true: a maximum beyond the context is cut to it, false: it is refused; default: the server's setting"""
    cache_salt: CacheSalt | None = None
    """vLLM's; requests share cached prefixes with those of the same salt (docs/openai.md#the-prefix-cache)"""
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    """OpenAI's; requests with the same key go to the same replica (docs/openai.md#several-tritons)"""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer form of the `guided_` fields; ignored beside a forced tool"""
    timings: bool | None = None
    """true: `timings` beside `usage` (docs/openai.md#timings)"""


class SamplingRequest(SamplingFields):
    """The fields that chat and completions share: the checkpoint's or the server's default applies for null."""

    INPUT_FIELDS: ClassVar[Mapping[str, str]] = {
        "stream": "stream",
        "stop_words": "stop",
        "guided_decoding_guide": "response_format",
        "guided_decoding_guide_type": "response_format",
    }
    """The field of this request for each input of the model that has another name."""

    CLIENT_FIELDS: ClassVar[Mapping[str, str]] = {}
    """The client's name of each field that its path names otherwise."""

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None
    """Maximum tokens of a request that sets none, cut to what the context leaves; None is all that it leaves."""

    stream_options: StreamOptions | None = None
    """with `stream`: `include_usage`; vLLM's `continuous_usage_stats`, without effect where `include_usage` is false;
    `include_obfuscation` is ignored"""
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    """choices; the prompt is prefilled once"""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    """maximum tokens of a choice; default: what the context leaves"""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, `json_schema` (`strict`: [schemas](openai.md#tools); its `name` may be missing), vLLM's
    `structural_tag`"""
    repeat_penalty: RepetitionPenalty | None = None
    """Ollama's name of `repetition_penalty`"""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """vLLM's; refused in a stream; tokens of all prompts × `n` × (alternatives + 1) at most 524288, where a text counts
    its bytes, up to the context"""
    truncate_prompt_tokens: TruncatedLength | None = None
    """vLLM's; of a longer prompt its last tokens, at most `max_model_len` - 1; -1 leaves room for the maximum of
    tokens, or one token. What is cut off may be the BOS or the system message"""
    return_token_ids: bool | None = None
    """vLLM's; true: `token_ids` in each choice, in a stream in each event, and `prompt_token_ids`, in a stream in the
    first event"""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's; true: log probabilities name tokens `token_id:123`"""
    guided_json: GuidedJson | None = None
    """vLLM's structured output, a JSON schema; one of these four, `structured_outputs` or `response_format`; ignored
    beside a forced tool"""
    guided_regex: str | None = None
    """vLLM's; a regular expression"""
    guided_choice: Choices | None = None
    """vLLM's; one of these texts"""
    guided_grammar: str | None = None
    """vLLM's; a grammar in EBNF"""
    guided_whitespace_pattern: WhitespacePattern | None = None
    """vLLM's, also `whitespace_pattern` in `structured_outputs`: the gaps between JSON's tokens, a regular expression
    of spaces, tabs and line ends; needs a JSON guide, whose own `x-guidance` it overrides
    (docs/api.md#structured-output); ignored beside a forced tool"""
    keep_alive: KeepAlive | None = without_effect(
        "Ollama's: the model stays loaded, with the context of `max_model_len`"
    )
    num_ctx: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = without_effect(
        "Ollama's: the model stays loaded, with the context of `max_model_len`"
    )
    length_penalty: float | None = without_effect("of beam search")
    skip_special_tokens: OnlyTrue = None
    """the text has no special tokens, but for the markers of reasoning on completions and those of an echoed prompt of
    tokens"""
    spaces_between_special_tokens: bool | None = without_effect("the text has no special tokens")
    include_stop_str_in_output: OnlyFalse = None
    """the text ends before the stop string"""
    use_beam_search: OnlyFalse = None
    """there is no beam search"""
    guided_decoding_backend: Annotated[str, Field(max_length=256)] | None = without_effect("the server has one library")
    no_stop_trim: OnlyFalse = without_effect("vllm-router's; true is refused")
    return_hidden_states: OnlyFalse = without_effect("vllm-router's; true is refused")

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "a stream has no place for them")
        check_names("repetition_penalty", self.repetition_penalty, "repeat_penalty", self.repeat_penalty)
        return self

    @property
    def penalty(self) -> float | None:
        """repetition_penalty, or Ollama's name for it, repeat_penalty."""
        return self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none if the request has none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def max_new_tokens(self) -> int | None:
        """The bound on the completion's tokens; None is the default."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt; None is no log probabilities."""
        return self.prompt_logprobs

    @property
    def predicted_text(self) -> str | None:
        """A text that the completion probably repeats; None for no prediction."""
        return None

    def client_field(self, field: str) -> str:
        """Return the name that the client has for a field, for errors."""
        return self.CLIENT_FIELDS.get(field, field)

    def input_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        renamed = {} if self.repeat_penalty is None else {"repetition_penalty": "repeat_penalty"}
        return {**{name: name for name in PASSTHROUGH_FIELDS}, **self.INPUT_FIELDS, **renamed}


PASSTHROUGH_FIELDS = tuple(
    name
    for name, field in SamplingRequest.model_fields.items()
    if name in INPUTS and field.json_schema_extra != IGNORED
)
"""Fields that set the model's input of their name."""
