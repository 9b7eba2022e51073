"""Sampling parameters of a request: names, types and defaults. The server checks the bounds.

`make configs` writes the fields from the server's table of request parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypedDict, Unpack

INPUTS: Mapping[str, tuple[str, bool]] = {
    # make configs: types
    "max_tokens": ("INT32", False),
    "min_tokens": ("INT32", False),
    "truncate_max_tokens": ("BOOL", False),
    "temperature": ("FP32", False),
    "top_k": ("INT32", False),
    "top_p": ("FP32", False),
    "min_p": ("FP32", False),
    "repetition_penalty": ("FP32", False),
    "frequency_penalty": ("FP32", False),
    "presence_penalty": ("FP32", False),
    "logit_bias": ("STRING", False),
    "embedding_bias_words": ("STRING", True),
    "embedding_bias_weights": ("FP32", True),
    "allowed_token_ids": ("INT32", True),
    "seed": ("UINT64", False),
    "n": ("INT32", False),
    "stop_words": ("STRING", True),
    "stop_token_ids": ("INT32", True),
    "end_id": ("INT32", False),
    "ignore_eos": ("BOOL", False),
    "bad_words": ("STRING", True),
    "guided_decoding_guide_type": ("STRING", False),
    "guided_decoding_guide": ("STRING", False),
    "priority": ("INT32", False),
    "cache_salt": ("STRING", False),
    "lora_name": ("STRING", False),
    "lora_task_id": ("UINT64", False),
    "prediction": ("STRING", False),
    "stream_interval_ms": ("INT32", False),
    "exclude_input_in_output": ("BOOL", False),
    "return_output_ids": ("BOOL", False),
    "return_log_probs": ("BOOL", False),
    "num_logprobs": ("INT32", False),
    "prompt_logprobs": ("INT32", False),
    "return_perf_metrics": ("BOOL", False),
    "pad_id": ("INT32", False),
    "beam_width": ("INT32", False),
    "length_penalty": ("FP32", False),
    "return_finish_reason": ("BOOL", False),
    "return_num_input_tokens": ("BOOL", False),
    "return_num_output_tokens": ("BOOL", False),
    # end of types
}
"""The input of each field: Triton's type, and whether it is a list."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords."""

    # make configs: options
    max_tokens: int | None
    min_tokens: int | None
    truncate_max_tokens: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: str | None
    embedding_bias_words: Sequence[str] | None
    embedding_bias_weights: Sequence[float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    n: int | None
    stop_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    end_id: int | None
    ignore_eos: bool | None
    bad_words: Sequence[str] | None
    guided_decoding_guide_type: str | None
    guided_decoding_guide: str | None
    priority: int | None
    cache_salt: str | None
    lora_name: str | None
    lora_task_id: int | None
    prediction: str | None
    stream_interval_ms: int | None
    exclude_input_in_output: bool | None
    return_output_ids: bool | None
    return_log_probs: bool | None
    num_logprobs: int | None
    prompt_logprobs: int | None
    return_perf_metrics: bool | None
    pad_id: int | None
    beam_width: int | None
    length_penalty: float | None
    return_finish_reason: bool | None
    return_num_input_tokens: bool | None
    return_num_output_tokens: bool | None
    # end of options


class Options(SamplingOptions, total=False):
    """The keywords of `generate` and `stream`: fields of `SamplingParams`, and seconds in place of the client's."""

    timeout: float | None


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one completion; the defaults decode greedily, up to 128 tokens.

    A field that is None is not sent: the server takes the value from the checkpoint's generation config, else its
    default. The exception is `seed`: the client draws one, so that the input is always present, and reports it in the
    completion. Under `scheduling: batch` Triton batches only requests with the same set of inputs.
    """

    # make configs: parameters
    max_tokens: int | None = 128
    """Maximum number of tokens to generate. Prompt and completion share the server's `max_model_len`: an explicit value
    that doesn't fit is refused, the server's default is reduced to what fits."""
    min_tokens: int | None = 0
    """Minimum number of tokens before an end token, stop token or stop word ends the text; at most `max_tokens`."""
    truncate_max_tokens: bool | None = None
    """True reduces a `max_tokens` that doesn't fit, False refuses it; missing: the setting of that name."""
    temperature: float | None = 0.0
    """Divides the logits; 0 takes the likeliest token each time (greedy)."""
    top_k: int | None = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float | None = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off, 0 is greedy."""
    min_p: float | None = None
    """Never sample a token less than `min_p` times as likely as the likeliest one; 0 is off."""
    repetition_penalty: float | None = 1.0
    """Divides the scores of tokens already present, the prompt's included; 1 is off."""
    frequency_penalty: float | None = 0.0
    """Subtracted from a token's score for each time it was generated; 0 is off."""
    presence_penalty: float | None = 0.0
    """Subtracted from a token's score once it was generated; 0 is off."""
    logit_bias: str | None = None
    """A JSON object that maps token ids to numbers added to their logits, before the penalties."""
    embedding_bias_words: Sequence[str] | None = None
    """Words to bias: each word's weight is added to the logits of all of its tokens."""
    embedding_bias_weights: Sequence[float] | None = None
    """The weights of `embedding_bias_words`, one per word."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled, end tokens included; -1 is padding; empty allows all."""
    seed: int | None = None
    """Random seed; the same request with the same seed gives the same text. Missing: drawn at random."""
    n: int | None = None
    """Number of completions of the prompt, at most 64 in a whole request. The first uses the seed, the others use seeds
    derived from it."""
    stop_words: Sequence[str] | None = ()
    """The text ends before the first of these strings; an empty string is ignored."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text and are not included in it; -1 is padding."""
    end_id: int | None = None
    """Another stop token; -1 is none."""
    ignore_eos: bool | None = None
    """True makes the checkpoint's end tokens ordinary tokens."""
    bad_words: Sequence[str] | None = ()
    """Strings that are never generated, in any split into tokens; an empty string is ignored."""
    guided_decoding_guide_type: str | None = None
    """The kind of `guided_decoding_guide`; empty: no guide."""
    guided_decoding_guide: str | None = None
    """The guide to which the text conforms, such as a JSON schema; the type `json` needs none."""
    priority: int | None = None
    """Requests with a lower value get a free slot first, equal ones in order of arrival; Triton's queue ignores it."""
    cache_salt: str | None = None
    """Prompts share cached prefixes only with requests of the same salt."""
    lora_name: str | None = None
    """The LoRA adapter that computes the completion; empty: none, the base model."""
    lora_task_id: int | None = None
    """The number of that adapter, as TensorRT-LLM's clients name it; 0: none. Beside `lora_name` it must be the same
    adapter's."""
    prediction: str | None = None
    """A text that the completion probably repeats, such as the file that it edits. It changes the speed and no token;
    what is beyond `max_tokens` is ignored."""
    stream_interval_ms: int | None = None
    """Minimum milliseconds between two chunks of a completion; the first and the last chunk do not wait."""
    exclude_input_in_output: bool | None = True
    """False returns the prompt in front of the completion."""
    return_output_ids: bool | None = None
    """True returns `output_ids` and `seed`, which a request with `resume_ids` needs."""
    return_log_probs: bool | None = None
    """True returns `output_log_probs` and `cum_log_probs`."""
    num_logprobs: int | None = None
    """Returns the output `logprobs`: log probabilities of each generated token and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """Returns the output `prompt_logprobs`: log probabilities of each prompt token and of this many likeliest ones."""
    return_perf_metrics: bool | None = None
    """True returns the four times of the request."""
    pad_id: int | None = None
    """Without effect: nothing is padded."""
    beam_width: int | None = None
    """1: there is no beam search."""
    length_penalty: float | None = None
    """Without effect: it applies to beam search only."""
    return_finish_reason: bool | None = None
    """Without effect: the output is always present."""
    return_num_input_tokens: bool | None = None
    """Without effect: the output is always present."""
    return_num_output_tokens: bool | None = None
    """Without effect: the output is always present."""
    # end of parameters

    @classmethod
    def from_checkpoint(cls) -> SamplingParams:
        """Return parameters with every field None: the checkpoint's generation config decides."""
        return cls(**{field.name: None for field in fields(cls)})

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these parameters with some of them changed; an unknown name is a TypeError."""
        return replace(self, **options) if options else self
