"""A validated request for a completion or an embedding, as the engine computes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from llama_engine.request.adapter_choice import Adapter
from llama_engine.request.parameters import RequestParameters


@dataclass(frozen=True)
class GenerationRequest(RequestParameters):
    """A request for one completion, or for n choices until `choices_of` splits it.

    prompt_tokens: the prompt as token ids. choice: index among the prompt's n completions, from 0. prediction_tokens:
    the prediction as token ids, at most max_tokens. adapter: None is the base model.
    """

    prompt: str = field(repr=False)
    prompt_tokens: tuple[int, ...] = field(repr=False)
    choice: int = 0
    prediction_tokens: tuple[int, ...] = field(default=(), repr=False)
    adapter: Adapter | None = None

    @property
    def needs_log_probs(self) -> bool:
        """Whether the request asks for log probabilities of generated tokens."""
        return self.return_log_probs or self.num_logprobs is not None

    @cached_property
    def prefix_root(self) -> bytes:
        """The digest of what the keys and values of a token depend on besides tokens, and of the cache salt."""
        if self.adapter is None:
            return blake2b(self.cache_salt.encode()).digest()
        values = json.dumps([self.cache_salt, self.adapter.name, self.adapter.digest])
        # No salt alone has this digest: it is another hash function.
        return blake2b(values.encode(), person=b"lora").digest()

    @property
    def has_optional_outputs(self) -> bool:
        """Whether the request asks for any of the outputs in `triton.outputs`."""
        return (
            self.needs_log_probs
            or self.prompt_logprobs is not None
            or self.return_output_ids
            or self.return_embedding
            or self.return_perf_metrics
        )
