"""A completion to generate, as the engine gets it: defaults resolved, every value within its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llama_engine.api.parameters import RequestParameters
from llama_engine.sampling.philox import choice_seed


@dataclass(frozen=True)
class GenerationRequest(RequestParameters):
    """One completion to generate, with all defaults resolved and all values within bounds.

    prompt_tokens: the prompt as token ids. choice: which of the prompt's n completions this is, from 0.
    """

    prompt: str = field(repr=False)
    prompt_tokens: tuple[int, ...] = field(repr=False)
    choice: int = 0

    def choices(self) -> list[GenerationRequest]:
        """Return one request per completion, in order; each but the first has a seed derived from the first one's."""
        return [self, *(replace(self, choice=at, seed=choice_seed(self.seed, at)) for at in range(1, self.n))]

    @property
    def needs_log_probs(self) -> bool:
        """Whether the response has the log probabilities of generated tokens."""
        return self.return_log_probs or self.num_logprobs is not None

    @property
    def has_optional_outputs(self) -> bool:
        """Whether a response has more than the outputs that every response has."""
        return self.needs_log_probs or self.prompt_logprobs is not None or self.return_perf_metrics
