"""tritonserver's command line: the options that the supervisor reads, those that it adds, and what it refuses.

Triton's control APIs have no authentication: a client that reaches the port may unload the model, load another one from
the request itself, map the server's shared memory, or turn its logs off. They are restricted to requests with a key,
over HTTP and gRPC; what clients, probes, metrics and benchmarks use stays open. The key keeps out remote clients: it is
on tritonserver's command line, the only place from which Triton takes it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from triton_supervisor.settings import RefusedError, Settings, whole_number
from triton_supervisor.triton import MODEL, UNARY, Address

CONTROL_HEADER = "triton-llama-control"
"""HTTP header with the key as its value; in a gRPC call's metadata, Triton adds `triton-grpc-protocol-` before it."""
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""Triton's names of the API categories that need the key: every one but those of inference, probes and statistics."""
MAX_BODY_BYTES = 2 * 2**20
"""32 rows of 64 KiB each, where a prompt of 4,096 tokens is about 16 KiB of text."""

_BODY_LIMIT = "--http-max-input-size"
# Options that the supervisor sets, and what to use instead.
_RESERVED = {
    "--model-control-mode": "nothing: the supervisor drains through it",
    "--exit-timeout-secs": "TRITON_GRACE_SECONDS",
    "--model-config-name": "TRITON_MODEL_CONFIG",
    # The supervisor sends its probe without a key, and has set both for its own APIs.
    "--http-restricted-api": "a proxy: it controls who reaches the rest",
    "--grpc-restricted-protocol": "a proxy: it controls who reaches the rest",
    "--allow-http": "nothing: the supervisor drains over HTTP",
}
# In a config, outside its comments.
_DECOUPLED = re.compile(r"^[^#\n]*\bdecoupled\s*:\s*true\b", re.MULTILINE)


@dataclass(frozen=True)
class Options:
    """The options of tritonserver that the supervisor uses; the last value of each counts.

    http: address of the HTTP port, as reached from here. metrics: address of the metrics port; None without metrics.
    """

    repository: Path
    http: Address
    metrics: Address | None

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Parse `--option=value` or `--option value`; names must be written out. Raises RefusedError."""
        parser = _Parser(allow_abbrev=False, add_help=False, argument_default=None)
        parser.add_argument("--model-repository", type=Path, default=Path("/srv/triton-llama/model_repository"))
        for name in ("--http-address", "--metrics-address", "--allow-metrics"):
            parser.add_argument(name, default="")
        parser.add_argument("--http-port", default="8000")
        parser.add_argument("--metrics-port", default="8002")
        values, _ = parser.parse_known_args(arguments)
        host = _reachable(values.http_address)
        metrics_host = _reachable(values.metrics_address) if values.metrics_address else host
        metrics_port = whole_number("--metrics-port", values.metrics_port, 1, 65535)
        # Values that tritonserver reads as false.
        is_off = values.allow_metrics.lower() in ("false", "off", "0")
        return cls(
            repository=values.model_repository,
            http=Address(host, whole_number("--http-port", values.http_port, 1, 65535)),
            metrics=None if is_off else Address(metrics_host, metrics_port),
        )


def refuse_reserved(arguments: Sequence[str], reserved: dict[str, str]) -> None:
    """Raise RefusedError for a word that is no option, or an option of `reserved`, with what to use instead."""
    if arguments and not arguments[0].startswith("-"):
        raise RefusedError(f"unexpected argument {arguments[0]!r}; it must be an option for tritonserver")
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in reserved:
            raise RefusedError(f"{option} can't go to tritonserver directly; use {reserved[option]}")


def server_command(
    arguments: Sequence[str], options: Options, models: Sequence[str], settings: Settings, key: str, shm_prefix: str
) -> list[str]:
    """Return tritonserver, its options, and the operator's `arguments` last; runs `tritonserver --help`.

    models: to load, each before those that call it. shm_prefix: of the Python backend's shared memory. Raises
    RefusedError for an option that the supervisor itself sets, and where tritonserver can't be run.
    """
    refuse_reserved(arguments, _RESERVED)
    restricted = f"{','.join(RESTRICTED)}:{CONTROL_HEADER}={key}"
    command = [
        "tritonserver",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        f"--http-restricted-api={restricted}",
        f"--grpc-restricted-protocol={restricted}",
        # The configs are complete; auto-completion would start a model process, and import PyTorch, once more.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={settings.grace}",
        # The OpenAI endpoint asks a silent connection every 10 s; by default Triton ends it at the fourth time.
        "--grpc-http2-min-recv-ping-interval-without-data=5000",
        # Percentiles of the queue time, off by default.
        "--metrics-config=summary_latencies=true",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        *_body_limit(),
    ]
    if settings.config != "default":
        command.append(f"--model-config-name={settings.config}")
    if not any(argument.partition("=")[0] == "--model-repository" for argument in arguments):
        command.append(f"--model-repository={options.repository}")
    return [*command, *arguments]


def served_models(repository: Path, config: str) -> tuple[str, ...]:
    """Return the models to load, each before those that call it: UNARY too, if MODEL's config is decoupled.

    config: "default", or the name of a file in configs/. A copied repository need not have UNARY. Raises RefusedError
    for an unknown config: Triton would silently fall back to config.pbtxt.
    """
    model = repository / MODEL
    names = ["default", *sorted(path.stem for path in (model / "configs").glob("*.pbtxt"))]
    if config not in names:
        raise RefusedError(
            f"the config {config!r} (VARIANT, --variant or TRITON_MODEL_CONFIG) is unknown; known: {' '.join(names)}"
        )
    file = model / "config.pbtxt" if config == "default" else model / "configs" / f"{config}.pbtxt"
    decoupled = file.is_file() and _DECOUPLED.search(file.read_text(encoding="utf-8")) is not None
    return (MODEL, UNARY) if decoupled and (repository / UNARY).is_dir() else (MODEL,)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in ("", "0.0.0.0") else address


def _body_limit() -> list[str]:
    """Return the option that limits an HTTP body; 2.51 (24.10) doesn't have it, and only a proxy can limit there."""
    try:
        # The exit code and the stream of --help differ between versions.
        run = subprocess.run(
            ["tritonserver", "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise RefusedError(f"tritonserver --help: {error}") from error
    return [f"{_BODY_LIMIT}={MAX_BODY_BYTES}"] if _BODY_LIMIT in run.stdout + run.stderr else []
