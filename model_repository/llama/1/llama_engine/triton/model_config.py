"""What Triton says of the model and of this instance when it loads: its config and its arguments, as plain values.

The settings in it are `settings.py`'s, the queue's policy `queue_policy.py`'s; Triton itself isn't needed to read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKEND_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Config parameters that belong to Triton's Python backend itself."""


def own_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the config's own parameters as text, without those meant for the backend."""
    parameters: dict[str, dict[str, str]] = model_config.get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items() if name not in BACKEND_PARAMETERS}


def is_decoupled(model_config: Mapping[str, Any]) -> bool:
    """Return whether a request may have several responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def gpu_of(args: Mapping[str, str]) -> int | None:
    """Return the GPU that Triton placed this instance on, None for a CPU instance."""
    return int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None


def instance_of(args: Mapping[str, str]) -> str:
    """Return a name that no other instance of the model has."""
    # Instances of one group on several GPUs may have the same name.
    gpu = gpu_of(args)
    return args["model_instance_name"] if gpu is None else f"{args['model_instance_name']}_gpu{gpu}"
