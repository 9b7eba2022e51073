"""What the model's own settings are under a supervisor, where nobody has set them: LLAMA_DRAIN_SECONDS and its like.

Knows their names and bounds; what they do is the model's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

PREFIX = "LLAMA_"
MOST_SECONDS = 3600
"""The most that drain_seconds and stuck_seconds take."""


def with_defaults(environment: Mapping[str, str], *, grace: int, stuck: float | None) -> dict[str, str]:
    """Return the environment for tritonserver and the model.

    Rows that still run when the model is unloaded have the same `grace` seconds as everybody. A step that runs for
    `stuck` seconds makes the model say that it isn't ready, when Triton asks it; 0: however long; None: as it has it.
    """
    # A setting that is set to nothing (LLAMA_MODEL= in .env) is the default, which the model takes for a missing one.
    own = {name: value for name, value in environment.items() if value or not name.startswith(PREFIX)}
    own.setdefault(f"{PREFIX}DRAIN_SECONDS", str(grace))
    if stuck is not None:
        # Whole seconds, and never the 0 that would switch it off.
        own.setdefault(f"{PREFIX}STUCK_SECONDS", str(min(math.ceil(stuck), MOST_SECONDS)))
    return own
