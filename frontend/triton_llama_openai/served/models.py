"""The models that the endpoint serves, by the names that requests give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from triton_llama.address import ServerAddress
from triton_llama.metrics_page import metrics_address

from triton_llama_openai.errors import ApiError, from_validation
from triton_llama_openai.prompt.chat_template import ChatTemplate, InvalidTemplateError
from triton_llama_openai.record import RequestRecord
from triton_llama_openai.served.served_model import ServedModel
from triton_llama_openai.served.triton_model import TritonModel
from triton_llama_openai.settings import InvalidSettingsError, ModelSettings, Settings
from triton_llama_openai.triton.triton_client import TritonClient
from triton_llama_openai.triton_load import TritonLoad

_START_S = 5.0
"""Seconds that the first descriptions have before the endpoint answers requests without them."""
_REFRESH_S = 2.0
"""Seconds that a request for an unknown model waits for new descriptions."""
Task = Literal["generate", "embed"]
_WITHOUT: dict[Task, str] = {
    "generate": "generates no text: its checkpoint only makes embeddings",
    "embed": "has no embeddings; its server's LLAMA_POOLING turns them on",
}


class Models:
    """All models, in the settings' order."""

    def __init__(self, models: Sequence[TritonModel]) -> None:
        self._models = models

    @classmethod
    def of_settings(cls, settings: Settings) -> Models:
        """Read the settings of every model, without a request to Triton.

        Raises:
            InvalidSettingsError: a file is missing or unusable, an address is malformed, or two models have one name.
        """
        models = _model_settings(settings)
        names = [model.served_name for model in models if model.served_name is not None]
        if len(set(names)) < len(names):
            raise InvalidSettingsError(f"two models have one name: {', '.join(names)}")
        return cls([_triton_model(model) for model in models])

    @property
    def labels(self) -> list[str]:
        """The models' names, for people."""
        return [model.label for model in self._models]

    def served(self) -> list[ServedModel]:
        """Return the described models and their adapters that can be named. Raises ApiError 503 if there is none."""
        names = {model.name for model in self._models}
        served = [each for model in self._models for each in model.served]
        return [each for each in served if not each.adapter or each.name not in names] or [self._models[0].model]

    def has_name(self, name: str, triton: TritonClient) -> bool:
        """Return whether a name is a model's, or an adapter's of another model than the one of `triton`."""
        return any(
            name == model.name or (model.triton is not triton and name in model.adapters) for model in self._models
        )

    async def find(self, name: str | None, field: str = "model") -> ServedModel:
        """Return the model or adapter of this name; None is the only model. field: the request's, for errors.

        An unknown name waits for new descriptions (`TritonModel.refresh`): the adapter may just have been loaded.
        Raises ApiError 400, 404, or 503 before the model is known.
        """
        if name is None and len(self._models) == 1:
            return self._models[0].model
        if name is None:
            message = f"{field} is missing; it must be one of {self._known()}"
            raise ApiError(400, message, field, "missing_required_parameter")
        if not self._named(name) and any(model.served for model in self._models):
            await asyncio.gather(*(model.refresh(_REFRESH_S) for model in self._models))
        named = self._named(name)
        if len(named) > 1:
            message = f"{field} is {name!r}, the name of {len(named)} models or adapters; their names must differ"
            raise ApiError(404, message, field, "model_not_found")
        # One that isn't described yet may be the model, or have the adapter.
        for model in named or [model for model in self._models if model.described is None]:
            return model.find(name)
        raise ApiError(404, f"{field} is {name!r}; it must be one of {self._known()}", field, "model_not_found")

    async def find_for(self, task: Task, name: str | None, record: RequestRecord) -> ServedModel:
        """Return the model or adapter of this name, which the request's record gets.

        Raises ApiError as `find`, and 400 for a model of other tasks.
        """
        model = await self.find(name)
        if task not in model.tasks:
            message = f"model is {model.name!r}, which {_WITHOUT[task]}"
            raise ApiError(400, message, "model", "unsupported_endpoint")
        record.model = model.name
        record.adapter = "" if model.adapter is None else model.adapter.name
        return model

    def _named(self, name: str) -> list[TritonModel]:
        """Return the models of this name; without one, those that have an adapter of it."""
        named = [model for model in self._models if model.name == name]
        return named or [model for model in self._models if name in model.adapters]

    def _known(self) -> str:
        return ", ".join(name for model in self._models for name in model.names)

    def num_adapters(self) -> int:
        """Return the number of loaded adapters of all models."""
        return sum(max(len(model.served) - 1, 0) for model in self._models)

    def triton_loads(self) -> dict[str, dict[int, TritonLoad]]:
        """Return the loads of the models' Tritons by the model's name, without those that aren't known now."""
        return {model.label: loads for model in self._models if (loads := model.triton_loads())}

    async def start(self) -> None:
        """Ask for the models' descriptions."""
        await asyncio.gather(*(model.start(_START_S) for model in self._models))

    async def ready(self) -> dict[str, str]:
        """Return, by name, why a model can't answer now; empty if all can."""
        reasons = await asyncio.gather(*(model.why_not_ready() for model in self._models))
        return {label: reason for label, reason in zip(self.labels, reasons, strict=True) if reason is not None}

    async def close(self) -> None:
        """Close every connection."""
        for model in self._models:
            await model.close()


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


def _triton_model(settings: ModelSettings) -> TritonModel:
    try:
        server = ServerAddress.parse(settings.triton, "grpc")
    except ValueError as error:
        raise InvalidSettingsError(f"triton: {error}") from error
    metrics = [address.strip() for address in (settings.triton_metrics or metrics_address(server)).split(",")]
    template = None if settings.chat_template is None else _read_template(settings.chat_template)
    return TritonModel(settings, server, metrics, template)


def _read_template(file: Path) -> str:
    try:
        source = file.read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettingsError(f"chat_template {str(file)!r} can't be read: {error}") from error
    except InvalidTemplateError as error:
        raise InvalidSettingsError(f"chat_template {str(file)!r} {error}") from error
    return source
