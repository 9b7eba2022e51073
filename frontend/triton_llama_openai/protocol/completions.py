"""The request of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import invalid, unsupported
from triton_llama_openai.protocol.prompts import Prompt, Prompts, prompts_of
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.protocol.schema import MAX_TOKEN, Unsupported, refused


class CompletionRequest(SamplingRequest):
    """A request of /v1/completions."""

    INPUT_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.INPUT_FIELDS,
        "text_input": "prompt",
        "input_ids": "prompt",
        "num_logprobs": "logprobs",
    }

    DEFAULT_MAX_TOKENS = 16

    prompt: Prompts
    """a text, a list of texts, tokens, or a list of token lists, each shorter than `max_model_len`; at most
    `max_prompts`, which are computed at the same time"""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    """maximum tokens of a choice; default: 16, or less where the context ends; 0: no text, so that with `echo` and
    `logprobs` the prompt is scored"""
    echo: bool | None = None
    """true: the prompt in front of the text, with `logprobs` its log probabilities, too, in a stream in each choice's
    first event"""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """alternatives of each token"""
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    """equal to `n`; another number is refused"""
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
    def prompts(self) -> list[Prompt]:
        """Every prompt, as a text or as tokens."""
        return prompts_of(self.prompt)
