"""What a server of ours really runs with, asked of the server itself and read in the model's own lines of its log.

Triton falls back silently to another config, and a setting in the environment beats the config.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass

from triton_llama.status import ModelConfig, read_config
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf.setting import loaded
from perf.setting.loaded import Loaded

_ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ReadBack:
    """config: Triton's, of the model. loaded: what the model in it has loaded, and its settings."""

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
    """Return what a server that is ready runs with. Raises UnknownLogError if its log doesn't say it."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as response:
        return ReadBack(read_config(json.load(response)), loaded.read(server.log_text()))
