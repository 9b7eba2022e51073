"""/v1/models: the models that the endpoint serves, by the names that requests give."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, TypeAdapter, ValidationError
from starlette.responses import JSONResponse, Response
from triton_llama.endpoint import Endpoint
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.errors import ApiError, from_validation
from triton_llama_openai.output.output_parser import Markers, find_markers, precedes_guided_text
from triton_llama_openai.output.tool_calls import Form
from triton_llama_openai.prompt.tokenizer import Checkpoint, load_checkpoint
from triton_llama_openai.settings import InvalidSettingsError, ModelSettings, Settings
from triton_llama_openai.triton.engine_client import CONFIG_S, CONFIG_TIMEOUT_S, EngineClient
from triton_llama_openai.triton.load_balancer import LoadBalancer

LOG = logging.getLogger("triton_llama_openai")
_PROBE_S = 2.0


@dataclass
class ServedModel:
    """One model: its name, its checkpoint's tokenizer side, its Tritons.

    markers: of its reasoning. reasons_before_guides: whether a guide may hold after that.
    """

    name: str
    checkpoint: Checkpoint
    balancer: LoadBalancer
    tool_form: Form
    markers: Markers | None = None
    reasons_before_guides: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _fingerprint: asyncio.Task[str | None] | None = None
    _fingerprint_time: float = 0.0
    _known_fingerprint: str | None = None
    _differ: bool = False

    async def fingerprint(self) -> str | None:
        """Return the `system_fingerprint`, read once a minute; None without an answer of Triton.

        It changes with the checkpoint's tokenizer and template, the model's config in Triton and this version.
        """
        if self._fingerprint is None or time.monotonic() - self._fingerprint_time >= CONFIG_S:
            self._fingerprint_time = time.monotonic()
            self._fingerprint = asyncio.create_task(self._read_fingerprint())
        # Requests share the task: none of them may cancel it.
        return await asyncio.shield(self._fingerprint)

    async def _read_fingerprint(self) -> str | None:
        working = [replica for replica in self.balancer.replicas if replica.error is None] or self.balancer.replicas
        results = await asyncio.gather(
            *(replica.engine.config(CONFIG_TIMEOUT_S) for replica in working), return_exceptions=True
        )
        configs = [result for result in results if isinstance(result, bytes)]
        if not configs:
            if self._known_fingerprint is None:
                LOG.warning("%s: answers have no system_fingerprint: %s", self.name, results[0])
            return self._known_fingerprint
        if len(set(configs)) > 1 and not self._differ:
            self._differ = True
            LOG.warning("%s: the model's configs differ between its Tritons; an interrupted answer may, too", self.name)
        digest = hashlib.sha256(self.checkpoint.digest + configs[0] + package_version().encode())
        self._known_fingerprint = f"fp_{digest.hexdigest()[:16]}"
        return self._known_fingerprint

    async def why_not_ready(self) -> str | None:
        """Return why none of its Tritons can answer now, None if one can."""
        reasons = await asyncio.gather(*(_why_not_ready(replica.engine) for replica in self.balancer.replicas))
        return None if None in reasons else "; ".join(filter(None, reasons))

    def body(self) -> dict[str, object]:
        """Return the model as /v1/models lists it; the last three fields are vLLM's additions."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "triton-llama",
            "root": self.checkpoint.name,
            "parent": None,
            "max_model_len": self.checkpoint.context,
        }


class Models:
    """All models by name, in the settings' order."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models):
            raise InvalidSettingsError(f"two models have one name: {', '.join(model.name for model in models)}")

    @classmethod
    def load(cls, settings: Settings) -> Models:
        """Load every model's tokenizer side, without a request to Triton.

        Raises:
            InvalidSettingsError: a file is missing or unusable, an address is malformed, or two models have one name.
        """
        return cls([_load(model, settings.hang_timeout) for model in _model_settings(settings)])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """Return the model of this name; None is the only one. Raises ApiError 400 or 404."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        known = ", ".join(self._models)
        if name is None:
            raise ApiError(400, f"model is missing; it must be one of {known}", "model", "missing_required_parameter")
        if name not in self._models:
            raise ApiError(404, f"model is {name!r}; it must be one of {known}", "model", "model_not_found")
        return self._models[name]

    async def ready(self) -> dict[str, str]:
        """Return, by name, why a model can't answer now; empty if all can."""
        reasons = await asyncio.gather(*(model.why_not_ready() for model in self))
        return {model.name: reason for model, reason in zip(self, reasons, strict=True) if reason is not None}

    async def close(self) -> None:
        """Close every connection."""
        for model in self:
            await model.balancer.close()


def add_models(router: APIRouter, models: Models) -> None:
    """Add the routes."""

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The served models, with vLLM's `root` (the checkpoint), `parent` (null) and `max_model_len`."""
        return JSONResponse({"object": "list", "data": [model.body() for model in models]})

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
    default = {"triton": settings.triton}
    return [model if "triton" in model.model_fields_set else model.model_copy(update=default) for model in models]


async def _why_not_ready(engine: EngineClient) -> str | None:
    try:
        ready = await engine.is_ready(_PROBE_S)
    except TritonLlamaError as error:
        return str(error)
    return None if ready else f"the model {engine.model} of {engine.endpoint} is not ready"


def _load(settings: ModelSettings, hang_timeout: float) -> ServedModel:
    try:
        endpoints = [Endpoint.parse(address.strip(), "grpc") for address in settings.triton.split(",")]
    except ValueError as error:
        raise InvalidSettingsError(f"triton: {error}") from error
    if len(set(endpoints)) < len(endpoints):
        raise InvalidSettingsError(f"triton is {settings.triton!r}; it must have each address once")
    checkpoint = load_checkpoint(settings.tokenizer, settings.chat_template, settings.max_model_len, settings.revision)
    name = settings.served_name or checkpoint.name
    form = tool_form(checkpoint) if settings.tool_form == "auto" else settings.tool_form
    addresses = ", ".join(map(str, endpoints))
    LOG.info("%s: %s at %s, tool calls in the form %s", name, settings.model, addresses, form)
    markers, reasons_before_guides = _reasoning(checkpoint)
    if markers is not None:
        LOG.info("%s: text between %s and %s is reasoning_content", name, *markers[:2])
    if checkpoint.template is None:
        LOG.warning("%s: the checkpoint has no chat template, so /v1/chat/completions refuses every request", name)
    elif not checkpoint.template.takes_tools:
        LOG.info("%s: the chat template takes no tools; their definitions go into the system message", name)
    balancer = LoadBalancer([EngineClient(endpoint, settings.model) for endpoint in endpoints], hang_timeout)
    return ServedModel(name, checkpoint, balancer, form, markers, reasons_before_guides)


def tool_form(checkpoint: Checkpoint) -> Form:
    """Return how the model writes calls, as its template does; without a hint Hermes, as in the system message."""
    template = checkpoint.template
    if template is None or not template.takes_tools or "<tool_call>" in template.source:
        return "hermes"
    return "llama3_json"


def _reasoning(checkpoint: Checkpoint) -> tuple[Markers | None, bool]:
    """Return the model's `markers`, None for one that doesn't think or has no template, and `reasons_before_guides`."""
    if checkpoint.template is None:
        return None, False
    source, tokenizer = checkpoint.template.source, checkpoint.tokenizer
    markers = find_markers(source, lambda text: tokenizer.token_to_id(text) is not None)
    return markers, markers is not None and precedes_guided_text(markers, source)


def package_version() -> str:
    """Return this package's version."""
    try:
        return version("triton-llama")
    except PackageNotFoundError:
        return "unknown"
