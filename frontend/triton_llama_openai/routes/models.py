"""/v1/models: the models that the endpoint serves, by the names that requests give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, TypeAdapter, ValidationError
from starlette.responses import JSONResponse, Response
from triton_llama.endpoint import Endpoint
from triton_llama.status import metrics_address

from triton_llama_openai.errors import ApiError, from_validation
from triton_llama_openai.metrics import EngineLoad
from triton_llama_openai.prompt.chat_template import ChatTemplate, InvalidTemplateError
from triton_llama_openai.routes.backend import Backend
from triton_llama_openai.routes.served_model import ServedModel
from triton_llama_openai.settings import InvalidSettingsError, ModelSettings, Settings

_START_S = 5.0
"""Seconds that the first descriptions have before the endpoint answers requests without them."""


class Models:
    """All models, in the settings' order."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    @classmethod
    def load(cls, settings: Settings) -> Models:
        """Read the settings of every model, without a request to Triton.

        Raises:
            InvalidSettingsError: a file is missing or unusable, an address is malformed, or two models have one name.
        """
        models = _model_settings(settings)
        names = [model.served_name for model in models if model.served_name is not None]
        if len(set(names)) < len(names):
            raise InvalidSettingsError(f"two models have one name: {', '.join(names)}")
        return cls([_backend(model) for model in models])

    @property
    def labels(self) -> list[str]:
        """The models' names, for people."""
        return [backend.label for backend in self._backends]

    def served(self) -> list[ServedModel]:
        """Return the models that have been described. Raises ApiError 503 if there is none."""
        described = [backend.described for backend in self._backends if backend.described is not None]
        return described or [self._backends[0].model]

    def find(self, name: str | None) -> ServedModel:
        """Return the model of this name; None is the only one. Raises ApiError 400, 404, or 503 before it is known."""
        if name is None and len(self._backends) == 1:
            return self._backends[0].model
        known = ", ".join(backend.name for backend in self._backends if backend.name is not None)
        if name is None:
            raise ApiError(400, f"model is missing; it must be one of {known}", "model", "missing_required_parameter")
        named = [backend for backend in self._backends if backend.name == name]
        if len(named) > 1:
            message = f"model is {name!r}, the name of {len(named)} models; their served_name must differ"
            raise ApiError(404, message, "model", "model_not_found")
        # One that has no name yet may be the model.
        for backend in named or [backend for backend in self._backends if backend.name is None]:
            return backend.model
        raise ApiError(404, f"model is {name!r}; it must be one of {known}", "model", "model_not_found")

    def loads(self) -> dict[str, EngineLoad]:
        """Return the models' loads by name, without those that aren't known now."""
        loads = {backend.label: backend.load() for backend in self._backends}
        return {label: load for label, load in loads.items() if load is not None}

    async def start(self) -> None:
        """Ask for the models' descriptions."""
        await asyncio.gather(*(backend.start(_START_S) for backend in self._backends))

    async def ready(self) -> dict[str, str]:
        """Return, by name, why a model can't answer now; empty if all can."""
        reasons = await asyncio.gather(*(backend.why_not_ready() for backend in self._backends))
        return {label: reason for label, reason in zip(self.labels, reasons, strict=True) if reason is not None}

    async def close(self) -> None:
        """Close every connection."""
        for backend in self._backends:
            await backend.close()


def add_models(router: APIRouter, models: Models) -> None:
    """Add the routes."""

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The served models, with vLLM's `root` (the checkpoint), `parent` (null) and `max_model_len`."""
        return JSONResponse({"object": "list", "data": [model.body() for model in models.served()]})

    # A path: a hub id has a slash.
    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One served model."""
        return JSONResponse(models.find(name).body())


def _model_settings(settings: Settings) -> list[ModelSettings]:
    """Return the settings of each model, from `models_file` or the settings themselves."""
    if settings.models_file is None:
        return [settings]
    entries = TypeAdapter(Annotated[list[ModelSettings], Field(min_length=1)])
    try:
        models = entries.validate_json(settings.models_file.read_bytes(), strict=True)
    except ValidationError as error:
        raise InvalidSettingsError(f"models_file {settings.models_file}: {from_validation(error)}") from error
    except OSError as error:
        raise InvalidSettingsError(f"models_file {settings.models_file} can't be read: {error}") from error
    default = {"triton": settings.triton, "triton_metrics": settings.triton_metrics}
    return [model if "triton" in model.model_fields_set else model.model_copy(update=default) for model in models]


def _backend(settings: ModelSettings) -> Backend:
    try:
        endpoint = Endpoint.parse(settings.triton, "grpc")
    except ValueError as error:
        raise InvalidSettingsError(f"triton: {error}") from error
    metrics = [address.strip() for address in (settings.triton_metrics or metrics_address(endpoint)).split(",")]
    template = None if settings.chat_template is None else _read_template(settings.chat_template)
    return Backend(settings, endpoint, metrics, template)


def _read_template(file: Path) -> str:
    try:
        source = file.read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettingsError(f"chat_template {str(file)!r} can't be read: {error}") from error
    except InvalidTemplateError as error:
        raise InvalidSettingsError(f"chat_template {str(file)!r} {error}") from error
    return source
