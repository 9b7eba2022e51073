"""A request of one of two tenants, in whatever protocol, and what its own response must say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TENANTS = 2
Fields = Mapping[str, object]


@dataclass(frozen=True)
class Asked:
    """One request.

    number: of its canaries; the tenants take turns. way: how it is sent. what: it asks for, for reports. target: a
    path, or over gRPC a model. parameters: Triton's, over /infer and gRPC. leaves: its client cancels it. says: what
    each of its texts must contain. prompt_tokens, tokens: what it must be told to have, None where that isn't known
    before. repeatable: the same request alone gets the same response.
    """

    number: int
    way: str
    what: str
    target: str
    body: Fields
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Fields = field(default_factory=dict)
    leaves: bool = False
    says: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    repeatable: bool = True

    @property
    def id(self) -> str:
        """Its id in the logs."""
        return str(self.parameters.get("id") or self.headers["x-request-id"])

    @property
    def tenant(self) -> int:
        """Whose it is."""
        return self.number % TENANTS
