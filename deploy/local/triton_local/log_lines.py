"""Reading tritonserver's log: which lines a person at a terminal wants, and why a start failed.

Works on lines that are already there; knows nothing about processes. The full log is never changed, only what is shown.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# For instance: E1121 00:42:30.407856 15449 model_lifecycle.cc:642] "failed to load ..."
_HEADER = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ([^:\]\s]+):\d+\] ?(.*)")

# What every start says on a machine without an NVIDIA GPU, and which is true and harmless there.
_NO_GPU_NOISE = (
    "Unable to allocate pinned system memory, pinned memory pool will not be available: CUDA driver version",
    "CudaDriverHelper has not been initialized.",
    "Failed to initialize NVML",
    "DCGM unable to start",
)
_DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# The command line's own complaints come without a header; a usage text of 300 lines may follow.
_COMPLAINT = re.compile(r"error: |(\S*/)?tritonserver: |.*error while loading shared libraries")
_LAST_LINES = 5
_PLACE = "\n\nAt:\n"
_STARTUP_CRASH = "boost::interprocess::lock_exception"


@dataclass(frozen=True)
class LogLine:
    """One line: `severity` I, W, E or F, or "" for a line that isn't tritonserver's (a print, a traceback)."""

    severity: str
    source: str
    message: str


def parse_line(line: str) -> LogLine:
    """Split a line of the log; tritonserver's quoting of the message is undone."""
    match = _HEADER.fullmatch(line)
    if match is None:
        return LogLine("", "", line)
    severity, source, message = match.groups()
    if message.startswith('"') and message.endswith('"') and len(message) > 1:
        try:
            message = str(json.loads(message))
        except ValueError:
            message = message[1:-1]  # quoted, but not as JSON: still readable
    return LogLine(severity, source, message)


def gpu_driver_present() -> bool:
    """Whether this machine has an NVIDIA driver loaded."""
    return any(node.exists() for node in _DRIVER_NODES)


def is_no_gpu_noise(line: str) -> bool:
    """Whether the line only says that there is no GPU."""
    return any(phrase in line for phrase in _NO_GPU_NOISE)


class TerminalView:
    """Decides line by line what is shown: warnings, errors, everything from Python; not tritonserver's own chatter.

    With a GPU in the machine nothing about GPUs is hidden.
    """

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._severity = ""

    def shows(self, line: str) -> bool:
        """Whether to show this line; call once for each line, in order."""
        parsed = parse_line(line)
        if not self._has_gpu and is_no_gpu_noise(line):
            return False
        if parsed.severity:
            self._severity = parsed.severity
            return parsed.severity != "I" or _is_of_the_model(parsed)
        # tritonserver prints its tables as lines of their own after an information.
        belongs_to_table = self._severity == "I" and line.startswith(("+-", "|"))
        return bool(line.strip()) and not belongs_to_table


def failure_reason(lines: Iterable[str]) -> str:
    """Why the server didn't come up, from its log: the models that failed to load, else errors, else its last lines."""
    plain = [line for line in lines if line.strip() and not is_no_gpu_noise(line)]
    errors = [parsed.message for parsed in map(parse_line, plain) if parsed.severity in ("E", "F")]
    failed_loads = [message for message in errors if message.startswith("failed to load")]
    complaints = [line for line in plain if _COMPLAINT.match(line)]
    chosen = failed_loads or errors or complaints or plain[-_LAST_LINES:]
    unique = dict.fromkeys(_compact(message) for message in chosen)
    return "\n".join(unique) or "it wrote nothing"


def names_taken_port(lines: Iterable[str], ports: Iterable[int]) -> bool:
    """Whether the log says that one of `ports` was already taken."""
    endings = tuple(f":{port}" for port in ports)
    return any(
        "already in use" in line and any(re.search(rf"{ending}\b", line) for ending in endings) for line in lines
    )


def names_startup_crash(lines: Sequence[str]) -> bool:
    """Whether tritonserver crashed in a race of its own, before the model ran: another start most likely succeeds.

    triton-inference-server/server issue 8882; here once in some 400 starts, with more to do than the machine has cores.
    """
    return any(_STARTUP_CRASH in line for line in lines) and not any(map(_is_of_the_model, map(parse_line, lines)))


def _is_of_the_model(line: LogLine) -> bool:
    return line.source.endswith(".py")


def _compact(message: str) -> str:
    """A Python exception as tritonserver words it, without its blank lines.

    One that the model raised for the reader, a refused setting, also goes without the place in the code.
    """
    _, refusal, said = message.partition("TritonModelException: ")
    if refusal:
        message = f"the model refused to load: {said.partition(_PLACE)[0]}"
    return "\n".join(line.rstrip() for line in message.splitlines() if line.strip())
