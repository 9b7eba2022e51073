"""A request of one of two tenants, in whatever protocol, and what its own response must say."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from server.tenants.canaries import canary, tokenizer

TENANTS = 2
Fields = Mapping[str, object]
Draw = random.Random


@dataclass(frozen=True)
class Asked:
    """One request.

    number: of its canaries; the tenants take turns. way: how it is sent. what: it asks for, for reports. target: a
    path, or over gRPC a model. parameters: Triton's, over /infer and gRPC. leaves: its client cancels it. says: what
    each of its texts must contain. prompt_tokens, tokens: what it must be told to have, None where that isn't known
    before.
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

    @property
    def id(self) -> str:
        """Its id in the logs."""
        return str(self.parameters.get("id") or self.headers["x-request-id"])

    @property
    def tenant(self) -> int:
        """Whose it is."""
        return self.number % TENANTS

    def having(self, what: str, fields: Fields, says: str = "") -> Asked:
        """Return it with other fields, on which its counts don't depend."""
        return replace(self, what=what, says=says, body={**self.body, **fields})

    def uncounted(self, what: str, fields: Fields, says: str = "") -> Asked:
        """Return it with fields on which the count of its tokens depends, or that are refused."""
        return replace(self.having(what, fields, says), tokens=None)


def headers(number: int) -> dict[str, str]:
    """Return headers that no server needs."""
    mark = canary(number, "header")
    return {"x-tenant": mark, "user-agent": mark, "cookie": f"session={mark}"}


def plain(asked: Asked, draw: Draw) -> Asked:
    """Change nothing."""
    return asked


def leave(asked: Asked, draw: Draw) -> Asked:
    """Cancel it."""
    return replace(asked.uncounted("cancelled", {"max_tokens": 300, "min_tokens": 300}), leaves=True)


def choices(asked: Asked, draw: Draw) -> Asked:
    """Ask for several completions."""
    return asked.uncounted("choices", {"n": draw.randint(2, 3), "temperature": 1.0})


def one_word(draw: Draw) -> tuple[int, str]:
    """Draw a token that is letters; a request that allows it alone shows whose it was."""
    while True:
        token = draw.randrange(300, tokenizer().get_vocab_size())
        word = tokenizer().decode([token])
        if word.isalpha():
            return token, word
