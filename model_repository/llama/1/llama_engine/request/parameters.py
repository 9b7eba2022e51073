"""The table of request parameters: name, default, type, bound and meaning of each.

Every parameter is an input of all Triton configs. A client can also send it as a Triton request parameter or inside
`sampling_parameters`. `make configs` generates the configs' inputs, the table in docs/api.md and the client's
`SamplingParams` from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llama_engine.adapter_names import ADAPTER_NAME, MAX_NUMBER
from llama_engine.bounds import Choice, Flag, Integer, Real, Text
from llama_engine.request.collection_bounds import Numbers, TokenBias, TokenIds, Words
from llama_engine.request.parameter import Parameter, parameter

MAX_STOP_WORDS = 16
MAX_BAD_WORDS = 64
MAX_BIASES = 1024
MAX_BIAS_BYTES = 1 << 14
"""Maximum bytes of all words with a bias together; each word is tokenized separately."""
MAX_ALLOWED_TOKENS = 1 << 18
"""Maximum number of allowed token ids; larger than any Llama's vocabulary."""
MAX_STOP_TOKENS = 1024
MAX_COMPLETIONS = 64
"""Maximum completions of a request with n > 1, over its whole batch."""
MAX_GUIDE_BYTES = 1 << 17
"""Maximum bytes of a guide; about the OpenAI API's bound for a schema's strings."""
MAX_SALT_BYTES = 256
MAX_PATH_BYTES = 4096
MAX_PREDICTION_BYTES = 1 << 20
"""Maximum bytes of a prediction; a completion of 128,000 tokens has fewer."""

GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")

_PENALTY = Real(low=-2.0, high=2.0)
_SHARE = Real(low=0.0, high=1.0)
_BIAS = Real(low=-100.0, high=100.0)
_LOG_PROBS = Integer(low=0, high=20)
_ALWAYS_PRESENT = "Without effect: the output is always present."


