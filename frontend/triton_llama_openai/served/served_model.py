"""A model as requests see it: its name, its tokenizer, how it writes tool calls and reasoning."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from triton_llama_openai.output.output_parser import Markers, find_markers, precedes_guided_text
from triton_llama_openai.output.tool_calls import tool_form
from triton_llama_openai.prompt.tokenizer import PromptTokenizer
from triton_llama_openai.settings import ModelSettings, ToolForm
from triton_llama_openai.triton.description import Adapter, Description
from triton_llama_openai.triton.triton_client import TritonClient

LOG = logging.getLogger("triton_llama_openai")


@dataclass(frozen=True)
class ServedModel:
    """One model as Triton describes it; a request has the same one from its beginning to its end.

    digest: of the description. markers: of its reasoning. reasons_before_guides: whether a guide may hold after that.
    fingerprint: the `system_fingerprint`, which changes with the description and this version. default_temperature:
    OpenAI's, None where the checkpoint has its own. serving: lines for people by label. tasks: generate, embed.
    embedding_size: numbers of an embedding. adapter: the LoRA adapter of that name; parent: its model's name.
    """

    name: str
    digest: str
    tokenizer: PromptTokenizer
    triton: TritonClient
    tool_form: ToolForm
    markers: Markers | None
    reasons_before_guides: bool
    fingerprint: str
    default_temperature: float | None
    serving: Mapping[str, str]
    tasks: tuple[str, ...]
    embedding_size: int
    created: int = field(default_factory=lambda: int(time.time()))
    adapter: Adapter | None = None
    parent: str | None = None

    @classmethod
    def of(
        cls, description: Description, settings: ModelSettings, template: str | None, triton: TritonClient
    ) -> ServedModel:
        """Return the described model. template: the operator's. Raises UnusableCheckpointError."""
        tokenizer = PromptTokenizer.of(description, template)
        name = settings.served_name or tokenizer.name
        template_for_tools = tokenizer.template(with_tools=True)
        form = tool_form(template_for_tools) if settings.tool_form == "auto" else settings.tool_form
        LOG.info("%s: %s at %s, tool calls in the form %s", name, settings.triton_model, settings.triton, form)
        markers, reasons_before_guides = _reasoning(tokenizer)
        if markers is not None:
            LOG.info("%s: text between %s and %s is reasoning_content", name, *markers[:2])
        if template_for_tools is None:
            LOG.warning("%s: the checkpoint has no chat template, so /v1/chat/completions refuses every request", name)
        elif not template_for_tools.takes_tools:
            LOG.info("%s: the chat template takes no tools; their definitions go into the system message", name)
        return cls(
            name=name,
            digest=description.digest,
            tokenizer=tokenizer,
            triton=triton,
            tool_form=form,
            markers=markers,
            reasons_before_guides=reasons_before_guides,
            fingerprint=_fingerprint(description.digest, package_version()),
            default_temperature=None if "temperature" in description.checkpoint_defaults else 1.0,
            serving=description.serving,
            tasks=description.tasks,
            embedding_size=description.embedding_size,
        )

    def with_adapter(self, adapter: Adapter) -> ServedModel:
        """Return the model with an adapter."""
        fingerprint = _fingerprint(self.fingerprint, adapter.digest)
        return replace(self, name=adapter.name, fingerprint=fingerprint, adapter=adapter, parent=self.name)

    def body(self) -> dict[str, object]:
        """Return the model as /v1/models lists it: OpenAI's fields, three of vLLM's, `tasks`, and Anthropic's."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "triton-llama",
            "root": self.tokenizer.name if self.adapter is None else self.name,
            "parent": self.parent,
            "max_model_len": self.tokenizer.context,
            "tasks": self.tasks,
            "type": "model",
            "display_name": self.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": self.tokenizer.context,
        }


def _fingerprint(*parts: str) -> str:
    return f"fp_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def _reasoning(tokenizer: PromptTokenizer) -> tuple[Markers | None, bool]:
    """Return the model's `markers`, None for one that doesn't think or has no template, and `reasons_before_guides`."""
    template = tokenizer.template()
    if template is None:
        return None, False
    markers = find_markers(template.source, lambda text: tokenizer.backend_tokenizer.token_to_id(text) is not None)
    return markers, markers is not None and precedes_guided_text(markers, template.source)


def package_version() -> str:
    """Return this package's version."""
    try:
        return version("triton-llama")
    except PackageNotFoundError:
        return "unknown"
