"""The fields that chat and text completions share: OpenAI's, then vLLM's extra ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from triton_llama_openai.schema import (
    IGNORED,
    MAX_TOKEN,
    Items,
    OnlyFalse,
    OnlyTrue,
    Schema,
    TokenIds,
    Unsupported,
    Word,
    Words,
    one_of,
    unsupported,
)

JsonObject = dict[str, object]


class StreamOptions(Schema):
    """Of a streamed request. include_usage: a last chunk with the tokens; continuous_usage_stats: on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, json_schema_extra=IGNORED)


class TextFormat(Schema):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Schema):
    """A schema that the text satisfies; it is enforced whatever `strict` is."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Schema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(Schema):
    """vLLM's: free text with structured parts, begun by triggers."""

    type: Literal["structural_tag"]
    structures: Items[JsonObject] | None = None
    triggers: Items[str] | None = None
    format: JsonObject | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]
GuidedJson = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[JsonObject, Tag("<object>")],
    one_of("a JSON schema, or one as a string"),
]
Choices = Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Schema):
    """vLLM's: exactly one of these. `json_` is the field json."""

    json_: GuidedJson | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


SAME_NAMES = (
    *("max_tokens", "min_tokens", "truncate_max_tokens", "n", "seed", "stream", "priority", "ignore_eos"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids", "prompt_logprobs"),
)
"""Fields that are inputs of the model as they are."""


class SamplingRequest(Schema):
    """What a request says about its completions. Null is no value: the checkpoint's or the server's default applies."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **{name: name for name in SAME_NAMES},
        "stop_words": "stop",
        "guided_decoding_guide": "response_format",
        "guided_decoding_guide_type": "response_format",
    }
    """The field of this request for each input of the model."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
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
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[Items[Word], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=MAX_TOKEN)] | None = None
    truncate_max_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    guided_json: GuidedJson | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    length_penalty: float | None = Field(None, json_schema_extra=IGNORED)
    skip_special_tokens: OnlyTrue = None
    spaces_between_special_tokens: bool | None = Field(None, json_schema_extra=IGNORED)
    include_stop_str_in_output: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    truncate_prompt_tokens: Unsupported = None
    guided_decoding_backend: Annotated[object | None, unsupported("the server chooses the library")] = None
    guided_whitespace_pattern: Unsupported = None

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
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts the tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect."""
        nested = [] if self.stream_options is None else self.stream_options.ignored()
        return super().ignored() + [f"stream_options.{name}" for name in nested]
