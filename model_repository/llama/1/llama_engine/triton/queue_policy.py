"""How long a request may wait for a slot, by its own timeout and the config's queue policy, as Triton's queue has it.

Triton applies the policy to its own queue; this is for the requests that it has already handed over. How long they had
waited before isn't known here, so their time counts from their arrival in the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class QueuePolicy:
    """Triton's ModelQueuePolicy. default_timeout: seconds, infinite is no limit. size: requests, 0 is no limit."""

    default_timeout: float = math.inf
    allow_override: bool = False
    delays: bool = False
    size: int = 0

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> QueuePolicy:
        """Read the default queue policy of a model's config (JSON, as Triton hands it to the model)."""
        policy = (model_config.get("dynamic_batching") or {}).get("default_queue_policy") or {}
        microseconds = int(policy.get("default_timeout_microseconds", 0))
        return cls(
            default_timeout=microseconds * _MICROSECOND if microseconds else math.inf,
            allow_override=bool(policy.get("allow_timeout_override", False)),
            delays=policy.get("timeout_action", "REJECT") == "DELAY",
            size=int(policy.get("max_queue_size", 0)),
        )

    def deadline(self, timeout_microseconds: int) -> float:
        """Return by when a request that arrives now must have a slot, on the monotonic clock; infinite if whenever.

        timeout_microseconds: the request's own, 0 if it has none. It counts only where the config allows it, and can
        only shorten. Requests that the policy would put off instead of refusing have no deadline.
        """
        seconds = self.default_timeout
        if self.allow_override and timeout_microseconds:
            seconds = min(seconds, timeout_microseconds * _MICROSECOND)
        return math.inf if self.delays else time.monotonic() + seconds
