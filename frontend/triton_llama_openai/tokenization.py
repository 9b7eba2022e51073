"""/tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

from triton_llama_openai.answer import Json
from triton_llama_openai.conversation import check_messages, render
from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.served_models import ServedModel
from triton_llama_openai.token_request import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.tools import shown_tool


def tokenize(model: ServedModel, asked: TokenizeRequest, most_messages: int) -> Json:
    """Return the tokens of a prompt, or of a conversation. Raises ApiError."""
    check_messages(asked.messages or [], most_messages)
    if (asked.prompt is None) == (asked.messages is None):
        given = "neither" if asked.prompt is None else "both"
        raise ApiError(400, f"{given} of prompt and messages is given; it must be one", "prompt", "invalid_value")
    if asked.messages is None:
        text, special = asked.prompt or "", asked.add_special_tokens is not False
    else:
        text, special = _prompt(model, asked), bool(asked.add_special_tokens)
    tokens = model.checkpoint.encode(text, special)
    answer: Json = {"count": len(tokens), "max_model_len": model.checkpoint.context, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = model.checkpoint.token_strings(tokens)
    return answer


def detokenize(model: ServedModel, asked: DetokenizeRequest) -> Json:
    """Return the text of tokens. Raises ApiError for a token that isn't in the vocabulary."""
    size = model.checkpoint.tokenizer.get_vocab_size()
    beyond = next((number for number, token in enumerate(asked.tokens) if token >= size), None)
    if beyond is not None:
        raise invalid(f"tokens[{beyond}]", asked.tokens[beyond], f"below {size}, the size of the vocabulary")
    return {"prompt": model.checkpoint.decode(asked.tokens)}


def tokenizer_info(model: ServedModel) -> Json:
    """Return the special tokens' texts and the chat template; null is what the checkpoint lacks."""
    checkpoint = model.checkpoint
    special: Json = {name: text or None for name, text in checkpoint.special_tokens.items()}
    template = None if checkpoint.template is None else checkpoint.template.source
    return special | {"chat_template": template, "max_model_len": checkpoint.context}


def _prompt(model: ServedModel, asked: TokenizeRequest) -> str:
    return render(
        model.checkpoint.template,
        asked.messages or [],
        [shown_tool(tool) for tool in asked.tools or []],
        add_generation_prompt=asked.add_generation_prompt is not False,
        variables=asked.chat_template_kwargs,
    )
