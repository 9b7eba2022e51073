"""The models that the endpoint serves, by the names that requests give."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from triton_llama.endpoint import Endpoint
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.checkpoint import Checkpoint, load_checkpoint
from triton_llama_openai.engine_client import EngineClient
from triton_llama_openai.errors import ApiError, from_validation
from triton_llama_openai.schema import Schema
from triton_llama_openai.settings import InvalidSettingsError, Settings
from triton_llama_openai.tool_calls import Form

LOG = logging.getLogger("triton_llama_openai")
_FINGERPRINT_S = 60.0
_PROBE_S = 2.0


class ModelEntry(Schema):
    """A model of the file `models_file`; the settings of the same names."""

    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    triton: str | None = None
    model: str = Settings.model
    tokenizer: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    tool_form: Literal["auto", "hermes", "llama3_json"] = "auto"
    max_model_len: Annotated[int, Field(ge=2, le=1 << 20)] | None = None


@dataclass
class ServedModel:
    """One model: its name, its checkpoint's tokenizer side, the connection to its Triton."""

    name: str
    checkpoint: Checkpoint
    engine: EngineClient
    tool_form: Form
    created: int = field(default_factory=lambda: int(time.time()))
    _fingerprint: asyncio.Task[str | None] | None = None
    _asked: float = 0.0

    async def fingerprint(self) -> str | None:
        """Return what names the model's configuration, asked for once a minute; None if Triton doesn't say.

        It changes with the checkpoint's tokenizer and template, the model's config in Triton and this version.
        """
        if self._fingerprint is None or time.monotonic() - self._asked >= _FINGERPRINT_S:
            self._asked = time.monotonic()
            self._fingerprint = asyncio.create_task(self._ask_fingerprint())
        # Requests share the task: none of them may cancel it.
        return await asyncio.shield(self._fingerprint)

    async def _ask_fingerprint(self) -> str | None:
        try:
            config = await self.engine.config(_PROBE_S)
        except TritonLlamaError as error:
            LOG.warning("%s: answers have no system_fingerprint: %s", self.name, error)
            return None
        digest = hashlib.sha256(self.checkpoint.digest + config + _package_version().encode())
        return f"fp_{digest.hexdigest()[:16]}"

    async def why_not_ready(self) -> str | None:
        """Return why Triton's model can't answer now, None if it can."""
        try:
            ready = await self.engine.is_ready(_PROBE_S)
        except TritonLlamaError as error:
            return str(error)
        return None if ready else f"Triton's model {self.engine.model} is not ready"

    def body(self) -> dict[str, object]:
        """Return the model as /v1/models lists it; max_model_len is vLLM's addition."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "triton-llama",
            "max_model_len": self.checkpoint.context,
        }


class ServedModels:
    """All models by name, in the settings' order."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models):
            raise InvalidSettingsError(f"two models have one name: {', '.join(model.name for model in models)}")

    @classmethod
    def load(cls, settings: Settings) -> ServedModels:
        """Load every model's tokenizer side; nothing is asked of Triton yet.

        Raises:
            InvalidSettingsError: a file is missing or unusable.
        """
        return cls([_load(entry, settings.triton) for entry in _entries(settings)])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """Return the model of this name; None is the only one. Raises ApiError 404."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        found = self._models.get(name or "")
        if found is None:
            known = ", ".join(self._models)
            raise ApiError(404, f"model is {name!r}; it must be one of {known}", "model", "model_not_found")
        return found

    async def ready(self) -> dict[str, str]:
        """Return, by name, why a model can't answer now; empty if all can."""
        reasons = await asyncio.gather(*(model.why_not_ready() for model in self))
        return {model.name: reason for model, reason in zip(self, reasons, strict=True) if reason is not None}

    async def close(self) -> None:
        """Close every connection."""
        for model in self:
            await model.engine.close()


def _entries(settings: Settings) -> list[ModelEntry]:
    if settings.models_file is None:
        names = ("served_name", "model", "tokenizer", "revision", "tool_form", "max_model_len")
        template = None if settings.chat_template is None else str(settings.chat_template)
        return [
            ModelEntry.model_validate({name: getattr(settings, name) for name in names} | {"chat_template": template})
        ]
    entries = TypeAdapter(Annotated[list[ModelEntry], Field(min_length=1)])
    try:
        return entries.validate_json(settings.models_file.read_bytes())
    except ValidationError as error:
        raise InvalidSettingsError(f"models_file {settings.models_file}: {from_validation(error)}") from error
    except OSError as error:
        raise InvalidSettingsError(f"models_file {settings.models_file} can't be read: {error}") from error


def _load(entry: ModelEntry, triton: str) -> ServedModel:
    try:
        endpoint = Endpoint.parse(entry.triton or triton, "grpc")
    except ValueError as error:
        raise InvalidSettingsError(f"triton: {error}") from error
    template = None if entry.chat_template is None else Path(entry.chat_template)
    checkpoint = load_checkpoint(entry.tokenizer, template, entry.max_model_len, entry.revision)
    name = entry.served_name or checkpoint.name
    form = tool_form(checkpoint) if entry.tool_form == "auto" else entry.tool_form
    LOG.info("%s: %s at %s, tool calls in the form %s", name, entry.model, endpoint, form)
    if checkpoint.template is None:
        LOG.warning("%s: the checkpoint has no chat template, so /v1/chat/completions refuses every request", name)
    elif not checkpoint.template.takes_tools:
        LOG.info("%s: the chat template takes no tools; their definitions go into the system message", name)
    return ServedModel(name, checkpoint, EngineClient(endpoint, entry.model), form)


def tool_form(checkpoint: Checkpoint) -> Form:
    """Return how the model writes calls, as its template does; without a hint Hermes, which the fallback asks for."""
    template = checkpoint.template
    if template is None or not template.takes_tools or "<tool_call>" in template.source:
        return "hermes"
    return "llama3_json"


def _package_version() -> str:
    try:
        return version("triton-llama")
    except PackageNotFoundError:
        return "unknown"
