"""Our own server as a contestant: the streaming variant, in INT8 and unquantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from triton_local.errors import LauncherError
from triton_local.server import LocalTriton
from triton_local.supervised import Supervised

from perf import checkpoint as weights
from perf.load.protocols import Target
from perf.peers.contestant import Contestant, NotRunError, Start, Started
from perf.peers.process import shown
from perf.servers.triton import read_back

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
        # Nobody but the load may ask the model.
        supervised = Supervised(stuck_after=None)
        server = LocalTriton(variant=_VARIANT, model=str(checkpoint), environment=environment, supervised=supervised)
        try:
            server.start()
        except LauncherError as error:
            raise NotRunError(str(error)) from error
        try:
            runs = read_back(server)
            settings = {
                "threads": threads,
                **runs.to_json(),
                "versions": {name: version(name) for name in ("nvidia-pytriton", "transformers", "torch")},
            }
            yield Started(
                Target(name, "triton_stream", f"http://{server.http_url}", "llama"),
                shown(command, checkpoint),
                settings,
                server.pid,
                runs.loaded.weights_mib,
            )
        finally:
            server.stop()

    return start
