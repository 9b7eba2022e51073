"""The application: its routes and middleware, and what errors become."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from triton_llama_openai.auth import ApiKeys
from triton_llama_openai.errors import ApiError, ClientLeftError, error_response
from triton_llama_openai.metrics import CLIENT_LEFT, Metrics
from triton_llama_openai.middleware import HeaderLimit, NormalizeTarget, RecordRequests, limited_route
from triton_llama_openai.openapi import openapi_router
from triton_llama_openai.record import RequestRecord, lora_use
from triton_llama_openai.routes.adapters import add_adapter_updates
from triton_llama_openai.routes.chat import add_chat
from triton_llama_openai.routes.completions import add_completions
from triton_llama_openai.routes.embeddings import add_embeddings
from triton_llama_openai.routes.health import health_router
from triton_llama_openai.routes.messages import add_messages
from triton_llama_openai.routes.models import add_models
from triton_llama_openai.routes.page import has_page, page_router
from triton_llama_openai.routes.responses import add_responses, add_stored_responses
from triton_llama_openai.routes.tokenization import add_tokenization, add_tokenizer_info
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import InvalidSettingsError, Settings

_EXPOSED_HEADERS = ["x-request-id", "request-id", "x-ignored-parameters", "retry-after"]
"""Headers of an answer that pages of other origins may read."""


def create_app(settings: Settings, models: Models, on_start: Callable[[], None] = lambda: None) -> FastAPI:
    """Return the application. It asks for the models' descriptions until it ends. on_start: called when it serves.

    Raises:
        InvalidSettingsError: the file of API keys can't be used, or the packages for traces are missing.
    """
    records: set[RequestRecord] = set()
    metrics = Metrics(models.triton_loads, lambda: lora_use(models.num_adapters(), records))
    authorized = []
    if settings.api_keys_file is not None:
        authorized = [Depends(ApiKeys.read(settings.api_keys_file).authorize)]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await models.start()
        on_start()
        yield
        await models.close()
        close_traces()

    # Without FastAPI's own pages: they load scripts from elsewhere, and its document asks for no key.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    # The one that is added last sees a request first.
    app.add_middleware(HeaderLimit)
    if settings.allowed_origins is not None:
        origins = [origin.strip() for origin in settings.allowed_origins.split(",")]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
    close_traces = _trace(app, settings.traces)
    app.add_middleware(RecordRequests, metrics=metrics, records=records, log_requests=settings.log_requests)
    app.add_middleware(NormalizeTarget)
    _handle_errors(app)
    app.include_router(_with_bodies(models, settings), dependencies=authorized)
    app.include_router(_without_bodies(models), dependencies=authorized)
    app.include_router(health_router(models, metrics))
    if has_page(settings):
        app.include_router(page_router(models, authorized))
    if settings.openapi == "on":
        app.include_router(openapi_router(app.routes, settings), dependencies=authorized)
    return app


def _trace(app: FastAPI, collector: str) -> Callable[[], None]:
    """Send spans of an application's requests, unless the collector is "off"; return a function that ends that."""
    if collector == "off":
        return lambda: None
    try:
        from triton_llama_openai.traces import TraceRequests, Traces
    except ImportError as error:
        message = "traces needs OpenTelemetry; install it with pip install 'triton-llama[tracing]'"
        raise InvalidSettingsError(message) from error
    traces = Traces(collector)
    app.add_middleware(TraceRequests, tracer=traces.tracer)
    return traces.close


def _with_bodies(models: Models, settings: Settings) -> APIRouter:
    """Return the routes of requests with a body, which share the bound on requests in flight."""
    router = APIRouter(route_class=limited_route(settings.max_requests))
    add_chat(router, models, settings)
    add_completions(router, models, settings)
    add_responses(router, models, settings)
    add_messages(router, models, settings)
    add_embeddings(router, models, settings)
    add_tokenization(router, models, settings)
    if settings.lora_updates == "on":
        add_adapter_updates(router, models, settings)
    return router


def _without_bodies(models: Models) -> APIRouter:
    router = APIRouter()
    add_stored_responses(router)
    add_tokenizer_info(router, models)
    add_models(router, models)
    return router


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(ClientLeftError)
    async def left(_: Request, __: ClientLeftError) -> Response:
        # It reaches no client; the metrics count it.
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> Response:
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path}"
            if request.url.path.startswith("/v1/v1/"):
                message += ": the client adds /v1 to its base URL"
            response = error_response(ApiError(error.status_code, message, None, "unknown_url"), request.scope)
            # Allow: methods of the first route of this path.
            response.headers.update(error.headers or {})
            return response
        return error_response(ApiError(error.status_code, str(error.detail), None, None), request.scope)

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> Response:
        # uvicorn logs the exception; the client isn't shown the inside.
        error = ApiError(500, "the endpoint failed; its log has the reason", None, "internal_error")
        return error_response(error, request.scope)
