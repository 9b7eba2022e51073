"""The fields that several paths share: OpenAI's, vLLM's extra ones, with their types and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

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
)


class StreamOptions(Schema):
    """Options of a stream. include_usage: a last chunk with the counts; continuous_usage_stats: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, json_schema_extra=IGNORED)


SAME_NAMES = (
    *("max_tokens", "min_tokens", "truncate_max_tokens", "n", "seed", "priority", "ignore_eos"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids", "prompt_logprobs"),
)
"""Fields with the name of the model's input that they set."""


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


def check_names(name: str, value: float | None, other_name: str, other_value: float | None) -> None:
    """Raise ApiError if both names of one field are given, with different values."""
    if value is not None and other_value is not None and value != other_value:
        message = f"{name} is {value} and {other_name} is {other_value}; give one of them"
        raise ApiError(400, message, name, "invalid_value")


class SamplingFields(Schema):
    """The fields that chat, completions and responses share. Null is no value: a default applies."""

    model: ModelName | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
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
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Words | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[Items[Word], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=MAX_TOKEN)] | None = None
    truncate_max_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    structured_outputs: StructuredOutputs | None = None


class SamplingRequest(SamplingFields):
    """The fields that chat and completions share: the checkpoint's or the server's default applies for null."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **{name: name for name in SAME_NAMES},
        "stream": "stream",
        "stop_words": "stop",
        "cache_salt": "cache_salt",
        "guided_decoding_guide": "response_format",
        "guided_decoding_guide_type": "response_format",
    }
    """The field of this request for each input of the model."""

    CLIENT_FIELDS: ClassVar[Mapping[str, str]] = {}
    """The client's name of each field that its path names otherwise."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    response_format: ResponseFormat | None = None
    repeat_penalty: RepetitionPenalty | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN), AfterValidator(_not_zero)] | None = None
    return_token_ids: bool | None = None
    guided_json: GuidedJson | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: WhitespacePattern | None = None
    keep_alive: KeepAlive | None = Field(None, json_schema_extra=IGNORED)
    num_ctx: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = Field(None, json_schema_extra=IGNORED)
    length_penalty: float | None = Field(None, json_schema_extra=IGNORED)
    skip_special_tokens: OnlyTrue = None
    spaces_between_special_tokens: bool | None = Field(None, json_schema_extra=IGNORED)
    include_stop_str_in_output: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    guided_decoding_backend: Annotated[str, Field(max_length=256)] | None = Field(None, json_schema_extra=IGNORED)

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
        """The bound on the completion's tokens; None is the end of the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt; None is no log probabilities."""
        return self.prompt_logprobs

    def client_field(self, field: str) -> str:
        """Return the name that the client has for a field, for errors."""
        return self.CLIENT_FIELDS.get(field, field)

    def engine_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        renamed = {} if self.repeat_penalty is None else {"repetition_penalty": "repeat_penalty"}
        return {**self.ENGINE_FIELDS, **renamed}
