"""A completion to generate, as the engine gets it: defaults resolved, every value within its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llama_engine.sampling.philox import choice_seed


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to generate, with all defaults resolved and all values within bounds.

    n: completions of the prompt; choice: which of them this is, from 0. logit_bias: (token, what is added to its
    logit). stop_token_ids: end the completion beside the end tokens of the checkpoint, which ignore_eos makes ordinary
    tokens. allowed_token_ids: the only tokens that may be sampled; empty allows all. priority: lower ones get a slot
    first. num_logprobs, prompt_logprobs: how many of the most likely tokens are reported beside each generated token,
    and beside each token of the prompt; None reports nothing. guided_decoding_guide: what the completion must
    conform to, empty without; guided_decoding_guide_type: its kind. stream: one response per delta.
    stream_interval_ms: between two deltas of a completion at least, in milliseconds.
    """

    prompt: str
    prompt_tokens: tuple[int, ...] = field(repr=False)
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    choice: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_words: tuple[bytes, ...] = ()
    bad_words: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    exclude_input_in_output: bool = True
    return_log_probs: bool = False
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding_guide_type: str = ""
    guided_decoding_guide: str = field(default="", repr=False)
    return_perf_metrics: bool = False
    stream: bool = False
    stream_interval_ms: int = 0

    def choices(self) -> list[GenerationRequest]:
        """Return one request per completion, in order; each but the first has a seed derived from the first one's."""
        return [self, *(replace(self, choice=one, seed=choice_seed(self.seed, one)) for one in range(1, self.n))]

    @property
    def needs_log_probs(self) -> bool:
        """Whether the log probabilities of generated tokens are asked for."""
        return self.return_log_probs or self.num_logprobs is not None

    @property
    def has_optional_outputs(self) -> bool:
        """Whether a response has more than the outputs that every response has."""
        return self.needs_log_probs or self.prompt_logprobs is not None or self.return_perf_metrics
