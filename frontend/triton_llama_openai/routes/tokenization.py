"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_llama_openai.prompt.tokenizer import detokenize, tokenize, tokenizer_info
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings


def add_tokenization(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the routes with a body."""
    # In threads: a large text takes the tokenizer long, and it runs without Python's lock.

    @router.post("/tokenize", response_model=None)
    async def tokenize_text(request: Request) -> Response:
        """vLLM's: a text or a conversation as tokens."""
        body = await parse_request(request, TokenizeRequest, settings)
        model = await models.find(body.model)
        return JSONResponse(await asyncio.to_thread(tokenize, model.tokenizer, body, settings))

    @router.post("/detokenize", response_model=None)
    async def detokenize_tokens(request: Request) -> Response:
        """vLLM's: tokens as text."""
        body = await parse_request(request, DetokenizeRequest, settings)
        model = await models.find(body.model)
        return JSONResponse(await asyncio.to_thread(detokenize, model.tokenizer, body))


def add_tokenizer_info(router: APIRouter, models: Models) -> None:
    """Add the route of the tokenizer's description."""

    @router.get("/tokenizer_info", response_model=None)
    async def describe_tokenizer(model: str | None = None) -> Response:
        """vLLM's: special tokens, chat template, `tokenizer_class` and `max_model_len`, which `lm_eval` asks for."""
        return JSONResponse(tokenizer_info((await models.find(model)).tokenizer))
