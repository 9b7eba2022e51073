"""Truncation of prompts to their last tokens, as `truncate_prompt_tokens` says."""

from __future__ import annotations

from collections.abc import Sequence

from triton_llama_openai.errors import invalid
from triton_llama_openai.generation import Prompt
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.tokenizer import Checkpoint


def truncate(request: SamplingRequest, prompts: Sequence[Prompt], checkpoint: Checkpoint) -> list[Prompt]:
    """Return the prompts, of longer ones the last tokens, as `truncate_prompt_tokens` says. It tokenizes texts.

    As under vLLM, a BOS that is cut off isn't added again.

    Raises:
        ApiError: the request keeps more tokens than the context has room for.
    """
    count, room = request.truncate_prompt_tokens, checkpoint.context - 1
    if count is None:
        return list(prompts)
    if count > room:
        raise invalid("truncate_prompt_tokens", count, f"-1, or 1 … {room} (max_model_len - 1)")
    if count < 0:
        new_tokens = request.max_new_tokens or 1
        # With more new tokens than the context has, max_tokens is refused or reduced.
        count = checkpoint.context - new_tokens if new_tokens < checkpoint.context else room
    return [_last_tokens(prompt, count, checkpoint) for prompt in prompts]


def _last_tokens(prompt: Prompt, count: int, checkpoint: Checkpoint) -> Prompt:
    tokens = checkpoint.prompt_ids(prompt)
    return tokens[-count:] if len(tokens) > count else prompt
