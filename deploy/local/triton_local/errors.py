"""The launcher's errors, each with a message for the user.

LauncherError
├── MissingPartError        the wheel, its stub for this Python, or a shared libpython: exit code 2
├── InvalidSettingError     a port, host, variant, model or option that can't be used: exit code 2
├── StartFailedError        tritonserver ended before it was ready, or wasn't ready in time: exit code 1
└── InterruptedStartError   a signal came before it was ready: exit code 128 + signal
"""


class LauncherError(Exception):
    """Base of all; `str()` is the message, `exit_code` the command line's exit code."""

    exit_code = 2


class MissingPartError(LauncherError):
    """nvidia-pytriton isn't installed as a whole, has no stub for this Python, or that has no shared libpython."""


class InvalidSettingError(LauncherError):
    """A setting that can't be used; nothing is started."""


class StartFailedError(LauncherError):
    """tritonserver ended before it was ready, or wasn't ready in time; the message has the reason from its log."""

    exit_code = 1


class InterruptedStartError(LauncherError):
    """A signal came before the server was ready."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum} before the server was ready")
        self.exit_code = 128 + signum
