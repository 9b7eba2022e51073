"""What the endpoint notes of a request while it is answered: for its log line, metrics, headers and spans."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from triton_llama_openai.metrics import LoraUse

TRACEPARENT = ContextVar("traceparent", default="")
"""The span of the request that a task answers, in W3C's form; empty without one."""


class Interruption(NamedTuple):
    """A loss of a request's Triton. outcome: resumed or given_up. Times are monotonic."""

    outcome: str
    began: float
    ended: float


@dataclass(eq=False)
class RequestRecord:
    """One request's figures. first_token_seconds: seconds from arrival, of a stream. ignored: fields without effect.

    session: the client's name for a conversation. model: its served name, of a request for text. adapter: its name, of
    a request with one. finish_reasons: of its choices that have ended. prompt: as it came, or a chat's text.
    key_digest: of the API key, empty without one.
    """

    id: str
    session: str = field(default="", repr=False)
    arrived: float = field(default_factory=time.perf_counter)
    status: int = 500
    first_token_seconds: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    adapter: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    prompt: object = None
    ignored: list[str] = field(default_factory=list)
    key_digest: bytes = field(default=b"", repr=False)

    def saw_text(self) -> None:
        """Note the time of a stream's first text."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.arrived

    def end_interruption(self, outcome: str, began: float) -> None:
        """Note the end of an interruption. began: its monotonic time."""
        self.interruptions.append(Interruption(outcome, began, time.monotonic()))


def lora_use(loaded: int, records: Collection[RequestRecord]) -> LoraUse:
    """Return which adapters the requests in flight use. loaded: number of adapters."""
    used = [(record.adapter, record.completion_tokens > 0) for record in records if record.adapter]
    waiting, running = (sorted({name for name, runs in used if runs is state}) for state in (False, True))
    return LoraUse(loaded, waiting, running)
