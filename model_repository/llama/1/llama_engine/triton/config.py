"""Reads the model config and the arguments that Triton passes when the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKEND_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
"""Config parameters that Triton's Python backend reads; they are not settings of the model."""


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
