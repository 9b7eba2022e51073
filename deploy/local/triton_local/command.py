"""tritonserver's command line and environment for one start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from triton_supervisor.command import cut_short, has_option, is_off, last_number
from triton_supervisor.settings import DEFAULT_GRACE_S, MAX_SECONDS, RefusedError, with_model_defaults
from triton_supervisor.shared_memory import prefix_argument

from triton_local.errors import InvalidSettingError, ReservedArgumentError
from triton_local.ports import SERVICES, Service
from triton_local.repository import DEFAULT_VARIANT
from triton_local.runtime import Runtime

# Options that the launcher sets, and what to use instead.
_RESERVED = {
    **{f"--{service}-port": f"--{service}-port before --" for service in SERVICES},
    **{f"--{service}-address": "--host" for service in SERVICES},
    "--model-repository": "--model-repository before --",
    "--model-store": "--model-repository before --",
    "--model-config-name": "--variant",
    "--backend-directory": "nothing: the launcher assembles it",
    "--allow-http": "nothing: the supervisor drains over HTTP",
    "--model-control-mode": "nothing: the supervisor drains through it",
    "--http-restricted-api": "a proxy to restrict access: the supervisor probes without a key",
    "--grpc-restricted-protocol": "a proxy to restrict access: the supervisor has a key of its own",
}
_EXIT_TIMEOUT = "--exit-timeout-secs"
# Options whose values it reads.
_READ = (_EXIT_TIMEOUT, *(f"--allow-{service}" for service in SERVICES))


def check_extra_arguments(extra: Sequence[str]) -> None:
    """Raise ReservedArgumentError for an argument that the launcher itself sets, or that is no option."""
    if extra and not extra[0].startswith("-"):
        raise ReservedArgumentError(f"unexpected argument {extra[0]!r}; options for tritonserver come after --")
    if (short := cut_short(extra, (*_RESERVED, *_READ))) is not None:
        raise ReservedArgumentError(f"{short[0]} is cut short; write out the option, {short[1]} if that is meant")
    for option, instead in _RESERVED.items():
        if has_option(extra, option):
            raise ReservedArgumentError(f"{option} can't go to tritonserver directly; use {instead}")


def exit_timeout(extra: Sequence[str]) -> int:
    """Return the seconds that accepted requests have at shutdown. Raises InvalidSettingError out of bounds."""
    try:
        return last_number(extra, _EXIT_TIMEOUT, DEFAULT_GRACE_S, 0, MAX_SECONDS)
    except RefusedError as error:
        raise InvalidSettingError(str(error)) from error


def served(extra: Sequence[str]) -> tuple[Service, ...]:
    """Return the services that `extra` doesn't turn off (--allow-grpc=false, --allow-metrics=false)."""
    return tuple(service for service in SERVICES if not is_off(extra, f"--allow-{service}"))


def server_arguments(
    runtime: Runtime,
    repository: Path,
    variant: str,
    address: str,
    ports: Mapping[Service, int],
    shm_prefix: str,
    extra: Sequence[str],
) -> tuple[str, ...]:
    """Return tritonserver and its arguments, `extra` last."""
    arguments = [
        str(runtime.wheel.tritonserver),
        f"--model-repository={repository}",
        f"--backend-directory={runtime.backends}",
        f"--cache-directory={runtime.caches}",
        # The configs are complete; auto-completion would import the model in a second Python first.
        "--disable-auto-complete-config",
        prefix_argument(shm_prefix),
        # Percentiles of the queue time, off by default.
        "--metrics-config=summary_latencies=true",
        f"--exit-timeout-secs={DEFAULT_GRACE_S}",
    ]
    for service in SERVICES:
        arguments += [f"--{service}-address={address}", f"--{service}-port={ports[service]}"]
    if variant != DEFAULT_VARIANT:
        arguments.append(f"--model-config-name={variant}")
    return (*arguments, *extra)


def server_environment(
    runtime: Runtime,
    inherited: Mapping[str, str],
    model: str | None,
    overrides: Mapping[str, str],
    *,
    grace: int,
    stuck: float,
) -> dict[str, str]:
    """Return `inherited` with the paths that tritonserver and its stub need, then LLAMA_MODEL, then `overrides`.

    grace, stuck: seconds, the defaults of the model's settings that follow from them.
    """
    environment = {
        **with_model_defaults(inherited, grace=grace, stuck=stuck),
        # The stub uses the prefix of the first python3 on PATH.
        "PATH": _joined(runtime.interpreter.executable.parent, inherited.get("PATH", "")),
        "LD_LIBRARY_PATH": _joined(*runtime.library_path, inherited.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _joined(*runtime.interpreter.site_packages, inherited.get("PYTHONPATH", "")),
        # The model's prints reach the log at once.
        "PYTHONUNBUFFERED": "1",
    }
    if model is not None:
        environment["LLAMA_MODEL"] = model
    return {**environment, **overrides}


def _joined(*entries: Path | str) -> str:
    # An empty entry would be the working directory.
    return ":".join(str(entry) for entry in entries if str(entry))
