"""The routes, with the bounds on a request's headers, its body's bytes and seconds, and requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic.config import ExtraValues
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from triton_llama_openai.auth import ApiKeys, CacheSalts
from triton_llama_openai.errors import ApiError, ClientLeftError, error_response, from_validation, shorten
from triton_llama_openai.metrics import CLIENT_LEFT, CONTENT_TYPE, Metrics, RecordRequests
from triton_llama_openai.openapi import openapi_document
from triton_llama_openai.prompt.tokenizer import detokenize, tokenize, tokenizer_info
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.completions import CompletionRequest
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.protocol.schema import Schema
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.routes.chat import answer_chat
from triton_llama_openai.routes.completions import answer_completion
from triton_llama_openai.routes.models import Models
from triton_llama_openai.routes.responses import answer_response
from triton_llama_openai.settings import Settings

S = TypeVar("S", bound=Schema)
MAX_HEADER_BYTES = 32 << 10
"""Maximum bytes of all headers. uvicorn closes a connection that sends twice as many."""
_EXPOSED_HEADERS = ["x-request-id", "x-ignored-parameters", "retry-after"]
"""Headers of an answer that pages of other origins may read."""
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
        request.state.key_digest = b"" if keys is None else keys.check(request.headers.get("authorization"))

    # Without FastAPI's own pages: they load scripts from elsewhere, and its document asks for no key.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(_HeaderLimit)
    if settings.allowed_origins is not None:
        origins = [origin.strip() for origin in settings.allowed_origins.split(",")]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(RecordRequests, metrics=metrics, log_requests=settings.log_requests)
    _handle_errors(app)
    authorized = [Depends(authorize)]
    app.include_router(_generation(settings, models), dependencies=authorized)
    app.include_router(_stored_responses(), dependencies=authorized)
    app.include_router(_models(models), dependencies=authorized)
    app.include_router(_state(models, metrics))
    if settings.openapi == "on":
        app.include_router(_description(app.routes, settings), dependencies=authorized)
    return app


def _generation(settings: Settings, models: Models) -> APIRouter:
    """Return the routes of requests with a body, which share the bound on requests in flight."""
    router = APIRouter(route_class=_limited_route(settings.max_requests))
    salts = CacheSalts(shared=settings.prefix_cache_shared == "on")

    extra: ExtraValues = "allow" if settings.unknown_fields == "ignore" else "forbid"

    async def parse(request: Request, schema: type[S]) -> S:
        """Return a request's body. Raises ApiError for the first violation of the schema, ClientLeftError."""
        text = await _read_body(request, settings.max_body_bytes, settings.body_timeout)
        try:
            body = schema.model_validate_json(text, extra=extra)
        except ValidationError as error:
            raise from_validation(error) from error
        request.state.record.ignored = body.ignored()
        return body

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """A chat, streamed or not."""
        chat = await parse(request, ChatRequest)
        return await answer_chat(request, chat, models, settings, salts.salt(request.state.key_digest, chat.cache_salt))

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Texts or tokens, one prompt or several."""
        completion = await parse(request, CompletionRequest)
        salt = salts.salt(request.state.key_digest, completion.cache_salt)
        return await answer_completion(request, completion, models, settings, salt)

    @router.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """A response, streamed or not (docs/openai.md#the-responses-api)."""
        body = await parse(request, ResponsesRequest)
        salt = salts.salt(request.state.key_digest, body.cache_salt)
        return await answer_response(request, body, models, settings, salt)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        """Refused: the models generate text."""
        raise ApiError(400, _NO_EMBEDDINGS, None, "unsupported_endpoint")

    # In threads: a large text takes the tokenizer long, and it runs without Python's lock.
    @router.post("/tokenize", response_model=None)
    async def tokenize_text(request: Request) -> Response:
        """vLLM's: a text or a conversation as tokens."""
        body = await parse(request, TokenizeRequest)
        model = models.find(body.model)
        return JSONResponse(await asyncio.to_thread(tokenize, model.checkpoint, body, settings.max_messages))

    @router.post("/detokenize", response_model=None)
    async def detokenize_tokens(request: Request) -> Response:
        """vLLM's: tokens as text."""
        body = await parse(request, DetokenizeRequest)
        return JSONResponse(await asyncio.to_thread(detokenize, models.find(body.model).checkpoint, body))

    return router


def _stored_responses() -> APIRouter:
    """Return the routes of responses that OpenAI's servers would have stored."""
    router = APIRouter()

    @router.get("/v1/responses/{name:path}", response_model=None)
    @router.delete("/v1/responses/{name:path}", response_model=None)
    @router.post("/v1/responses/{name}/cancel", response_model=None)
    async def stored_response(name: str) -> Response:
        """404: answers are not stored."""
        raise ApiError(404, f"there is no response {shorten(name)}: answers are not stored", None, "response_not_found")

    return router


def _models(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/tokenizer_info", response_model=None)
    async def describe_tokenizer(model: str | None = None) -> Response:
        """vLLM's: special tokens, chat template, `tokenizer_class` and `max_model_len`, which `lm_eval` asks for."""
        return JSONResponse(tokenizer_info(models.find(model).checkpoint))

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The served models, with vLLM's `root` (the checkpoint), `parent` (null) and `max_model_len`."""
        return JSONResponse({"object": "list", "data": [model.body() for model in models]})

    # A path: a hub id has a slash.
    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One served model."""
        return JSONResponse(models.find(name).body())

    return router


def _description(routes: Sequence[BaseRoute], settings: Settings) -> APIRouter:
    """Return the route of the document about these, which is made at its first request."""
    router = APIRouter()
    document = cache(partial(openapi_document, [*routes], ignores_unknown=settings.unknown_fields == "ignore"))

    @router.get("/openapi.json", response_model=None)
    async def describe() -> Response:
        """Paths and fields, for programs: OpenAPI 3.1; with the setting `openapi`."""
        return JSONResponse(await asyncio.to_thread(document))

    return router


def _state(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=None, responses={503: {"description": "Not ready"}})
    async def health() -> Response:
        """200 if every model can answer now, at one of its Tritons at least, else 503 with the reasons; no key."""
        reasons = await models.ready()
        return JSONResponse({"not_ready": reasons} if reasons else {}, 503 if reasons else 200)

    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """200 as long as this process answers, whatever Triton does; no key."""
        return JSONResponse({})

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def page() -> Response:
        """The metrics, for Prometheus; no key."""
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
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path}"
            response = error_response(ApiError(error.status_code, message, None, "unknown_url"))
            # Allow: methods of the first route of this path.
            response.headers.update(error.headers or {})
            return response
        return error_response(ApiError(error.status_code, str(error.detail), None, None))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        # uvicorn logs the exception; the client isn't shown the inside.
        return error_response(ApiError(500, "the endpoint failed; its log has the reason", None, "internal_error"))


class _HeaderLimit:
    """ASGI middleware that refuses requests with large headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, or answer 431."""
        app = self._app
        if sum(len(name) + len(value) for name, value in scope.get("headers", [])) > MAX_HEADER_BYTES:
            message = f"the request's headers are too large; they must be at most {MAX_HEADER_BYTES} bytes"
            app = error_response(ApiError(431, message, None, "headers_too_large"))
        await app(scope, receive, send)


async def _read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: it is larger than the bound, announced or not, or takes longer than `seconds` to arrive.
        ClientLeftError: the client has left before its end.
    """
    too_large = ApiError(413, f"the body is too large; it must be at most {max_bytes} bytes", None, "body_too_large")
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s to arrive", None, "timeout") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(body)


def _limited_route(max_requests: int) -> type[APIRoute]:
    """Return a class of routes that together run `max_requests` requests; one more is refused with 503.

    A request counts from before its body to the end of its answer.
    """
    running = 0

    class LimitedRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            if running >= max_requests:
                raise ApiError(503, f"{max_requests} requests are in flight; try again later", None, "overloaded", 1)
            running += 1
            try:
                await super().handle(scope, receive, send)
            finally:
                running -= 1

    return LimitedRoute
