"""tritonserver's command line and environment in this project's image, and where its services listen there.

Starts nothing but `tritonserver --help`. What a model may be set to is the model's own business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_llama.health import Address

from triton_supervisor.body_limit import NoHelpError, body_limit_arguments
from triton_supervisor.model_settings import with_defaults
from triton_supervisor.options import cut_short, has_option, is_off, last_number, last_value
from triton_supervisor.repository_api import MODEL, control_arguments
from triton_supervisor.settings import DEFAULT_STUCK_S, RefusedError, Settings
from triton_supervisor.shared_memory import prefix_argument

REPOSITORY = Path("/srv/triton-llama/model_repository")
TRITONSERVER = "tritonserver"

# Options that would contradict what the supervisor relies on.
_RESERVED = {
    "--model-control-mode": "nothing: the supervisor drains through it",
    "--exit-timeout-secs": "TRITON_GRACE_SECONDS",
    "--model-config-name": "TRITON_MODEL_CONFIG",
    # The supervisor asks for a token without a key; and it has set both itself, for what is the supervisor's alone.
    "--http-restricted-api": "a proxy: who may ask for the rest is its business",
    "--grpc-restricted-protocol": "a proxy: who may ask for the rest is its business",
}
# Options that it must know the value of.
_READ = ("--allow-http", "--http-address", "--http-port", "--allow-metrics", "--metrics-address", "--metrics-port")


@dataclass(frozen=True)
class Container:
    """What to run and with which environment, and where its services will listen. metrics: None when it is off."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    http: Address
    metrics: Address | None


def plan_container(
    extra: Sequence[str],
    environment: Mapping[str, str],
    settings: Settings,
    key: str,
    shm_prefix: str,
    repository: Path = REPOSITORY,
) -> Container:
    """Return the plan of a start. extra: the container's arguments, for tritonserver.

    Raises RefusedError for an unknown config, or an option that the supervisor itself sets.
    """
    _check(extra)
    own = server_environment(environment, settings.grace, settings.stuck)
    try:
        body_limit = body_limit_arguments([TRITONSERVER], own)
    except NoHelpError as error:
        raise RefusedError(str(error)) from error
    arguments = (
        TRITONSERVER,
        f"--model-repository={repository}",
        # The configs are complete; completing them would start a model process, and import PyTorch, once more.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={settings.grace}",
        # Percentiles of the time in Triton's queue; they are off unless asked for.
        "--metrics-config=summary_latencies=true",
        prefix_argument(shm_prefix),
        *control_arguments(key),
        *body_limit,
        *_config_argument(environment, repository),
        *extra,
    )
    return Container(arguments, own, *_addresses(extra))


def server_environment(environment: Mapping[str, str], grace: int, stuck: int = DEFAULT_STUCK_S) -> dict[str, str]:
    """Return the environment for tritonserver and the model. grace, stuck: seconds, as in Settings."""
    return with_defaults(environment, grace=grace, stuck=stuck)


def _check(extra: Sequence[str]) -> None:
    if extra and not extra[0].startswith("-"):
        raise RefusedError(f"unexpected argument {extra[0]!r}: announce, or options for tritonserver")
    short = cut_short(extra, (*_RESERVED, *_READ))
    if short is not None:
        raise RefusedError(f"{short[0]} is cut short; write out the option, {short[1]} if that is meant")
    for option, instead in _RESERVED.items():
        if has_option(extra, option):
            raise RefusedError(f"{option} can't go to tritonserver directly; use {instead}")
    if is_off(extra, "--allow-http"):
        off = f"--allow-http={last_value(extra, '--allow-http')}"
        raise RefusedError(f"{off} leaves the supervisor no way to drain: it asks over HTTP")


def _config_argument(environment: Mapping[str, str], repository: Path) -> tuple[str, ...]:
    config = environment.get("TRITON_MODEL_CONFIG") or "default"
    others = sorted(path.stem for path in (repository / MODEL / "configs").glob("*.pbtxt"))
    # Triton falls back to config.pbtxt without a word when the named config has no file.
    if config not in ("default", *others):
        raise RefusedError(f"TRITON_MODEL_CONFIG={config} is unknown; known: {' '.join(['default', *others])}")
    return () if config == "default" else (f"--model-config-name={config}",)


def _addresses(extra: Sequence[str]) -> tuple[Address, Address | None]:
    host = _reachable(last_value(extra, "--http-address"))
    http = Address(host, last_number(extra, "--http-port", 8000, 1, 65535))
    if is_off(extra, "--allow-metrics"):
        return http, None
    # Without an address of its own, metrics are where HTTP is.
    own = last_value(extra, "--metrics-address")
    port = last_number(extra, "--metrics-port", 8002, 1, 65535)
    return http, Address(host if own is None else _reachable(own), port)


def _reachable(address: str | None) -> str:
    return "127.0.0.1" if address in (None, "", "0.0.0.0") else str(address)
