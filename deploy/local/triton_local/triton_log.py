"""Lines of tritonserver's log, and the reason of a failed start in them."""

import json
import re
from collections.abc import Iterable

MAX_LINES = 20_000
"""`LocalTriton` keeps these in memory: enough for any start, and bounded, as a server may run for weeks."""

# Such as: E1121 00:42:30.407856 15449 model_lifecycle.cc:642] "failed to load ..."
_HEADER = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [^:\]\s]+:\d+\] ?(.*)")
# Errors of the command line have no header; a usage text of 300 lines may follow.
_COMPLAINT = re.compile(r"error: |triton_supervisor: |(\S*/)?tritonserver: |.*error while loading shared libraries")
_LAST_LINES = 5
_PLACE = "\n\nAt:\n"


def parse_line(line: str) -> tuple[str, str]:
    """Return a line's severity (I, W, E, F; "" for one that isn't tritonserver's) and its message, unquoted."""
    match = _HEADER.fullmatch(line)
    if match is None:
        return "", line
    severity, message = match.groups()
    try:
        return severity, str(json.loads(message))
    except ValueError:
        return severity, message.strip('"')  # quoted, but not as JSON


def failure_reason(lines: Iterable[str]) -> str:
    """Return why the start failed: the models that failed to load, else errors, else the last lines of the log."""
    plain = [line for line in lines if line.strip()]
    errors = [message for severity, message in map(parse_line, plain) if severity in ("E", "F")]
    failed_loads = [message for message in errors if message.startswith("failed to load")]
    complaints = [line for line in plain if _COMPLAINT.match(line)]
    chosen = failed_loads or [*errors, *complaints] or plain[-_LAST_LINES:]
    return "\n".join(dict.fromkeys(map(_compact, chosen))) or "it wrote nothing"


def _compact(message: str) -> str:
    """Return tritonserver's text of a Python exception without blank lines.

    A refusal by the model, such as of a setting, also loses its place in the code.
    """
    _, refusal, reason = message.partition("TritonModelException: ")
    if refusal:
        message = f"the model refused to load: {reason.partition(_PLACE)[0]}"
    return "\n".join(line.rstrip() for line in message.splitlines() if line.strip())
