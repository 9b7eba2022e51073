"""What an operator may set, out of the environment: TRITON_GRACE_SECONDS and its like.

Everything about the end follows from the grace period: tritonserver's --exit-timeout-secs and LLAMA_DRAIN_SECONDS are
the same, and an orchestrator must wait for notice + grace + STOP_MARGIN_S before it kills. An empty value, as an .env
file leaves it, is the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_GRACE_S = 120
DEFAULT_STUCK_S = 120

STOP_MARGIN_S = 30
"""Beyond notice and grace: unloading the model, handing the last answers over, and killing what is left."""

UNLOAD_S = 10.0
"""Of it, for the model's own end once the last request is answered; `finalize` has no limit but this one."""

FLUSH_S = 10.0
"""Of it, for clients that take their answers slowly."""

_MOST_SECONDS = 3600
_LEAST_STUCK_S = 10


class RefusedError(Exception):
    """The server isn't started; the message is one line that names the setting, the value and the bound."""


@dataclass(frozen=True)
class Settings:
    """Seconds, and where to write.

    grace: how long what was accepted has to be answered, once the server is told to end. notice: for how long it goes
    on serving before that, if nobody has announced the end. stuck: the model is dead if it makes no step for so long
    although it is asked for one; 0 is never. state_file: JSON for probes. ready_port: for load balancers.
    """

    grace: int
    notice: int
    stuck: int
    state_file: Path | None
    ready_port: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Read them. Raises RefusedError for a value that isn't a whole number within its bounds."""
        stuck = _whole(environment, "TRITON_STUCK_SECONDS", DEFAULT_STUCK_S, 0, _MOST_SECONDS)
        if 0 < stuck < _LEAST_STUCK_S:
            raise RefusedError(
                f"TRITON_STUCK_SECONDS is {stuck}; it must be 0 (never) or {_LEAST_STUCK_S} ... {_MOST_SECONDS}"
            )
        state_file = environment.get("TRITON_STATE_FILE")
        return cls(
            grace=_whole(environment, "TRITON_GRACE_SECONDS", DEFAULT_GRACE_S, 1, _MOST_SECONDS),
            notice=_whole(environment, "TRITON_NOTICE_SECONDS", 0, 0, _MOST_SECONDS),
            stuck=stuck,
            state_file=Path(state_file) if state_file else None,
            ready_port=_whole(environment, "TRITON_READY_PORT", 0, 0, 65535) or None,
        )


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Read a whole number within its bounds. Raises RefusedError with `name`, the text and the bounds."""
    # int() takes underscores and digits of other scripts, too.
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise RefusedError(f"{name} is {text!r}; it must be a whole number, {least} ... {most}")
    return int(text)


def _whole(environment: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environment.get(name, "")
    return whole_number(name, text, least, most) if text else default
