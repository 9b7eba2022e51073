"""Our server: started for a measurement, and read back, so that results state what it really runs with.

Triton falls back silently to another config, and a setting in the environment overrides the config; so the config is
queried from the server, and what was loaded is parsed from the model's own lines in the log:

"llama: settings: model=…, quantization=int8, …"
"llama: loaded 33.1 MiB of weights: linear layers 1 in float32, 56 in int8, outlier threshold 0; everything else
 float32; on cpu"
"llama: decode steps: stock kernels, launched"
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_llama.status import ModelConfig, read_config
from triton_local.process import Supervised
from triton_local.repository import DEFAULT_VARIANT, MODEL_NAME
from triton_local.server import LocalTriton

READY_TIMEOUT_S = 900.0
_CONFIG_TIMEOUT_S = 30.0
_LOADED = re.compile(
    r'llama: (loaded ([\d,.]+) MiB of weights: linear layers (.*?); everything else (\w+); on (\S+?))"?$'
)
_SETTINGS = re.compile(r'llama: settings: (.*?)"?$')
_STEPS = re.compile(r'llama: decode steps: (.*?)"?$')
_LINEARS = re.compile(r"(\d+) in (\w+)")


def local_triton(
    variant: str = DEFAULT_VARIANT,
    model: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    ready_timeout: float = READY_TIMEOUT_S,
    model_repository: Path | None = None,
    on_log_line: Callable[[str], None] | None = None,
) -> LocalTriton:
    """Return a server to start. Its supervisor sends no probes of its own: only the load may reach the model."""
    return LocalTriton(
        variant=variant,
        model=None if model is None else str(model),
        environment=environment,
        ready_timeout=ready_timeout,
        model_repository=model_repository,
        on_log_line=on_log_line,
        supervised=Supervised(stuck_after=None),
    )


class UnknownLogError(Exception):
    """The log does not say what was loaded, or says it for several instances; `str()` is one line."""


@dataclass(frozen=True)
class Loaded:
    """What the model has loaded. linears: number of linear layers by their weights' dtype. settings: as parsed by it.

    steps: how decode steps are computed. line: the model's own words on what was loaded.
    """

    weights_mib: float
    linears: Mapping[str, int]
    dtype: str
    device: str
    settings: Mapping[str, str]
    steps: str
    line: str

    @classmethod
    def of(cls, log: str) -> Loaded:
        """Parse a server's log. Raises UnknownLogError unless each line is there exactly once."""
        facts = _only(_LOADED, log)
        # A path may contain a comma; and it is specific to this machine, so it is left out.
        settings = dict(part.split("=", 1) for part in _only(_SETTINGS, log)[1].split(", ") if "=" in part)
        return cls(
            weights_mib=float(facts[2].replace(",", "")),
            linears={kind: int(count) for count, kind in _LINEARS.findall(facts[3])},
            dtype=facts[4],
            device=facts[5],
            settings={name: value for name, value in settings.items() if name != "model"},
            steps=_only(_STEPS, log)[1],
            line=facts[1],
        )


@dataclass(frozen=True)
class ReadBack:
    """config: Triton's, of the model. loaded: what the model has loaded, and its settings."""

    config: ModelConfig
    loaded: Loaded

    def to_json(self) -> dict[str, object]:
        """Return it for a result's file."""
        return {
            "config": {
                "max_batch_size": self.config.max_batch_size,
                "dynamic_batching": self.config.dynamic_batching,
                "preferred_batch_sizes": list(self.config.preferred_batch_sizes),
                "max_queue_delay_microseconds": self.config.max_queue_delay_microseconds,
                "decoupled": self.config.decoupled,
                "parameters": dict(self.config.parameters),
            },
            "model_settings": dict(self.loaded.settings),
            "loaded": self.loaded.line,
            "decode_steps": self.loaded.steps,
        }


def read_back(server: LocalTriton) -> ReadBack:
    """Return what a ready server runs with. Raises UnknownLogError if its log does not say it."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_CONFIG_TIMEOUT_S) as response:
        return ReadBack(read_config(json.load(response)), Loaded.of(server.log_text()))


def _only(pattern: re.Pattern[str], log: str) -> re.Match[str]:
    found = [match for line in log.splitlines() if (match := pattern.search(line))]
    if len(found) != 1:
        raise UnknownLogError(
            f"{len(found)} lines of the server's log match {pattern.pattern!r}, not one; with several GPUs Triton "
            "runs an instance on each: CUDA_VISIBLE_DEVICES=0 leaves one"
        )
    return found[0]
