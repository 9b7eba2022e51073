"""/tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

from __future__ import annotations

from triton_llama_openai.chat_template import render_messages
from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.limits import check_messages
from triton_llama_openai.models import ServedModel
from triton_llama_openai.protocol import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.responses import Json
from triton_llama_openai.tool_choice import template_tool


def tokenize(model: ServedModel, request: TokenizeRequest, max_messages: int) -> Json:
    """Return the tokens of a prompt, or of a conversation. Raises ApiError."""
    check_messages(request.messages or [], max_messages)
    if (request.prompt is None) == (request.messages is None):
        number = "neither" if request.prompt is None else "both"
        raise ApiError(400, f"{number} of prompt and messages is given; it must be one", "prompt", "invalid_value")
    if request.messages is None:
        text, special = request.prompt or "", request.add_special_tokens is not False
    else:
        text, special = _prompt(model, request), bool(request.add_special_tokens)
    tokens = model.checkpoint.encode(text, special)
    body: Json = {"count": len(tokens), "max_model_len": model.checkpoint.context, "tokens": tokens}
    if request.return_token_strs:
        body["token_strs"] = model.checkpoint.token_strings(tokens)
    return body


def detokenize(model: ServedModel, request: DetokenizeRequest) -> Json:
    """Return the text of tokens. Raises ApiError for a token that isn't in the vocabulary."""
    size = model.checkpoint.tokenizer.get_vocab_size()
    beyond = next((number for number, token in enumerate(request.tokens) if token >= size), None)
    if beyond is not None:
        raise invalid(f"tokens[{beyond}]", request.tokens[beyond], f"below {size}, the size of the vocabulary")
    return {"prompt": model.checkpoint.decode(request.tokens)}


def tokenizer_info(model: ServedModel) -> Json:
    """Return the special tokens' texts and the chat template; null for those that the checkpoint lacks."""
    checkpoint = model.checkpoint
    special: Json = {name: text or None for name, text in checkpoint.special_tokens.items()}
    template = None if checkpoint.template is None else checkpoint.template.source
    return special | {"chat_template": template, "max_model_len": checkpoint.context}


def _prompt(model: ServedModel, request: TokenizeRequest) -> str:
    return render_messages(
        model.checkpoint.template,
        request.messages or [],
        [template_tool(tool) for tool in request.tools or []],
        add_generation_prompt=request.add_generation_prompt is not False,
        template_kwargs=request.chat_template_kwargs,
    )
