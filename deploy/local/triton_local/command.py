"""tritonserver's command line and environment for one start.

The only module that knows tritonserver's option names. Starts nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_local.errors import ReservedArgumentError
from triton_local.ports import SERVICES, Service
from triton_local.repository import DEFAULT_VARIANT
from triton_local.runtime import Runtime

DEFAULT_EXIT_TIMEOUT_S = 120

# Options that would contradict what the launcher checked, printed, or waits for.
_RESERVED = {
    **{f"--{service}-port": f"--{service}-port before --" for service in SERVICES},
    **{f"--{service}-address": "--host" for service in SERVICES},
    "--model-repository": "--model-repository before --",
    "--model-store": "--model-repository before --",
    "--model-config-name": "--variant",
    "--backend-directory": "nothing: the launcher assembles it",
    "--allow-http": "nothing: the launcher asks over HTTP whether the server is ready",
}


@dataclass(frozen=True)
class ServerCommand:
    """What to run, and with which environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def check_extra_arguments(extra: Sequence[str]) -> None:
    """Raise ReservedArgumentError for an argument that the launcher itself sets, or that is no option at all."""
    if extra and not extra[0].startswith("-"):
        raise ReservedArgumentError(f"unexpected argument {extra[0]!r}; options for tritonserver come after --")
    for argument in extra:
        option = argument.split("=", 1)[0]
        if option in _RESERVED:
            raise ReservedArgumentError(f"{option} can't go to tritonserver directly; use {_RESERVED[option]}")


def exit_timeout(extra: Sequence[str]) -> float:
    """Seconds tritonserver will wait for running requests when it is stopped."""
    try:
        return float(_last_value(extra, "--exit-timeout-secs") or DEFAULT_EXIT_TIMEOUT_S)
    except ValueError:
        return DEFAULT_EXIT_TIMEOUT_S  # tritonserver refuses it at once, and says so


def served(extra: Sequence[str]) -> tuple[Service, ...]:
    """The services that `extra` doesn't turn off (--allow-grpc=false, --allow-metrics=false)."""
    # Spelled as tritonserver reads booleans.
    return tuple(
        service for service in SERVICES if _last_value(extra, f"--allow-{service}") not in ("false", "False", "0")
    )


def server_arguments(
    runtime: Runtime,
    repository: Path,
    variant: str,
    address: str,
    ports: Mapping[Service, int],
    shm_prefix: str,
    extra: Sequence[str],
) -> tuple[str, ...]:
    """tritonserver and its arguments, `extra` last."""
    arguments = [
        str(runtime.wheel.tritonserver),
        f"--model-repository={repository}",
        f"--backend-directory={runtime.backends}",
        f"--cache-directory={runtime.caches}",
        # Our configs are complete. Completing them would import the model in a second Python first.
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--exit-timeout-secs={DEFAULT_EXIT_TIMEOUT_S}",
    ]
    for service in SERVICES:
        arguments += [f"--{service}-address={address}", f"--{service}-port={ports[service]}"]
    if variant != DEFAULT_VARIANT:
        arguments.append(f"--model-config-name={variant}")
    return (*arguments, *extra)


def server_environment(
    runtime: Runtime, inherited: Mapping[str, str], model: str | None, overrides: Mapping[str, str]
) -> dict[str, str]:
    """`inherited` with the paths that tritonserver and its stub need, then LLAMA_MODEL, then `overrides`."""
    environment = {
        **inherited,
        # The stub takes the prefix of the first python3 on PATH for its own.
        "PATH": _joined(runtime.interpreter.executable.parent, inherited.get("PATH", "")),
        "LD_LIBRARY_PATH": _joined(*runtime.library_path, inherited.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _joined(*runtime.interpreter.site_packages, inherited.get("PYTHONPATH", "")),
        # What the model prints belongs into the log when it is printed.
        "PYTHONUNBUFFERED": "1",
    }
    if model is not None:
        environment["LLAMA_MODEL"] = model
    return {**environment, **overrides}


def _last_value(arguments: Sequence[str], option: str) -> str | None:
    """The value of `--option=value` or `--option value`, the last one if there are several."""
    value = None
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            value = argument.split("=", 1)[1]
        elif argument == option and position + 1 < len(arguments):
            value = arguments[position + 1]
    return value


def _joined(*entries: Path | str) -> str:
    # An empty entry would mean the working directory.
    return ":".join(str(entry) for entry in entries if str(entry))
