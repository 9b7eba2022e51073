"""Prompts cut to the number of tokens that `truncate_prompt_tokens` keeps."""

from __future__ import annotations

from collections.abc import Sequence

from triton_llama_openai.errors import invalid
from triton_llama_openai.prompt.tokenizer import PromptTokenizer
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.triton.inputs import Prompt


def truncate(request: SamplingRequest, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> list[Prompt]:
    """Return the prompts, of longer ones the last tokens, as `truncate_prompt_tokens` says. It tokenizes texts.

    As under vLLM, a BOS that is cut off isn't added again.

    Raises:
        ApiError: the request keeps more tokens than the context has room for.
    """
    count, room = request.truncate_prompt_tokens, tokenizer.context - 1
    if count is None:
        return list(prompts)
    if count > room:
        raise invalid("truncate_prompt_tokens", count, f"-1, or 1 … {room} (max_model_len - 1)")
    if count < 0:
        maximum = request.DEFAULT_MAX_TOKENS if request.max_new_tokens is None else request.max_new_tokens
        new_tokens = maximum or 1
        # With more new tokens than the context has, max_tokens is refused or reduced.
        count = tokenizer.context - new_tokens if new_tokens < tokenizer.context else room
    return [_last_tokens(prompt, count, tokenizer) for prompt in prompts]


def _last_tokens(prompt: Prompt, count: int, tokenizer: PromptTokenizer) -> Prompt:
    tokens = tokenizer.prompt_ids(prompt)
    return tokens[-count:] if len(tokens) > count else prompt
