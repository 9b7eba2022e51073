"""Our own server as a contestant: the streaming variant, in INT8 and unquantized."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from load.target import Target
from triton_local.errors import LauncherError
from triton_local.server import LocalTriton

from peers import weights
from peers.contestant import Contestant, NotRunError, Start, Started
from peers.process import shown, shown_checkpoint

_VARIANT = "streaming"


def contestants() -> list[Contestant]:
    """Return the product as it is, and without its quantization: at the precision that the peers have."""
    plain = weights.unquantized()
    return [
        Contestant("triton_llama_int8", "triton-llama INT8", "ours", "int8", _starting("triton_llama_int8", "int8")),
        Contestant(
            f"triton_llama_{plain}",
            f"triton-llama {plain.upper()}",
            "ours",
            plain,
            _starting(f"triton_llama_{plain}", "none"),
        ),
    ]


def _starting(name: str, quantization: str) -> Start:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Started]:
        environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_QUANTIZATION": quantization}
        command = [*(f"{setting}={value}" for setting, value in environment.items())]
        command += ["make", "serve", f"VARIANT={_VARIANT}", f"MODEL={checkpoint}"]
        server = LocalTriton(variant=_VARIANT, model=str(checkpoint), environment=environment)
        try:
            server.start()
        except LauncherError as error:
            raise NotRunError(str(error)) from error
        try:
            loaded = _said(server, "loaded ", checkpoint)
            settings = {
                "threads": threads,
                "settings": _said(server, "settings: ", checkpoint),
                "loaded": loaded,
                "config": _config(server),
                "versions": {name: version(name) for name in ("nvidia-pytriton", "transformers", "torch")},
            }
            size = re.match(r"loaded ([\d,.]+) MiB of weights", loaded)
            assert size is not None, loaded
            yield Started(
                Target(name, "triton_stream", f"http://{server.http_url}", "llama"),
                shown(command, checkpoint),
                settings,
                server.pid,
                float(size[1].replace(",", "")),
            )
        finally:
            server.stop()

    return start


def _said(server: LocalTriton, beginning: str, checkpoint: Path) -> str:
    """Return the model's own line that begins so, read back from its log."""
    (line,) = [line for line in server.log_text().splitlines() if f"llama: {beginning}" in line]
    # Triton puts the line into quotation marks.
    return shown_checkpoint(beginning + line.partition(f"llama: {beginning}")[2].rstrip('"'), checkpoint)


def _config(server: LocalTriton) -> dict[str, object]:
    """Return what Triton itself says that it runs with."""
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/llama/config", timeout=30) as response:
        config = json.load(response)
    return {
        "max_batch_size": config["max_batch_size"],
        "dynamic_batching": config["dynamic_batching"],
        "decoupled": config["model_transaction_policy"]["decoupled"],
        "parameters": {name: value["string_value"] for name, value in config["parameters"].items()},
    }
