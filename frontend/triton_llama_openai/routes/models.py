"""/v1/models: the served models and their adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from triton_llama_openai.served.models import Models


def add_models(router: APIRouter, models: Models) -> None:
    """Add the routes."""

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The served models and their adapters, with vLLM's `root` (the checkpoint, or the adapter), `parent` (null, or
        the adapter's model) and `max_model_len`, with `tasks` (`generate`, `embed`), and with Anthropic's fields."""
        data = [model.body() for model in models.served()]
        # The last three fields are Anthropic's.
        page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse({"object": "list", "data": data, **page})

    # A path: a hub id has a slash.
    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One served model or adapter."""
        return JSONResponse((await models.find(name)).body())
