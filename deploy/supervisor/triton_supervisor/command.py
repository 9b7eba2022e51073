"""tritonserver's command line: how to read its options, and the plan of a start in this project's image.

tritonserver parses with getopt_long: `--option=value` or `--option value`, the last one counts, and a name may be
abbreviated while it is unambiguous. Which abbreviations are depends on its version, so they are refused (`cut_short`).
A word that begins with `--` counts as an option here even where it is the value of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from triton_supervisor.hardening import body_limit_arguments
from triton_supervisor.plan import Plan
from triton_supervisor.repository_api import MODEL, served_models
from triton_supervisor.settings import (
    DEFAULT_CONFIG,
    RefusedError,
    Settings,
    whole_number,
    with_model_defaults,
)
from triton_supervisor.shared_memory import prefix_argument
from triton_supervisor.triton_http import Address

REPOSITORY = Path("/srv/triton-llama/model_repository")
TRITONSERVER = "tritonserver"

# Values that tritonserver reads as false, in any case.
_FALSE = ("false", "off", "0")
# Options that the supervisor sets, and what to use instead.
_RESERVED = {
    "--model-control-mode": "nothing: the supervisor drains through it",
    "--exit-timeout-secs": "TRITON_GRACE_SECONDS",
    "--model-config-name": "TRITON_MODEL_CONFIG",
    # The supervisor sends its probe without a key, and has set both for its own APIs.
    "--http-restricted-api": "a proxy: it controls who reaches the rest",
    "--grpc-restricted-protocol": "a proxy: it controls who reaches the rest",
}
# Options whose values the supervisor reads.
_READ = ("--allow-http", "--http-address", "--http-port", "--allow-metrics", "--metrics-address", "--metrics-port")


def plan_container(
    extra: Sequence[str],
    environment: Mapping[str, str],
    settings: Settings,
    shm_prefix: str,
    repository: Path = REPOSITORY,
) -> Plan:
    """Return the plan of a start; runs `tritonserver --help`. extra: the container's arguments, for tritonserver.

    Raises RefusedError for an unknown config, or an option that the supervisor itself sets.
    """
    _check(extra)
    config = _config(environment, repository)
    models = served_models(repository, config)
    variables = with_model_defaults(environment, grace=settings.grace, stuck=settings.stuck)
    arguments = (
        TRITONSERVER,
        f"--model-repository={repository}",
        # The configs are complete; auto-completion would start a model process, and import PyTorch, once more.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={settings.grace}",
        # Percentiles of the queue time, off by default.
        "--metrics-config=summary_latencies=true",
        prefix_argument(shm_prefix),
        *body_limit_arguments([TRITONSERVER], variables),
        *(() if config == "default" else (f"--model-config-name={config}",)),
        *extra,
    )
    http, metrics = _addresses(extra)
    return Plan(
        arguments=arguments,
        environment=variables,
        models=models,
        http=http,
        metrics=metrics,
        shm_prefix=shm_prefix,
        grace=settings.grace,
        notice=settings.notice,
        stuck=settings.stuck,
        restarts=settings.restarts,
        restart_minutes=settings.restart_minutes,
        state_file=settings.state_file,
        ready_port=settings.ready_port,
    )


def last_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of `--option=value` or `--option value`, the last one if there are several; None without."""
    value = None
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            value = argument.split("=", 1)[1]
        elif argument == option and position + 1 < len(arguments):
            value = arguments[position + 1]
    return value


def last_number(arguments: Sequence[str], option: str, default: int, minimum: int, maximum: int) -> int:
    """Return the last value as a whole number within its bounds. Raises RefusedError.

    tritonserver itself also reads "80a" and " 80" as 80.
    """
    text = last_value(arguments, option)
    return default if text is None else whole_number(option, text, minimum, maximum)


def is_off(arguments: Sequence[str], option: str) -> bool:
    """Return whether the last value of the option is false."""
    return (last_value(arguments, option) or "").lower() in _FALSE


def has_option(arguments: Sequence[str], option: str) -> bool:
    """Return whether the option is given, with a value or without."""
    return any(_name(argument) == option for argument in arguments)


def cut_short(arguments: Sequence[str], options: Iterable[str]) -> tuple[str, str] | None:
    """Return the first name that may abbreviate one of these options, and that option."""
    known = tuple(options)
    for name in map(_name, arguments):
        if name.startswith("--") and name != "--" and name not in known:
            for option in known:
                if option.startswith(name):
                    return name, option
    return None


def _name(argument: str) -> str:
    return argument.split("=", 1)[0]


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
        raise RefusedError(f"{off} leaves the supervisor no way to drain: it drains over HTTP")


def _config(environment: Mapping[str, str], repository: Path) -> str:
    config = environment.get("TRITON_MODEL_CONFIG") or DEFAULT_CONFIG
    others = sorted(path.stem for path in (repository / MODEL / "configs").glob("*.pbtxt"))
    # Triton silently falls back to config.pbtxt when the named config has no file.
    if config not in ("default", *others):
        raise RefusedError(f"TRITON_MODEL_CONFIG={config} is unknown; known: {' '.join(['default', *others])}")
    return config


def _addresses(extra: Sequence[str]) -> tuple[Address, Address | None]:
    host = _reachable(last_value(extra, "--http-address"))
    http = Address(host, last_number(extra, "--http-port", 8000, 1, 65535))
    if is_off(extra, "--allow-metrics"):
        return http, None
    # The default address of the metrics is HTTP's.
    address = last_value(extra, "--metrics-address")
    port = last_number(extra, "--metrics-port", 8002, 1, 65535)
    return http, Address(host if address is None else _reachable(address), port)


def _reachable(address: str | None) -> str:
    return "127.0.0.1" if address in (None, "", "0.0.0.0") else str(address)
