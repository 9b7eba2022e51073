"""The article's two FastAPI servers as contestants."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from perf import checkpoint as weights
from perf.environment import ROOT
from perf.load.protocols import Target
from perf.peers.contestant import Contestant, Start, Started
from perf.peers.process import HOST, free_port, running, shown

# The article's own: eight at most, ten milliseconds.
_BATCHING = ("--batch", "8", "--delay-ms", "10")
_READY_S = 120.0


def contestants() -> list[Contestant]:
    """Return both, in the format that is fastest here: they get their best, though the article says FP16."""
    kept = weights.unquantized()
    return [
        Contestant("naive_fastapi", "naive FastAPI", "peer", kept, _starting("naive_fastapi")),
        Contestant("batching_fastapi", "batching FastAPI", "peer", kept, _starting("batching_fastapi", _BATCHING)),
    ]


def _starting(module: str, more: Sequence[str] = ()) -> Start:
    @contextmanager
    def start(checkpoint: Path, threads: int) -> Iterator[Started]:
        kept = weights.unquantized()
        with free_port() as port:
            target = Target(module, "fastapi", f"http://{HOST}:{port}", "llama")
            command = [sys.executable, "-m", f"perf.peers.{module}", "--model", str(checkpoint)]
            command += ["--dtype", weights.dtype(kept), "--threads", str(threads), "--port", str(port), *more]
            environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            with running(target, command, environment, _READY_S) as process:
                settings = {
                    "threads": threads,
                    "dtype": weights.dtype(kept),
                    "versions": {name: version(name) for name in ("fastapi", "uvicorn", "transformers", "torch")},
                }
                yield Started(
                    target, shown(command, checkpoint), settings, process.pid, weights.mebibytes(checkpoint, kept)
                )

    return start
