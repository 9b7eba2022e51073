"""perf_analyzer's profile export: when each request was sent and answered, what was in it, and what came back.

Its own report has percentiles of all requests, warm-up included, and a throughput over a window that ends up to a
second after the last answer; the export has the raw times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.analyzer.errors import FailedRunError
from perf.load.protocols import Request


@dataclass(frozen=True)
class Answered:
    """One request and its answer. sent, answered: seconds since 1970."""

    sent: float
    answered: float
    prompt: str
    asked_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def latency(self) -> float:
        """Seconds from sending to the answer."""
        return self.answered - self.sent


def read(path: Path) -> tuple[Answered, ...]:
    """Return the requests of an export in the order in which they were sent. Raises FailedRunError if one failed."""
    try:
        (experiment,) = json.loads(path.read_text())["experiments"]
        answered = [_answered(request) for request in experiment["requests"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise FailedRunError(f"perf_analyzer's profile export {path.name} can't be read: {error!r}") from error
    return tuple(sorted(answered, key=lambda one: one.sent))


def check(answered: Sequence[Answered], requests: Sequence[Request]) -> None:
    """Raise FailedRunError unless exactly these requests were sent, each answered with as many tokens as it asked."""
    asked = Counter((request.prompt, request.output_tokens) for request in requests)
    sent = Counter((one.prompt, one.asked_tokens) for one in answered)
    if asked != sent:
        raise FailedRunError(
            f"perf_analyzer was to send {asked.total()} requests and sent {sent.total()}: {(asked - sent).total()} are "
            f"missing, {(sent - asked).total()} are others or more than asked for"
        )
    short = [one for one in answered if one.output_tokens != one.asked_tokens]
    if short:
        raise FailedRunError(
            f"{len(short)} of {len(answered)} answers have another length than was asked for, the first one "
            f"{short[0].output_tokens} tokens instead of {short[0].asked_tokens}"
        )


def _answered(request: dict[str, Any]) -> Answered:
    if request.get("success", True) is not True:
        raise FailedRunError(f"a request failed: {request.get('response_outputs')}")
    # One response a request: the servers measured here aren't decoupled.
    (answered,), (outputs,) = request["response_timestamps"], request["response_outputs"]
    inputs = request["request_inputs"]
    return Answered(
        sent=request["timestamp"] / 1e9,
        answered=answered / 1e9,
        prompt=inputs["text_input"],
        asked_tokens=int(inputs["max_tokens"]),
        prompt_tokens=int(outputs["num_input_tokens"]),
        output_tokens=int(outputs["num_output_tokens"]),
    )
