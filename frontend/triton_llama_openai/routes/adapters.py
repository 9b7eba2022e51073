"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from triton_llama.errors import RejectedInputError, TritonLlamaError

from triton_llama_openai.errors import ApiError, from_triton
from triton_llama_openai.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings

_FIELDS = {"lora_name": "lora_name", "lora_path": "lora_path", "lora_task_id": "lora_int_id"}


def add_adapter_updates(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the routes. `models` has the change before the client has its answer."""

    @router.post("/v1/load_lora_adapter", response_model=None, response_class=PlainTextResponse)
    async def load_adapter(request: Request) -> Response:
        """vLLM's: loads a LoRA adapter; with the setting `lora_updates`."""
        body = await parse_request(request, LoadAdapterRequest, settings)
        name = body.lora_name
        model = await models.find(body.base_model_name, "base_model_name")
        if models.has_name(name, model.triton):
            message = f"lora_name is {name!r}, the name of a model or of another model's adapter"
            raise ApiError(400, message, "lora_name", "invalid_value")
        try:
            await model.triton.load_adapter(name, body.lora_path, body.lora_int_id, settings.request_timeout)
        except TritonLlamaError as error:
            raise from_triton(error, _FIELDS) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None, response_class=PlainTextResponse)
    async def unload_adapter(request: Request) -> Response:
        """vLLM's: unloads a LoRA adapter once its requests have ended; with the setting `lora_updates`."""
        body = await parse_request(request, UnloadAdapterRequest, settings)
        model = await models.find(body.base_model_name, "base_model_name")
        try:
            await model.triton.unload_adapter(body.lora_name, settings.request_timeout)
        except TritonLlamaError as error:
            # The schema has checked the name, so that the model doesn't have it.
            if isinstance(error, RejectedInputError) and error.inputs == ["lora_name"]:
                raise ApiError(404, str(error), "lora_name", "adapter_not_found") from error
            raise from_triton(error, _FIELDS) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
