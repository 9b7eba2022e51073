"""The request log: one line for every answered request, with what it asked for, how it finished and its times.

Prompts are logged only under `log_requests: prompts`, completions never. Ids and error messages hold what
clients wrote: both are bounded here.
"""

from __future__ import annotations

import itertools
import logging
import math

from llama_engine.errors import GenerationError, RequestError
from llama_engine.observability.log_format import Value
from llama_engine.sequence import Result, Sequence, finish_reason

ID_CHARACTERS = 128
ERROR_CHARACTERS = 300
PROMPT_CHARACTERS = 2000
"""Of all prompts of a request together."""

_log = logging.getLogger(__name__)


class RequestLog:
    """Logs requests as the setting `log_requests` says: none, summary or prompts. Thread-safe."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._numbers = itertools.count(1)

    def name(self, request_id: str) -> str:
        """Return the request's name in the log: its client's id, escaped and cut, or "#" and a number without one.

        Printable ASCII, at most ID_CHARACTERS of it.
        """
        # Cut before escaping, too: a client may send megabytes.
        escaped = request_id[: ID_CHARACTERS + 1].encode("unicode_escape").decode()
        return _cut(escaped, ID_CHARACTERS) or f"#{next(self._numbers)}"

    def record(self, name: str, sequences: list[Sequence], stream: bool, refusal: RequestError | None) -> None:
        """Log a request whose sequences have all finished. refusal: why it never became sequences."""
        if self._level == "none":
            return
        results: list[Result] = [sequence.result for sequence in sequences if sequence.result is not None]
        if refusal is not None:
            results = [refusal]
        fields: dict[str, Value] = {
            "id": name,
            "rows": len(sequences),
            "stream": stream,
            "finish_reason": ",".join(dict.fromkeys(map(finish_reason, results))),
            "input_tokens": sum(sequence.num_prompt_tokens for sequence in sequences),
            "output_tokens": sum(sequence.num_output_tokens for sequence in sequences),
            **_times(sequences),
        }
        errors = [result for result in results if isinstance(result, RequestError)]
        if errors:
            fields["error"] = _cut(str(errors[0]), ERROR_CHARACTERS)
        if self._level == "prompts" and sequences:
            share = PROMPT_CHARACTERS // len(sequences)
            fields["prompts"] = [_cut(sequence.request.prompt, share) for sequence in sequences]
        ours = any(isinstance(error, GenerationError) for error in errors)
        _log.log(logging.WARNING if ours else logging.INFO, "request answered", extra={"fields": fields})


def _times(sequences: list[Sequence]) -> dict[str, Value]:
    """Return the request's times, in seconds from its arrival in the model, without those it never reached.

    queue_seconds: until all sequences had slots. first_token_seconds: until all had a token. seconds: until all
    finished.
    """
    arrived = min((sequence.arrived_at for sequence in sequences), default=math.nan)
    times = {
        "queue_seconds": [sequence.admitted_at for sequence in sequences],
        "first_token_seconds": [sequence.first_token_at for sequence in sequences],
        "seconds": [sequence.finished_at for sequence in sequences],
    }
    reached = {name: [time for time in of_all if not math.isnan(time)] for name, of_all in times.items()}
    return {name: round(max(of_all) - arrived, 6) for name, of_all in reached.items() if of_all}


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "~"
