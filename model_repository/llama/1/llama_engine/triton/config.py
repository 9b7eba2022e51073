"""Reads the model config and the arguments that Triton passes when the model is loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BACKEND_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Config parameters that Triton's Python backend reads; they are not settings of the model."""

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class QueuePolicy:
    """Triton's ModelQueuePolicy. Triton applies it to its own queue; here it applies to the sequences that wait.

    The time in Triton's queue is unknown here, so timeouts count from a request's arrival in the model.

    default_timeout: seconds; infinite is no limit. allow_override: whether a request's timeout applies. delays: whether
    late requests are delayed instead of rejected. size: requests; 0 is no limit.
    """

    default_timeout: float = math.inf
    allow_override: bool = False
    delays: bool = False
    size: int = 0

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> QueuePolicy:
        """Read the default queue policy of a model's config (JSON, as Triton passes it to the model)."""
        policy = (model_config.get("dynamic_batching") or {}).get("default_queue_policy") or {}
        microseconds = int(policy.get("default_timeout_microseconds", 0))
        return cls(
            default_timeout=microseconds * _MICROSECOND if microseconds else math.inf,
            allow_override=bool(policy.get("allow_timeout_override", False)),
            delays=policy.get("timeout_action", "REJECT") == "DELAY",
            size=int(policy.get("max_queue_size", 0)),
        )

    def deadline(self, timeout_microseconds: int) -> float:
        """Return the time on the monotonic clock by which a request arriving now must have a slot; infinite for none.

        timeout_microseconds: the request's timeout, 0 for none. It applies only if the config allows it, and can only
        shorten the default. If the policy delays late requests instead of rejecting them, there is no deadline.
        """
        seconds = self.default_timeout
        if self.allow_override and timeout_microseconds:
            seconds = min(seconds, timeout_microseconds * _MICROSECOND)
        return math.inf if self.delays else time.monotonic() + seconds


def settings_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the config's parameters as strings by name, without BACKEND_PARAMETERS."""
    parameters: dict[str, dict[str, str]] = model_config.get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items() if name not in BACKEND_PARAMETERS}


def is_decoupled(model_config: Mapping[str, Any]) -> bool:
    """Return whether the config is decoupled: a request may have several responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def gpu_of(args: Mapping[str, str]) -> int | None:
    """Return the index of the GPU that Triton assigned to this instance; None for a CPU instance."""
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None


def num_instances(model_config: Mapping[str, Any]) -> int:
    """Return the number of the model's instances; a group has its count on each of its GPUs."""
    return sum(group["count"] * max(len(group["gpus"]), 1) for group in model_config["instance_group"])


def instance_name(args: Mapping[str, str]) -> str:
    """Return a name that is unique among the instances of the model."""
    # Instances of one group on several GPUs may have the same name.
    gpu = gpu_of(args)
    return args["model_instance_name"] if gpu is None else f"{args['model_instance_name']}_gpu{gpu}"
