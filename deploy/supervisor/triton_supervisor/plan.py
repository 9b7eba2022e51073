"""What the supervisor runs: tritonserver's command, where it listens, and the operator's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triton_supervisor.triton_http import Address


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A server to run.

    arguments: tritonserver and its options, without those of `control_arguments`. environment: its whole environment.
    models: to load, each before those that call it. metrics: None when they are off. shm_prefix: as in
    `prefix_argument`. grace: seconds for accepted requests to finish during shutdown. notice: seconds of serving on
    before the drain. stuck: seconds without a step, although one is requested, until the model counts as dead; 0
    disables the probes. restarts: of a tritonserver that has died, within restart_minutes. state_file: JSON for probes.
    parent: a process id whose end requests the shutdown.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    models: tuple[str, ...]
    http: Address
    metrics: Address | None
    shm_prefix: str
    grace: float
    notice: float
    stuck: float
    restarts: int
    restart_minutes: float
    state_file: Path | None = None
    ready_port: int | None = None
    parent: int | None = None

    def to_json(self) -> str:
        """Return it as JSON, for `from_json`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of `to_json`."""
        values = json.loads(text)
        for name in ("arguments", "models"):
            values[name] = tuple(values[name])
        values["http"] = Address(*values["http"])
        values["metrics"] = values["metrics"] and Address(*values["metrics"])
        values["state_file"] = values["state_file"] and Path(values["state_file"])
        return cls(**values)
