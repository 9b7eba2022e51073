"""What is put under load: where it is, and which of the four protocols it speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Protocol = Literal["triton_generate", "triton_stream", "openai_completions", "fastapi"]
"""triton_generate: /v2/models/MODEL/generate, one response. triton_stream: .../generate_stream, server-sent events.
openai_completions: /v1/completions, server-sent events. fastapi: /generate, one response: the articles' servers."""


@dataclass(frozen=True)
class Target:
    """A server. url: http://host:port. fields: further ones for every request's JSON, such as a peer's `ignore_eos`."""

    name: str
    protocol: Protocol
    url: str
    model: str
    fields: Mapping[str, object] = field(default_factory=dict)
