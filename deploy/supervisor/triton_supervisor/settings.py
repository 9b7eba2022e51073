"""The operator's settings, from the environment: TRITON_GRACE_SECONDS and others, and those of the model they imply.

The grace period determines the shutdown: tritonserver's --exit-timeout-secs and LLAMA_DRAIN_SECONDS equal it, and an
orchestrator must wait grace + STOP_MARGIN_S before it kills. An empty value, as an .env file leaves it, is the
default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CONFIG_IF_UNSET = "streaming"
"""The config of the image and of `make serve`: it takes every kind of request, with llama_unary beside."""

DEFAULT_GRACE_S = 120
DEFAULT_STUCK_S = 120
STOP_MARGIN_S = 30
"""Seconds beyond the grace period for unloading the model, flushing the last responses and killing what is left."""
UNLOAD_S = 10.0
"""Seconds of STOP_MARGIN_S for the model's `finalize` after the last response; Triton itself sets no limit."""
MAX_SECONDS = 3600
"""Upper bound of every duration here, and of the model's drain_seconds and stuck_seconds."""

_MIN_STUCK_S = 10


class RefusedError(Exception):
    """The server isn't started; the message is one line that names the setting, the value and the bound."""


@dataclass(frozen=True)
class Settings:
    """The supervisor's settings.

    config: "default", or the name of a file in the model's configs/. grace: seconds for accepted requests to finish
    during shutdown. stuck: seconds without a step, although one is requested, until the model counts as dead; 0
    disables the check.
    """

    config: str
    grace: int
    stuck: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Read them. Raises RefusedError for a value that isn't a whole number within its bounds."""
        grace = environment.get("TRITON_GRACE_SECONDS") or str(DEFAULT_GRACE_S)
        stuck = whole_number(
            "TRITON_STUCK_SECONDS", environment.get("TRITON_STUCK_SECONDS") or str(DEFAULT_STUCK_S), 0, MAX_SECONDS
        )
        if 0 < stuck < _MIN_STUCK_S:
            raise RefusedError(
                f"TRITON_STUCK_SECONDS is {stuck}; it must be 0 (never) or {_MIN_STUCK_S} ... {MAX_SECONDS}"
            )
        return cls(
            config=environment.get("TRITON_MODEL_CONFIG") or CONFIG_IF_UNSET,
            grace=whole_number("TRITON_GRACE_SECONDS", grace, 1, MAX_SECONDS),
            stuck=stuck,
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
