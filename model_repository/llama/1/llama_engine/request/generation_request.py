"""The parsed request for one completion: defaults resolved, every value within its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_engine.request.parameters import RequestParameters


@dataclass(frozen=True)
class GenerationRequest(RequestParameters):
    """A request for one completion, or for n choices until `choices_of` splits it.

    prompt_tokens: the prompt as token ids. choice: index among the prompt's n completions, from 0.
    """

    prompt: str = field(repr=False)
    prompt_tokens: tuple[int, ...] = field(repr=False)
    choice: int = 0

    @property
    def needs_log_probs(self) -> bool:
        """Whether the request asks for log probabilities of generated tokens."""
        return self.return_log_probs or self.num_logprobs is not None

    @property
    def has_optional_outputs(self) -> bool:
        """Whether the request asks for any of the outputs in `triton.outputs`."""
        return (
            self.needs_log_probs
            or self.prompt_logprobs is not None
            or self.return_output_ids
            or self.return_perf_metrics
        )
