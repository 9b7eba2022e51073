"""How a server is supervised: what LocalTriton's user may say of it, and the guard's options for that.

What supervision does is `triton_supervisor`'s business.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.settings import DEFAULT_STUCK_S, STOP_MARGIN_S

from triton_local.errors import InvalidSettingError
from triton_local.guarded import Guarding
from triton_local.ports import Service

# After the running requests tritonserver unloads the models; `finalize` of a Python model has no limit of its own. This
# is what a server gets for it that nobody supervises.
_UNLOAD_S = 15.0


@dataclass(frozen=True)
class Supervised:
    """Seconds, and a file for probes.

    stuck_after: the model is dead if it makes no step for so long though it is asked for one; None doesn't ask, and
    notices only that its process is gone. notice: told to end, the server goes on serving for so long.
    """

    stuck_after: float | None = DEFAULT_STUCK_S
    notice: float = 0.0
    state_file: Path | None = None

    @property
    def stuck_seconds(self) -> float:
        """Seconds, as the model has them: 0 is never."""
        return 0.0 if self.stuck_after is None else self.stuck_after

    def check(self) -> None:
        """Raise InvalidSettingError for seconds that are out of their bounds."""
        if self.stuck_after is not None and not (math.isfinite(self.stuck_after) and self.stuck_after > 0):
            raise InvalidSettingError(f"stuck after {self.stuck_after} is out of bounds: more than 0 seconds")
        if not (math.isfinite(self.notice) and self.notice >= 0):
            raise InvalidSettingError(f"notice {self.notice} is out of bounds: 0 seconds or more")

    def guarding(self, grace: float, host: str, ports: Mapping[Service, int]) -> Guarding:
        """Return what the guard of such a server is told; `ports` are those of the services that are on."""
        options = ["--supervised", "--host", host, "--http-port", str(ports["http"]), "--notice", str(self.notice)]
        if "metrics" in ports:
            options += ["--metrics-port", str(ports["metrics"])]
        if self.stuck_after is not None:
            options += ["--stuck", str(self.stuck_after)]
        if self.state_file is not None:
            options += ["--state-file", str(self.state_file.absolute())]
        return Guarding(grace, self.notice + grace + STOP_MARGIN_S, tuple(options))


SUPERVISED = Supervised()
"""As `make serve` does it."""


def guarding(supervised: Supervised | None, grace: float, host: str, ports: Mapping[Service, int]) -> Guarding:
    """Return what the guard is told of a server that listens there. None: nobody supervises it."""
    if supervised is None:
        return Guarding(grace + _UNLOAD_S, grace + _UNLOAD_S)
    return supervised.guarding(grace, host, ports)
