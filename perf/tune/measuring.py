"""One measurement of a point: a new server on a changed copy of the repository, its config read back, one load.

The tuned settings are read when the model loads, so every measurement starts a server; that also makes two measurements
of one point as independent as those of two points.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from google.protobuf import json_format  # type: ignore[import-untyped]  # ships no annotations
from triton_local.errors import NotReadyError, StartFailedError
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.environment import ROOT
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.summary import summarize
from perf.servers.triton import local_triton
from perf.tune.config import ConfigError, config_file, edited, knobs_of
from perf.tune.points import Knobs

_LOAD_TIMEOUT_S = 1800.0
_CONFIG_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Trial:
    """What every point is measured with.

    text: of the variant's config. model: folder or hub id. threads: of a server on a CPU. load: as in a measurement.
    requests: the first `warmup` are not measured.
    """

    variant: str
    text: str
    model: str
    threads: int
    load: Mapping[str, object]
    arrivals: Closed | Poisson
    requests: Sequence[Request]
    warmup: int

    def measure(self, knobs: Knobs) -> dict[str, object]:
        """Return a measurement; `not_run` if the server refuses to start with these settings.

        Raises ConfigError if the server runs with others, and other LauncherErrors.
        """
        known = {"title": str(knobs), "settings": asdict(knobs), "load": self.load}
        with tempfile.TemporaryDirectory(prefix="triton-llama-tune-") as folder:
            repository = Path(folder) / "model_repository"
            shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
            config_file(repository, self.variant).write_text(edited(self.text, knobs))
            server = local_triton(
                variant=self.variant,
                model=self.model,
                model_repository=repository,
                environment={"OMP_NUM_THREADS": str(self.threads)},
            )
            try:
                with server:
                    return {**known, **self._under_load(server, knobs)}
            except (StartFailedError, NotReadyError) as error:
                # Such as a memory plan that doesn't fit: a fact about this point, and the search continues.
                return {**known, "not_run": str(error)}

    def _under_load(self, server: LocalTriton, knobs: Knobs) -> dict[str, object]:
        config = httpx.get(f"http://{server.http_url}/v2/models/{MODEL_NAME}/config", timeout=_CONFIG_TIMEOUT_S)
        running = knobs_of(json_format.Parse(config.raise_for_status().content, ModelConfig()))
        if running != knobs:
            raise ConfigError(f"the server runs with {running}; it was given {knobs}")
        target = Target(MODEL_NAME, "triton_generate", f"http://{server.http_url}", MODEL_NAME)
        return summarize(drive(target, self.requests, self.arrivals, self.warmup, _LOAD_TIMEOUT_S), None)
