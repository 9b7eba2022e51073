"""The launcher's errors, each with a message for the user and the command line's exit code."""


class LauncherError(Exception):
    """Base of all; `str()` is the message."""

    exit_code = 2


class MissingPartError(LauncherError):
    """The wheel, its stub for this Python, a shared libpython, NumPy below 2, or the default checkpoint is missing."""


class InvalidSettingError(LauncherError):
    """A port, host, config, model or option can't be used; nothing is started."""


class StartFailedError(LauncherError):
    """tritonserver ended before it was ready, or wasn't ready in time; the message has the reason from its log."""

    exit_code = 1


class EndpointEndedError(LauncherError):
    """The OpenAI endpoint's process ended by itself; the server is ended, too."""

    exit_code = 70


class InterruptedStartError(LauncherError):
    """A signal came before the server was ready."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum} before the server was ready")
        self.exit_code = 128 + signum