@dataclass(frozen=True, kw_only=True)
class RequestParameters:
    """The parameter values of one request; each field is an entry of the table."""

    # fmt: off
    # A request has one of the first two, or the third alone; parsing converts a prompt to GenerationRequest.prompt and
    # prompt_tokens.
    text_input: str = parameter(
        "", Text(),
        "The prompt: not empty, at most `max_model_len` - 1 tokens.",
    )
    input_ids: tuple[int, ...] = parameter(
        (), TokenIds(),
        "The prompt as tokens, taken as they are, without a BOS; -1 is padding.",
    )
    description_digest: str = parameter(
        "", Text(),
        "The digest of the served model's description that the client has, empty for none. Instead of a prompt it asks "
        "for the description; beside one, a model with another description refuses the request.",
    )
    resume_ids: tuple[int, ...] = parameter(
        (), TokenIds(),
        "Tokens of this request that are generated already (`output_ids`); the text continues after them, with the "
        "same tokens as without the interruption. A sampled request needs its `seed`; -1 is padding.",
    )
    max_tokens: int = parameter(
        128, Integer(low=1),
        "Maximum number of tokens to generate. Prompt and completion share the server's `max_model_len`: an explicit "
        "value that doesn't fit is refused, the server's default is reduced to what fits.",
        checkpoint="max_new_tokens",
    )
    min_tokens: int = parameter(
        0, Integer(low=0),
        "Minimum number of tokens before an end token, stop token or stop word ends the text; at most `max_tokens`.",
        aliases=("min_length",), checkpoint="min_new_tokens",
    )
    truncate_max_tokens: bool | None = parameter(
        None, Flag(),
        "True reduces a `max_tokens` that doesn't fit, False refuses it; missing: the setting of that name.",
    )
    temperature: float = parameter(
        0.0, Real(low=0.0, high=2.0),
        "Divides the logits; 0 takes the likeliest token each time (greedy).",
        checkpoint="temperature",
    )
    top_k: int = parameter(
        0, Integer(low=0),
        "Sample among the k likeliest tokens; 0 is off.",
        checkpoint="top_k",
    )
    top_p: float = parameter(
        1.0, _SHARE,
        "Sample among the likeliest tokens that together have this probability; 1 is off, 0 is greedy.",
        checkpoint="top_p",
    )
    min_p: float = parameter(
        0.0, _SHARE,
        "Never sample a token less than `min_p` times as likely as the likeliest one; 0 is off.",
        checkpoint="min_p",
    )
    repetition_penalty: float = parameter(
        1.0, Real(above=0.0),
        "Divides the scores of tokens already present, the prompt's included; 1 is off.",
        checkpoint="repetition_penalty",
    )
    frequency_penalty: float = parameter(
        0.0, _PENALTY,
        "Subtracted from a token's score for each time it was generated; 0 is off.",
    )
    presence_penalty: float = parameter(
        0.0, _PENALTY,
        "Subtracted from a token's score once it was generated; 0 is off.",
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), TokenBias(MAX_BIASES, _BIAS),
        "A JSON object that maps token ids to numbers added to their logits, before the penalties.",
    )
    embedding_bias_words: tuple[bytes, ...] = parameter(
        (), Words(MAX_BIASES, max_total_bytes=MAX_BIAS_BYTES, keeps_empty=True),
        "Words to bias: each word's weight is added to the logits of all of its tokens.",
    )
    embedding_bias_weights: tuple[float, ...] = parameter(
        (), Numbers(MAX_BIASES, _BIAS),
        "The weights of `embedding_bias_words`, one per word.",
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        (), TokenIds(MAX_ALLOWED_TOKENS),
        "The only tokens that may be sampled, end tokens included; -1 is padding; empty allows all.",
    )
    seed: int = parameter(
        0, Integer(low=0, high=2**64 - 1),
        "Random seed; the same request with the same seed gives the same text. Missing: drawn at random.",
        aliases=("random_seed",),
    )
    n: int = parameter(
        1, Integer(low=1, high=16),
        "Number of completions of the prompt, at most 64 in a whole request. The first uses the seed, the others "
        "use seeds derived from it.",
        aliases=("num_return_sequences",),
    )
    stop_words: tuple[bytes, ...] = parameter(
        (), Words(MAX_STOP_WORDS),
        "The text ends before the first of these strings; an empty string is ignored.",
        aliases=("stop",),
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), TokenIds(MAX_STOP_TOKENS),
        "Tokens that end the text and are not included in it; -1 is padding.",
    )
    end_id: int = parameter(
        -1, Integer(low=-1),
        "Another stop token; -1 is none.",
    )
    ignore_eos: bool = parameter(
        False, Flag(),
        "True makes the checkpoint's end tokens ordinary tokens.",
    )
    bad_words: tuple[bytes, ...] = parameter(
        (), Words(MAX_BAD_WORDS),
        "Strings that are never generated, in any split into tokens; an empty string is ignored.",
    )
    # The text may be empty: a batch element can be without a guide.
    guided_decoding_guide_type: str = parameter(
        "", Choice(("", *GUIDE_TYPES)),
        "The kind of `guided_decoding_guide`; empty: no guide.",
    )
    guided_decoding_guide: str = parameter(
        "", Text(MAX_GUIDE_BYTES),
        "The guide to which the text conforms, such as a JSON schema; the type `json` needs none.",
    )
    priority: int = parameter(
        0, Integer(low=-(2**31), high=2**31 - 1),
        "Requests with a lower value get a free slot first, equal ones in order of arrival; Triton's queue ignores it.",
    )
    cache_salt: str = parameter(
        "", Text(MAX_SALT_BYTES),
        "Prompts share cached prefixes only with requests of the same salt.",
    )
    lora_name: str = parameter(
        "", ADAPTER_NAME,
        "The LoRA adapter that computes the completion; empty: none, the base model.",
    )
    lora_task_id: int = parameter(
        0, Integer(low=0, high=MAX_NUMBER),
        "The number of that adapter, as TensorRT-LLM's clients name it; 0: none. Beside `lora_name` it must be the "
        "same adapter's.",
    )
    lora_digest: str = parameter(
        "", Text(),
        "The digest of that adapter that the client has (`description_digest` returns it); another version of the "
        "adapter refuses the request.",
    )
    lora_path: str = parameter(
        "", Text(MAX_PATH_BYTES),
        "Instead of a prompt, beside `lora_name` and with or without `lora_task_id`: loads the adapter in this folder, "
        "which is inside the setting `lora_folder`; an empty text unloads it. The answer is the list of loaded "
        "adapters.",
    )
    prediction: str = parameter(
        "", Text(MAX_PREDICTION_BYTES),
        "A text that the completion probably repeats, such as the file that it edits. It changes the speed and no "
        "token; what is beyond `max_tokens` is ignored.",
    )
    stream: bool = parameter(
        False, Flag(),
        "True: a response for each chunk of text; batch size 1, and only under the config `streaming`.",
    )
    stream_interval_ms: int = parameter(
        0, Integer(low=0, high=1000),
        "Minimum milliseconds between two chunks of a completion; the first and the last chunk do not wait.",
    )
    exclude_input_in_output: bool = parameter(
        True, Flag(),
        "False returns the prompt in front of the completion.",
    )
    return_output_ids: bool = parameter(
        False, Flag(),
        "True returns `output_ids` and `seed`, which a request with `resume_ids` needs.",
    )
    return_log_probs: bool = parameter(
        False, Flag(),
        "True returns `output_log_probs` and `cum_log_probs`.",
    )
    num_logprobs: int | None = parameter(
        None, _LOG_PROBS,
        "Returns the output `logprobs`: log probabilities of each generated token and of this many likeliest ones.",
    )
    prompt_logprobs: int | None = parameter(
        None, _LOG_PROBS,
        "Returns the output `prompt_logprobs`: log probabilities of each prompt token and of this many likeliest ones.",
    )
    return_embedding: bool = parameter(
        False, Flag(),
        "True returns the `embedding` of the prompt and generates nothing; the setting `pooling` says how.",
    )
    return_perf_metrics: bool = parameter(
        False, Flag(),
        "True returns the four times of the request.",
    )
    # Parameters of other backends: validated, but without effect.
    pad_id: int | None = parameter(
        None, Integer(),
        "Without effect: nothing is padded.",
    )
    beam_width: int = parameter(
        1, Integer(low=1, high=1),
        "1: there is no beam search.",
    )
    length_penalty: float | None = parameter(
        None, Real(),
        "Without effect: it applies to beam search only.",
    )
    return_finish_reason: bool = parameter(True, Flag(), _ALWAYS_PRESENT)
    return_num_input_tokens: bool = parameter(True, Flag(), _ALWAYS_PRESENT)
    return_num_output_tokens: bool = parameter(True, Flag(), _ALWAYS_PRESENT)
    sampling_parameters: str = parameter(
        "", Text(),
        "A JSON object of other parameters except the prompt and `stream`, under vLLM's names (`logprobs` for "
        "`num_logprobs`). Numbers and flags may be strings, `top_k` may be -1, and `null` counts as missing.",
    )
    # fmt: on


