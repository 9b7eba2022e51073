"""The requests of every path: OpenAI's fields, vLLM's extra ones, with their types and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from triton_llama_openai.errors import ApiError, invalid, unsupported
from triton_llama_openai.schema import (
    IGNORED,
    MAX_TOKEN,
    Items,
    OnlyFalse,
    OnlyTrue,
    Schema,
    TokenId,
    TokenIds,
    Unsupported,
    Word,
    Words,
    by_json_type,
    one_of,
    refused,
)

JsonObject = dict[str, object]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Schema):
    """Options of a stream. include_usage: a last chunk with the counts; continuous_usage_stats: in every chunk."""

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
    *("max_tokens", "min_tokens", "truncate_max_tokens", "n", "seed", "priority", "ignore_eos"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids", "prompt_logprobs", "receipt"),
)
"""Fields with the name of the model's input that they set."""


class SamplingRequest(Schema):
    """The fields that both paths share. Null is no value: the checkpoint's or the server's default applies."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **{name: name for name in SAME_NAMES},
        "stream": "stream",
        "stop_words": "stop",
        "cache_salt": "cache_salt",
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
    cache_salt: CacheSalt | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    receipt: bool | None = None
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
    guided_decoding_backend: Annotated[object | None, refused("the server chooses the library")] = None
    guided_whitespace_pattern: Unsupported = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "a stream has no place for them")
        return self

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

    def engine_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        return dict(self.ENGINE_FIELDS)

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect."""
        nested = [] if self.stream_options is None else self.stream_options.ignored()
        return super().ignored() + [f"stream_options.{name}" for name in nested]


TemplateKwargs = Annotated[JsonObject, Field(max_length=64)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Schema):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Items[TextPart], Tag("<list>")],
    one_of("a string or a list of text parts"),
]


def text_of(content: str | list[TextPart] | None) -> str:
    """Return a content as one text; parts are joined with line ends, as vLLM does."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class SystemMessage(Schema):
    """Instructions; the role developer is system for the chat template."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Schema):
    """A user's message."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Schema):
    """The function of a tool call; arguments: JSON."""

    name: FunctionName
    arguments: str


class ToolCall(Schema):
    """A call that the model made."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, json_schema_extra=IGNORED)


class AssistantMessage(Schema):
    """An earlier answer of the model, in the form in which this endpoint returns it, so that it can be sent back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[ToolCall] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = Field(None, json_schema_extra=IGNORED)
    annotations: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_calls")] = None


class ToolMessage(Schema):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=256)]
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Schema):
    """A function that the model may call. parameters: the JSON schema of its arguments.

    Arguments are constrained to the schema only if tool_choice forces a call (`required` or a named function).
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Schema):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[Items[Tool], Field(max_length=128)]


class NamedFunction(Schema):
    """A function's name."""

    name: FunctionName


class NamedToolChoice(Schema):
    """Forces a call of this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    one_of("none, auto, required, or an object that names a function"),
]
_NOT_REASONING = "the models of this endpoint have no such setting"


class ChatRequest(SamplingRequest):
    """A request of /v1/chat/completions."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.ENGINE_FIELDS,
        "text_input": "messages",
        "num_logprobs": "top_logprobs",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Items[Literal["text"]] | None = None

    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, json_schema_extra=IGNORED)
    store: bool | None = Field(None, json_schema_extra=IGNORED)
    service_tier: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_options: JsonObject | None = Field(None, json_schema_extra=IGNORED)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Items[JsonObject] | None = None

    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_choice")] = None
    functions: Annotated[object | None, refused("use tools")] = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Annotated[object | None, refused(_NOT_REASONING)] = None
    verbosity: Annotated[object | None, refused(_NOT_REASONING)] = None
    web_search_options: Unsupported = None
    chat_template: Annotated[object | None, refused("a template is code; the server's operator sets it")] = None
    echo: OnlyFalse = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        names = self.max_tokens, self.max_completion_tokens
        if None not in names and names[0] != names[1]:
            message = f"max_tokens is {names[0]} and max_completion_tokens is {names[1]}; give one of them"
            raise ApiError(400, message, "max_tokens", "invalid_value")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true; one must be false"
            raise ApiError(400, message, "continue_final_message", "invalid_value")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """max_completion_tokens, or its old name max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def engine_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().engine_fields() | {"max_tokens": max_tokens}

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect, those of messages included."""
        nested = {f"messages.{name}" for message in self.messages for name in message.ignored()}
        return super().ignored() + sorted(nested)


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Items[TokenId], Field(min_length=1)]


def _prompt_kind(value: object) -> str | None:
    """Return the tag of a prompt's form; a list's first element decides."""
    if not isinstance(value, list):
        return by_json_type(value) if isinstance(value, str) else None
    match value[0] if value else None:
        case str():
            return "<texts>"
        case list():
            return "<token lists>"
    return "<tokens>"


Prompt = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[Items[Text], Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[Items[Tokens], Tag("<token lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="union_type",
        custom_error_message="Input should be a text, a list of texts, a list of tokens, or a list of such lists",
    ),
]


class CompletionRequest(SamplingRequest):
    """A request of /v1/completions."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.ENGINE_FIELDS,
        "text_input": "prompt",
        "input_ids": "prompt",
        "num_logprobs": "logprobs",
    }

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    suffix: Annotated[object | None, refused("the models of this endpoint complete a prompt at its end")] = None
    prompt_embeds: Unsupported = None
    add_special_tokens: Annotated[object | None, refused("the server adds the BOS that the prompt lacks")] = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if not self.prompts:
            raise invalid("prompt", [], "at least one prompt")
        if self.best_of is not None and self.best_of != self.choices:
            reason = f"every completion is returned, so it must be n, which is {self.choices}"
            raise unsupported("best_of", reason)
        if self.stream and self.echo and self.logprobs is not None:
            raise unsupported("echo", "a stream has no place for the prompt's logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt, which an echo with log probabilities has too."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as a text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # The form's validation has looked at every element of what may be millions.
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeRequest(Schema):
    """A prompt, or a conversation, which the chat template makes one."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            number = "neither" if self.prompt is None else "both"
            raise ApiError(400, f"{number} of prompt and messages is given; it must be one", "prompt", "invalid_value")
        return self


class DetokenizeRequest(Schema):
    """Tokens to turn into text."""

    model: ModelName | None = None
    tokens: Items[TokenId]


class VerificationRequest(Schema):
    """A receipt to verify."""

    model: ModelName | None = None
    receipt: JsonObject
    cache_salt: CacheSalt | None = None
