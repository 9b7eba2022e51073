"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_llama_openai.auth import ApiKeys
from triton_llama_openai.chat import answer_chat
from triton_llama_openai.completions import answer_completion
from triton_llama_openai.errors import ApiError, error_response, from_validation
from triton_llama_openai.limits import HeaderLimit, limited_route, read_body
from triton_llama_openai.metrics import CLIENT_LEFT, CONTENT_TYPE, Metrics, RecordRequests
from triton_llama_openai.models import Models
from triton_llama_openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from triton_llama_openai.schema import Schema
from triton_llama_openai.settings import Settings
from triton_llama_openai.streaming import ClientLeftError
from triton_llama_openai.tokenization import detokenize, tokenize, tokenizer_info

S = TypeVar("S", bound=Schema)
_NO_EMBEDDINGS = "the models of this endpoint generate text; they have no embeddings"


def create_app(settings: Settings, models: Models) -> FastAPI:
    """Return the application. It closes the models' connections when it ends.

    Raises:
        InvalidSettingsError: the file of API keys can't be used.
    """
    metrics = Metrics()
    keys = None if settings.api_keys_file is None else ApiKeys.read(settings.api_keys_file)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await models.close()

    # async: FastAPI would run a plain function in a thread.
    async def authorize(request: Request) -> None:
        if keys is not None:
            keys.check(request.headers.get("authorization"))

    # Without pages that describe the fields: docs/openai.md does, and they load scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(HeaderLimit)
    if settings.allowed_origins is not None:
        origins = [origin.strip() for origin in settings.allowed_origins.split(",")]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RecordRequests, metrics=metrics, log_requests=settings.log_requests)
    _handle_errors(app)
    authorized = [Depends(authorize)]
    app.include_router(_generation(settings, models), dependencies=authorized)
    app.include_router(_models(models), dependencies=authorized)
    app.include_router(_state(models, metrics))
    return app


def _generation(settings: Settings, models: Models) -> APIRouter:
    """Return the routes of requests with a body, which share the bound on requests in flight."""
    router = APIRouter(route_class=limited_route(settings.max_requests))

    async def parse(request: Request, schema: type[S]) -> S:
        """Return a request's body. Raises ApiError for the first violation of the schema, ClientLeftError."""
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout)
        try:
            return schema.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await answer_chat(request, await parse(request, ChatRequest), models, settings)

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await answer_completion(request, await parse(request, CompletionRequest), models, settings)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        raise ApiError(400, _NO_EMBEDDINGS, None, "unsupported_endpoint")

    # In threads: a large text takes the tokenizer long, and it runs without Python's lock.
    @router.post("/tokenize", response_model=None)
    async def tokenize_text(request: Request) -> Response:
        body = await parse(request, TokenizeRequest)
        model = models.find(body.model)
        return JSONResponse(await asyncio.to_thread(tokenize, model, body, settings.max_messages))

    @router.post("/detokenize", response_model=None)
    async def detokenize_tokens(request: Request) -> Response:
        body = await parse(request, DetokenizeRequest)
        return JSONResponse(await asyncio.to_thread(detokenize, models.find(body.model), body))

    return router


def _models(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/tokenizer_info", response_model=None)
    async def describe_tokenizer(model: str | None = None) -> Response:
        return JSONResponse(tokenizer_info(models.find(model)))

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [model.body() for model in models]})

    # A path: a hub id has a slash.
    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        return JSONResponse(models.find(name).body())

    return router


def _state(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """Ready: every model can answer."""
        reasons = await models.ready()
        return JSONResponse({"not_ready": reasons} if reasons else {}, 503 if reasons else 200)

    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """Alive: this process answers, whatever Triton does."""
        return JSONResponse({})

    @router.get("/metrics", response_model=None)
    async def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    return router


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientLeftError)
    async def left(_: Request, __: ClientLeftError) -> Response:
        # It reaches no client; the metrics count it.
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"there is no {request.method} {request.url.path}"
            return error_response(ApiError(404, message, None, "unknown_url"))
        return error_response(ApiError(error.status_code, str(error.detail), None, None))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        # uvicorn logs the exception; the client isn't shown the inside.
        return error_response(ApiError(500, "the endpoint failed; its log has the reason", None, "internal_error"))
