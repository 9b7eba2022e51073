"""The launcher's errors, each with a message of one line.

LauncherError
├── before the start, exit code 2
│   ├── MissingWheelError            nvidia-pytriton isn't installed, or only in part
│   ├── UnsupportedInterpreterError  the wheel has no Python backend stub for this Python
│   ├── MissingLibpythonError        the interpreter has no shared libpython
│   ├── CacheError                   the runtime can't be kept in the cache folder
│   ├── UnknownRepositoryError       no such model repository, or no model in it
│   ├── UnknownVariantError          no such config
│   ├── UnknownModelError            neither a folder nor a hub id
│   ├── InvalidSettingError          a host, port or timeout out of its bounds
│   ├── ReservedArgumentError        an argument for tritonserver that the launcher itself sets
│   └── PortInUseError               a given port is taken
├── StartFailedError                 tritonserver ended before it was ready, exit code 1
├── NotReadyError                    tritonserver wasn't ready in time, exit code 1
└── InterruptedStartError            a signal came before it was ready, exit code 128 + signal
"""


class LauncherError(Exception):
    """Base of all; `str()` is the message, `exit_code` the command line's exit code."""

    exit_code = 2


class MissingWheelError(LauncherError):
    """nvidia-pytriton isn't installed, or only in part."""


class UnsupportedInterpreterError(LauncherError):
    """The wheel has no Python backend stub for this Python version."""


class MissingLibpythonError(LauncherError):
    """The interpreter has no shared libpython, which the stub links."""


class CacheError(LauncherError):
    """The assembled runtime can't be kept in the cache folder."""


class UnknownRepositoryError(LauncherError):
    """There is no model repository at that path, or not our model in it."""


class UnknownVariantError(LauncherError):
    """There is no config of that name; Triton would silently fall back to config.pbtxt."""


class UnknownModelError(LauncherError):
    """The value is neither an existing folder nor a hub id."""


class InvalidSettingError(LauncherError):
    """A host, port or timeout out of its bounds."""


class ReservedArgumentError(LauncherError):
    """An argument for tritonserver that the launcher itself sets, or that is no option."""


class PortInUseError(LauncherError):
    """A given port is taken."""


class StartFailedError(LauncherError):
    """tritonserver ended before it was ready; the message has the reason from its log."""

    exit_code = 1


class NotReadyError(LauncherError):
    """tritonserver wasn't ready in time."""

    exit_code = 1


class InterruptedStartError(LauncherError):
    """A signal came before the server was ready."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum} before the server was ready")
        self.exit_code = 128 + signum
