"""The endpoint's description for programs, /openapi.json: its routes, and the schemas that parse their bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from triton_llama_openai.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.completions import CompletionRequest
from triton_llama_openai.protocol.embeddings import EmbeddingRequest
from triton_llama_openai.protocol.messages import CountTokensRequest, MessagesRequest
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.protocol.schema import Schema
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.served.served_model import package_version
from triton_llama_openai.settings import Settings

BODIES: Mapping[str, type[Schema]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
"""The schema of each path with a body. Routes parse bodies themselves, so that FastAPI doesn't know them."""

_RENDERED = {f"{path}/render": BODIES[path] for path in ("/v1/chat/completions", "/v1/completions")}
"""Paths that take the body of another one, and don't stream."""

_COMPONENTS = "#/components/schemas/"
_VALUE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _VALUE, "code": _VALUE},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_TEXT = {"type": "string"}
_MESSAGES_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]},
        "request_id": _TEXT,
    },
    "required": ["type", "error", "request_id"],
}


def openapi_router(routes: Sequence[BaseRoute], settings: Settings) -> APIRouter:
    """Return the route of the document about these, which is made at its first request."""
    router = APIRouter()
    document = cache(partial(openapi_document, [*routes], ignores_unknown=settings.unknown_fields == "ignore"))

    @router.get("/openapi.json", response_model=None)
    async def describe() -> Response:
        """Paths and fields, for programs: OpenAPI 3.1; with the setting `openapi`."""
        return JSONResponse(await asyncio.to_thread(document))

    return router


def openapi_document(routes: Sequence[BaseRoute], *, ignores_unknown: bool) -> dict[str, Any]:
    """Return the document of these routes, OpenAPI 3.1. ignores_unknown: bodies may have other fields, too."""
    document = get_openapi(title="triton-llama-openai", version=package_version(), routes=routes)
    mode: JsonSchemaMode = "validation"
    # Settings leave out paths.
    bodies = {path: schema for path, schema in BODIES.items() if path in document["paths"]}
    names, definitions = models_json_schema(
        [(schema, mode) for schema in bodies.values()], ref_template=f"{_COMPONENTS}{{model}}"
    )
    if ignores_unknown:
        for definition in definitions["$defs"].values():
            definition.pop("additionalProperties", None)
    document["components"] = {"schemas": {**definitions["$defs"], "Error": _ERROR, "MessagesError": _MESSAGES_ERROR}}
    for path, schema in {**bodies, **_RENDERED}.items():
        content = {"application/json": {"schema": names[schema, mode]}}
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": content}
        if "stream" in schema.model_fields and path in BODIES:
            operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for path, operations in document["paths"].items():
        form = "MessagesError" if path.startswith("/v1/messages") else "Error"
        error = {"application/json": {"schema": {"$ref": f"{_COMPONENTS}{form}"}}}
        for operation in operations.values():
            # FastAPI's form of an error, which this endpoint doesn't send.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "Error", "content": error}
    return document