PARAMETERS: Mapping[str, Parameter] = {field.name: field.metadata["parameter"] for field in fields(RequestParameters)}

NAMES: Mapping[str, str] = {
    alias: name for name, parameter in PARAMETERS.items() for alias in (name, *parameter.aliases)
}
"""Parameter names by input name, aliases included."""

PROMPTS = ("text_input", "input_ids")
"""The forms of the prompt; a request for a completion has exactly one."""

DESCRIPTION = "description_digest"
"""The parameter that a request for the model's description has alone."""

LORA_PATH = "lora_path"
"""The parameter of a request that loads or unloads an adapter; it has no prompt."""

NOT_SAMPLING = (
    *(*PROMPTS, DESCRIPTION, LORA_PATH, "resume_ids", "lora_digest", "stream", "return_embedding"),
    "sampling_parameters",
)
"""Parameters that are not sampling parameters."""

BESIDE_EMBEDDING = {
    *(*PROMPTS, DESCRIPTION, "return_embedding", "priority", "cache_salt", "lora_name", "lora_task_id", "lora_digest"),
    *("return_perf_metrics", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
}
"""Parameters of a request for an embedding; the others are of a completion."""

SAMPLING_PARAMETERS: Mapping[str, str] = {
    **{name: parameter for name, parameter in NAMES.items() if parameter not in NOT_SAMPLING},
    "logprobs": "num_logprobs",
}
"""Parameter names by name in `sampling_parameters`: input names, and vLLM's `logprobs`."""
