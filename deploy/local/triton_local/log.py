"""tritonserver's log: kept, filtered for a terminal, and searched for the reason of a failed start."""

import contextlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from triton_local.errors import InvalidSettingError

# Such as: E1121 00:42:30.407856 15449 model_lifecycle.cc:642] "failed to load ..."
_HEADER = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ([^:\]\s]+):\d+\] ?(.*)")

# Harmless on a machine without an NVIDIA GPU, and logged at every start there.
_NO_GPU_NOISE = (
    "Unable to allocate pinned system memory, pinned memory pool will not be available: CUDA driver version",
    "CudaDriverHelper has not been initialized.",
    "Failed to initialize NVML",
    "DCGM unable to start",
)
_DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# Errors of the command line have no header; a usage text of 300 lines may follow.
_COMPLAINT = re.compile(r"error: |(\S*/)?tritonserver: |.*error while loading shared libraries")
_LAST_LINES = 5
_PLACE = "\n\nAt:\n"
# Enough for any start, and bounded: a server may run for weeks.
_KEPT_LINES = 20_000


@dataclass(frozen=True)
class LogLine:
    """One line. severity: I, W, E or F, or "" for a line that isn't tritonserver's (a print, a traceback)."""

    severity: str
    source: str
    message: str


def parse_line(line: str) -> LogLine:
    """Split a line of the log, and unquote its message."""
    match = _HEADER.fullmatch(line)
    if match is None:
        return LogLine("", "", line)
    severity, source, message = match.groups()
    if message.startswith('"') and message.endswith('"') and len(message) > 1:
        try:
            message = str(json.loads(message))
        except ValueError:
            message = message[1:-1]  # quoted, but not as JSON
    return LogLine(severity, source, message)


def gpu_driver_present() -> bool:
    """Return whether this machine has an NVIDIA driver loaded."""
    return any(node.exists() for node in _DRIVER_NODES)


def is_no_gpu_noise(line: str) -> bool:
    """Return whether the line only reports that there is no GPU."""
    return any(phrase in line for phrase in _NO_GPU_NOISE)


class TerminalView:
    """Selects the lines for a terminal: warnings, errors, everything from Python, no other informational lines.

    On a machine with a GPU, no line about GPUs is hidden.
    """

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._severity = ""

    def shows(self, line: str) -> bool:
        """Return whether to show this line; call it once for each line, in order."""
        parsed = parse_line(line)
        if not self._has_gpu and is_no_gpu_noise(line):
            return False
        if parsed.severity:
            self._severity = parsed.severity
            return parsed.severity != "I" or _is_of_the_model(parsed)
        # tritonserver prints its tables as separate lines after an informational one.
        belongs_to_table = self._severity == "I" and line.startswith(("+-", "|"))
        return bool(line.strip()) and not belongs_to_table


def failure_reason(lines: Iterable[str]) -> str:
    """Return why the start failed: the models that failed to load, else errors, else the last lines of the log."""
    plain = [line for line in lines if line.strip() and not is_no_gpu_noise(line)]
    errors = [parsed.message for parsed in map(parse_line, plain) if parsed.severity in ("E", "F")]
    failed_loads = [message for message in errors if message.startswith("failed to load")]
    complaints = [line for line in plain if _COMPLAINT.match(line)]
    chosen = failed_loads or errors or complaints or plain[-_LAST_LINES:]
    unique = dict.fromkeys(_compact(message) for message in chosen)
    return "\n".join(unique) or "it wrote nothing"


def _is_of_the_model(line: LogLine) -> bool:
    return line.source.endswith(".py")


def _compact(message: str) -> str:
    """Return tritonserver's text of a Python exception without blank lines.

    A refusal by the model, such as of a setting, also loses its place in the code.
    """
    _, refusal, reason = message.partition("TritonModelException: ")
    if refusal:
        message = f"the model refused to load: {reason.partition(_PLACE)[0]}"
    return "\n".join(line.rstrip() for line in message.splitlines() if line.strip())


class ServerLog:
    """Lines of one server: the last 20,000 in memory, all in a file if there is one, each passed to a listener.

    Written from one thread, read from any. Raises InvalidSettingError when `file` can't be written.
    """

    def __init__(self, file: Path | None, listener: Callable[[str], None] | None) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        self._listener = listener
        try:
            self._file = None if file is None else file.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InvalidSettingError(f"log file {file} can't be written: {error.strerror}") from error

    def __enter__(self) -> "ServerLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def add(self, line: str) -> None:
        """Add a line."""
        with self._lock:
            self._lines.append(line)
            self._write(line)
        if self._listener is not None:
            self._listener(line)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:  # a full disk: serving goes on
            full, self._file = self._file, None
            with contextlib.suppress(OSError):  # its buffer doesn't fit either
                full.close()
            self._lines.append(f"triton_local: the log file can't be written any more: {error.strerror}")

    def lines(self) -> list[str]:
        """Return the last 20,000 lines, oldest first."""
        with self._lock:
            return list(self._lines)
