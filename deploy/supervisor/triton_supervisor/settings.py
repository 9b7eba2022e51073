"""The operator's settings, from the environment: TRITON_GRACE_SECONDS and others, and those of the model they imply.

The grace period determines the shutdown: tritonserver's --exit-timeout-secs and LLAMA_DRAIN_SECONDS equal it, and an
orchestrator must wait notice + grace + STOP_MARGIN_S before it kills. An empty value, as an .env file leaves it, is the
default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_CONFIG = "streaming"
"""The config of the image and of `make serve`: it takes every kind of request, with llama_unary beside."""

DEFAULT_GRACE_S = 120
STOP_MARGIN_S = 30
"""Seconds beyond notice and grace for unloading the model, flushing the last responses and killing what is left."""
UNLOAD_S = 10.0
"""Seconds of STOP_MARGIN_S for the model's `finalize` after the last response; Triton itself sets no limit."""
MAX_SECONDS = 3600
"""Upper bound of every duration here, and of the model's drain_seconds and stuck_seconds."""

_MIN_STUCK_S = 10


class RefusedError(Exception):
    """The server isn't started; the message is one line that names the setting, the value and the bound."""


@dataclass(frozen=True)
class Settings:
    """Seconds, restarts, a file and a port.

    config: "default", or the name of a file in the model's configs/. grace: for accepted requests to finish during
    shutdown. notice: of serving on before the drain. stuck: without a step, although one is requested, until the model
    counts as dead; 0 disables the check. restarts: of a tritonserver that has died, within restart_minutes; 0 leaves
    them to an orchestrator. state_file: JSON for probes. ready_port: for load balancers.
    """

    config: str
    grace: int
    notice: int
    stuck: int
    restarts: int
    restart_minutes: int
    state_file: Path | None
    ready_port: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Read them. Raises RefusedError for a value that isn't a whole number within its bounds."""

        def whole(name: str, default: int, minimum: int, maximum: int) -> int:
            return whole_number(name, environment.get(name) or str(default), minimum, maximum)

        stuck = whole("TRITON_STUCK_SECONDS", 120, 0, MAX_SECONDS)
        if 0 < stuck < _MIN_STUCK_S:
            raise RefusedError(
                f"TRITON_STUCK_SECONDS is {stuck}; it must be 0 (never) or {_MIN_STUCK_S} ... {MAX_SECONDS}"
            )
        state_file = environment.get("TRITON_STATE_FILE")
        return cls(
            config=environment.get("TRITON_MODEL_CONFIG") or DEFAULT_CONFIG,
            grace=whole("TRITON_GRACE_SECONDS", DEFAULT_GRACE_S, 1, MAX_SECONDS),
            notice=whole("TRITON_NOTICE_SECONDS", 0, 0, MAX_SECONDS),
            stuck=stuck,
            restarts=whole("TRITON_RESTARTS", 5, 0, 1000),
            restart_minutes=whole("TRITON_RESTART_MINUTES", 10, 1, 1440),
            state_file=Path(state_file) if state_file else None,
            ready_port=whole("TRITON_READY_PORT", 0, 0, 65535) or None,
        )

    def for_model(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for tritonserver and the model, with the model's settings that follow from these.

        Sequences that still run when the model is unloaded have the same grace period. A step that runs for `stuck`
        seconds makes the model report that it isn't ready.
        """
        # An empty setting of the model (LLAMA_MODEL= in .env) is the default.
        variables = {name: value for name, value in environment.items() if value or not name.startswith("LLAMA_")}
        return {"LLAMA_DRAIN_SECONDS": str(self.grace), "LLAMA_STUCK_SECONDS": str(self.stuck), **variables}


def whole_number(name: str, text: str, minimum: int, maximum: int) -> int:
    """Parse a whole number within its bounds. Raises RefusedError with `name`, the text and the bounds."""
    # int() also accepts underscores and digits of other scripts.
    if not re.fullmatch("[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
        raise RefusedError(f"{name} is {text!r}; it must be a whole number, {minimum} ... {maximum}")
    return int(text)
