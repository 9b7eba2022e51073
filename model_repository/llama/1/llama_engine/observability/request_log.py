"""One log line for every request that was answered: what it asked for, how it ended and where its time went.

Knows tickets and their outcomes; how a line looks is `log_format.py`'s. A prompt is in it only where the setting
`log_requests` says so, a completion never. Ids and error messages hold what clients wrote: both are bounded here.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence

from llama_engine.errors import GenerationError, RequestError
from llama_engine.observability.log_format import Value
from llama_engine.rows import Outcome, reason
from llama_engine.tickets import Ticket

ID_CHARACTERS = 128
ERROR_CHARACTERS = 300
PROMPT_CHARACTERS = 2000
"""Of all prompts of a request together."""

_log = logging.getLogger(__name__)


class RequestLog:
    """Notes requests as the setting `log_requests` says: none, summary or prompts. Any thread may use it."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._numbers = itertools.count(1)

    def name(self, given: str) -> str:
        """Return what the log calls a request: its client's id, escaped and cut, or a number if it has none.

        The result is printable ASCII, at most ID_CHARACTERS of it. A number begins with #.
        """
        # Cut before, too: a client may send megabytes.
        escaped = given[: ID_CHARACTERS + 1].encode("unicode_escape").decode()
        return _cut(escaped, ID_CHARACTERS) or f"#{next(self._numbers)}"

    def answered(self, name: str, tickets: Sequence[Ticket], streams: bool, refusal: RequestError | None) -> None:
        """Note a request whose rows have all ended. refusal: what was wrong with one that never became rows."""
        if self._level == "none":
            return
        outcomes: list[Outcome] = [ticket.outcome for ticket in tickets if ticket.outcome is not None]
        if refusal is not None:
            outcomes = [refusal]
        fields: dict[str, Value] = {
            "id": name,
            "rows": len(tickets),
            "stream": streams,
            "finish_reason": ",".join(dict.fromkeys(map(reason, outcomes))),
            "input_tokens": sum(len(ticket.row.request.prompt_tokens) for ticket in tickets),
            "output_tokens": sum(ticket.row.transcript.num_tokens for ticket in tickets),
            **_times(tickets),
        }
        errors = [outcome for outcome in outcomes if isinstance(outcome, RequestError)]
        if errors:
            fields["error"] = _cut(str(errors[0]), ERROR_CHARACTERS)
        if self._level == "prompts" and tickets:
            share = PROMPT_CHARACTERS // len(tickets)
            fields["prompts"] = [_cut(ticket.row.request.prompt, share) for ticket in tickets]
        ours = any(isinstance(error, GenerationError) for error in errors)
        _log.log(logging.WARNING if ours else logging.INFO, "request answered", extra={"fields": fields})


def _times(tickets: Sequence[Ticket]) -> dict[str, Value]:
    """Return the request's times, in seconds from its arrival in the model; those it never came to are left out.

    queue_seconds: until all its rows had slots. first_token_seconds: until all had a token. seconds: until all ended.
    """
    arrived = min((ticket.arrived for ticket in tickets), default=math.nan)
    moments = {
        "queue_seconds": [ticket.entered for ticket in tickets],
        "first_token_seconds": [ticket.started for ticket in tickets],
        "seconds": [ticket.ended for ticket in tickets],
    }
    # NaN: it never had a slot, or a token.
    reached = {name: [moment for moment in all_of_it if not math.isnan(moment)] for name, all_of_it in moments.items()}
    return {name: round(max(those) - arrived, 6) for name, those in reached.items() if those}


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "~"
